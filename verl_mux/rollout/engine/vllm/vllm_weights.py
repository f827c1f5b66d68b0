"""The weights of a sync into vLLM (see ../region_weights.py), by a call of its workers' method `mux_load`.

Runs in rollout workers, called by rollout/engine/replica.py. verl's own way, a socket and a bucket of shared memory for each
rank, is not taken: its socket's name is the same for two jobs that each have a Ray cluster of their own on one host.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from typing import Any

import ray
import torch

from verl_mux.rollout.engine import region_weights
from verl_mux.rollout.engine.region_weights import Place
from verl_mux.sync.engine import Batch


class Adapter:
    """In the place of verl's, which imports vLLM into a process that has no other use for it: half a minute, and 300 MB."""

    def __init__(self, rollout_config: Any, replica_rank: int) -> None:
        self.replica_rank = replica_rank
        self.is_leader_rank = int(os.environ["RANK"]) == 0  # of this replica's workers
        self._name = f"{rollout_config.name}_server_{replica_rank}_0"

    def server(self) -> Any:
        """verl's first server of this replica, at the first worker; None at the others."""
        return ray.get_actor(self._name) if self.is_leader_rank else None


async def load(
    adapter: Adapter, batches: AsyncGenerator[Batch, None], global_steps: int | None, lora: dict[str, Any] | None
) -> None:
    """Load all of `batches` into the engine of `adapter` and note their version (None: none of it is loaded, see
    region_weights.py); as the record says. Raises SyncError."""
    server = adapter.server()

    async def hand(batch: Batch, places: list[Place]) -> None:
        await server.mux_load.remote(region_weights.body(batch, places), lora)

    # verl makes one process group of a replica's rollout workers.
    await region_weights.load(batches, torch.distributed.group.WORLD, None if server is None else hand)
    if server is not None and global_steps is not None:
        await server.mux_loaded.remote(global_steps, lora is None)
