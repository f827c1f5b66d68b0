"""Polars on one thread: the machine is shared, and the logs here are small."""

import os

os.environ.setdefault("POLARS_MAX_THREADS", "1")
