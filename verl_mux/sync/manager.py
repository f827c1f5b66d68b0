"""verl's checkpoint engine manager for engines that are asleep: no requests to abort, no KV cache to release."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import ray
from verl.checkpoint_engine.base import CheckpointEngineManager, CheckpointEngineWorker
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from verl.utils.ray_utils import auto_await


class MuxCheckpointManager(CheckpointEngineManager):
    """Syncs weights into mapped, idle engines, and moves their tags."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._rollout: RayWorkerGroup | None = None

    def _workers(self) -> RayWorkerGroup:
        if self._rollout is None:
            workers = [worker for replica in self.replicas for worker in replica.workers]
            cls = RayClassWithInitArgs(cls=ray.remote(CheckpointEngineWorker))
            self._rollout = RayWorkerGroup(worker_handles=workers, ray_cls_with_init=cls)
            self.build_process_group(self._rollout)
        return self._rollout

    @auto_await
    async def update_weights(self, global_steps: int | None = None) -> dict[str, Any]:
        """Fill every replica's weights with the trainer's. Returns figures: bytes over the slow link, ranks, seconds."""
        rollout = self._workers()
        sending = self.actor_wg.update_weights(global_steps=global_steps, mode=self.backend)
        results = await asyncio.gather(*sending, *rollout.update_weights(global_steps=global_steps))
        sent = [result for result in results[: self.actor_wg.world_size] if isinstance(result, dict)]
        return {
            "mux/sync/bytes": sum(r.get("mux/sync/sent_bytes", 0.0) for r in sent),
            "mux/sync/send_seconds": max((r.get("mux/sync/send_seconds", 0.0) for r in sent), default=0.0),
            "ranks": len(sent),
        }

    @auto_await
    async def move_replicas(
        self, verb: str, tags: list[str] | None, ranks: Sequence[int] | None = None
    ) -> list[dict[str, dict[str, float]]]:
        """`verb` "sleep" or "wake" on these replicas (None: all); figures by tag, one entry a replica."""
        replicas = self.replicas if ranks is None else [self.replicas[rank] for rank in ranks]
        return await asyncio.gather(*[r.sleep(tags) if verb == "sleep" else r.wake_up(tags) for r in replicas])

    @auto_await
    async def replica_processes(self) -> list[tuple[int, float]]:
        """(pid, creation time) of all server processes."""
        found = await asyncio.gather(*[replica.processes() for replica in self.replicas])
        return [process for replica in found for process in replica]
