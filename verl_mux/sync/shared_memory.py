"""Where weights pass from a rollout worker to the engine beside it on a machine without GPU: a folder in shared memory."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import psutil
import torch
from safetensors.torch import save_file

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "verl_mux_"


@contextlib.contextmanager
def folder(parent: Path = SHARED_MEMORY) -> Iterator[Path]:
    """A new folder for the length of a block."""
    remove_orphans(parent)
    path = parent / f"{_PREFIX}{os.getpid()}_{uuid4().hex}"
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def checkpoint(tensors: dict[str, torch.Tensor], model: Path) -> Iterator[Path]:
    """A folder that an engine can load: these full tensors, contiguous and sharing no memory, under the config of `model`."""
    with folder() as directory:
        save_file(tensors, directory / "model.safetensors")
        shutil.copy(model / "config.json", directory)
        yield directory


def remove_orphans(parent: Path) -> None:
    """Remove what processes that were killed in the middle of a sync left there."""
    for path in parent.glob(f"{_PREFIX}*_*"):
        pid = path.name.removeprefix(_PREFIX).partition("_")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(path, ignore_errors=True)
