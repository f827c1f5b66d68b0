"""Hands weights from a worker to the engine beside it where there is no GPU: through a folder in shared memory.

verl's adapter sends device handles, which tensors in host memory do not have. Ours takes its place in verl's registry on the CPU
platform (see on_cpu.py), for our trainer modes and for verl's own. Runs in rollout and trainer workers; made by verl.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from uuid import uuid4

import psutil
import torch
from safetensors.torch import save_file
from verl.workers.rollout.sglang_rollout.sglang_rollout import ServerAdapter

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "verl_mux_"

Weight = tuple[str, torch.Tensor]


class CpuServerAdapter(ServerAdapter):
    """Everything but the transport is verl's."""

    async def update_weights(
        self, weights: Iterable[Weight] | AsyncIterator[Weight], global_steps: int | None = None, **kwargs
    ) -> None:
        """Load (name, full tensor) pairs into the engine and note their version."""
        await self._init_server_adapter()
        # Every rank takes part in gathering, the first one of an engine hands over.
        tensors = await _gather(weights)
        if self._engine is None:
            return
        with checkpoint(tensors, Path(self.model_config.local_path)) as directory:
            await self._engine._make_async_request(
                "update_weights_from_disk", {"model_path": str(directory), "load_format": "auto", "flush_cache": True}
            )
        if global_steps is not None:
            await self.server_actor.set_global_steps.remote(global_steps)


async def _gather(weights: Iterable[Weight] | AsyncIterator[Weight]) -> dict[str, torch.Tensor]:
    """A checkpoint engine gives tensors that stay as they are, a trainer's worker its own ones; of both some may be tied: those
    share memory, which safetensors refuses."""
    if isinstance(weights, AsyncIterator):
        found: dict[str, torch.Tensor] = {}
        held: set[int] = set()
        async for name, tensor in weights:
            found[name] = tensor.clone() if tensor.data_ptr() in held else tensor
            held.add(tensor.data_ptr())
        return found
    return {name: tensor.detach().contiguous().clone() for name, tensor in weights}


@contextlib.contextmanager
def checkpoint(tensors: dict[str, torch.Tensor], model: Path) -> Iterator[Path]:
    """A folder that an engine can load: these full tensors, contiguous and sharing no memory, under the config of `model`."""
    remove_orphans(SHARED_MEMORY)
    path = SHARED_MEMORY / f"{_PREFIX}{os.getpid()}_{uuid4().hex}"
    path.mkdir()
    try:
        save_file(tensors, path / "model.safetensors")
        shutil.copy(model / "config.json", path)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def remove_orphans(parent: Path) -> None:
    """Remove what processes that were killed in the middle of a sync left there."""
    for path in parent.glob(f"{_PREFIX}*_*"):
        pid = path.name.removeprefix(_PREFIX).partition("_")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(path, ignore_errors=True)
