"""The weights of a sync into vLLM (see ../region_weights.py), by a call of its workers' method `mux_load`.

Runs in rollout workers, called by rollout/engine/replica.py. verl's own way, a socket and a bucket of shared memory for each
rank, is not taken: its socket's name is the same for two jobs that each have a Ray cluster of their own on one host.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import torch

from verl_mux.rollout.engine import region_weights
from verl_mux.rollout.engine.region_weights import Place
from verl_mux.sync.engine import Batch


async def load(adapter: Any, batches: AsyncGenerator[Batch, None], global_steps: int | None) -> None:
    """Load all of `batches` into the engine of verl's `adapter` and note their version. Raises SyncError."""
    server: Any = adapter.server_handle if adapter._ensure_server_handle() else None

    async def hand(batch: Batch, places: list[Place]) -> None:
        await server.mux_load.remote(region_weights.body(batch, places))

    # verl makes one process group of a replica's rollout workers.
    await region_weights.load(batches, torch.distributed.group.WORLD, None if server is None else hand)
    if server is not None:
        await server.mux_loaded.remote(global_steps)
