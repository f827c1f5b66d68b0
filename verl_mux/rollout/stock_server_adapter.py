"""verl's server adapter for its own trainer modes where there is no GPU: weights go through shared memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import torch
from verl.workers.rollout.sglang_rollout.sglang_rollout import ServerAdapter

from verl_mux.sync import shared_memory

Weight = tuple[str, torch.Tensor]


class CpuServerAdapter(ServerAdapter):
    """Everything but the transport is verl's. One rank holds whole tensors; more are not known to run without GPUs."""

    async def update_weights(
        self, weights: Iterable[Weight] | AsyncIterator[Weight], global_steps: int | None = None, **kwargs
    ) -> None:
        """Load (name, full tensor) pairs into the engine and note their version. A trainer's worker gives them as it gathers
        them, a checkpoint engine as they arrive."""
        await self._init_server_adapter()
        # Every rank takes part in gathering.
        pairs = [pair async for pair in weights] if isinstance(weights, AsyncIterator) else weights
        # Tied weights share memory, which safetensors refuses.
        tensors = {name: tensor.detach().contiguous().clone() for name, tensor in pairs}
        if self._engine is None:
            return
        with shared_memory.checkpoint(tensors, Path(self.model_config.local_path)) as directory:
            await self._engine._make_async_request(
                "update_weights_from_disk", {"model_path": str(directory), "load_format": "auto", "flush_cache": True}
            )
        if global_steps is not None:
            await self.server_actor.set_global_steps.remote(global_steps)
