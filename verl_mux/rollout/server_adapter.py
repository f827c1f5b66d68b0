"""Hands synced weights to the engine: over CUDA IPC as verl does, through shared memory where there is no GPU."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import ray
import torch
from verl.utils.device import get_device_name
from verl.workers.rollout.sglang_rollout.sglang_rollout import ServerAdapter

from verl_mux.sync import shared_memory


class MuxServerAdapter(ServerAdapter):
    """verl's server adapter with a CPU path."""

    async def update_weights(self, weights: AsyncIterator, global_steps: int | None = None, **kwargs) -> None:
        """Load (name, full tensor) pairs into the engine and note their version."""
        if get_device_name() != "cpu":
            await super().update_weights(weights, global_steps=global_steps, **kwargs)
            return
        server = ray.get_actor(f"sglang_server_{self.replica_rank}_{self.node_rank}")
        tensors: dict[str, torch.Tensor] = {name: tensor async for name, tensor in weights}
        with shared_memory.checkpoint(tensors, Path(self.model_config.local_path)) as directory:
            await server.load_weights.remote(str(directory), global_steps)
