"""verl's checkpoint engine manager for engines that are asleep: no requests to abort, no KV cache to release."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from verl.checkpoint_engine.base import CheckpointEngineManager, CheckpointEngineWorker
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from verl.utils.ray_utils import auto_await


class MuxCheckpointManager(CheckpointEngineManager):
    """Syncs weights into mapped, idle engines."""

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
    async def update_weights(self, global_steps: int | None = None, token: int | None = None) -> dict[str, Any]:
        """Fill every replica's weights with the trainer's, under the lease `token`.

        Returns figures: bytes over the slow link, ranks, seconds.
        """
        rollout = self._workers()
        sending = self.actor_wg.update_weights(global_steps=global_steps, mode=self.backend)
        results = await asyncio.gather(*sending, *rollout.update_weights(global_steps=global_steps, token=token))
        sent = [result for result in results[: self.actor_wg.world_size] if isinstance(result, dict)]
        return {
            "mux/sync/bytes": sum(r.get("mux/sync/sent_bytes", 0.0) for r in sent),
            "mux/sync/send_seconds": max((r.get("mux/sync/send_seconds", 0.0) for r in sent), default=0.0),
            "ranks": len(sent),
        }
