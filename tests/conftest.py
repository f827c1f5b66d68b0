"""Fixtures of more than one area. Real files, sockets and process groups; nothing here starts Ray or an engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Two cores are shared by everything that runs here, and the tests' tensors are small.
os.environ.setdefault("OMP_NUM_THREADS", "1")


# Where the tests run in the background of a shell, SIGINT is ignored, here and in every process that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
# The same examples in every run, so that a change is judged by itself; HYPOTHESIS_PROFILE=search looks for new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.fixture
def one_rank_mesh(tmp_path) -> Iterator:
    """A device mesh over a gloo world of this process alone."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def python() -> Callable[..., subprocess.CompletedProcess]:
    """Run `python ARGUMENTS...` in a process of its own, with these variables set; None takes one away."""

    def run(
        *arguments: str, timeout: float = 120.0, cwd: Path | None = None, **environment: str | None
    ) -> subprocess.CompletedProcess:
        merged = {k: v for k, v in {**os.environ, **environment}.items() if v is not None}
        command = [sys.executable, *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=merged, cwd=cwd, timeout=timeout, check=False)

    return run
