"""Reads event logs without numpy or polars: in the trainer (a step's metrics), the launcher and benches; report/ builds on it."""
