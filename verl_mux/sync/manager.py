"""verl's checkpoint engine manager for engines that are asleep: no requests to abort, no KV cache to release."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Sequence
from typing import Any

import ray
from verl.checkpoint_engine.base import CheckpointEngineManager, CheckpointEngineWorker
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from verl.utils.ray_utils import auto_await

from verl_mux.sync.failure import Lost, SyncError
from verl_mux.sync.planning.topology import LINKS


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
    async def update_weights(
        self, global_steps: int | None = None, token: int | None = None, asleep: Collection[int] = ()
    ) -> dict[str, Any]:
        """Fill every replica's weights with the trainer's, under the lease `token`; but for those asleep (ranks), whose hosts get
        them alone.

        Returns figures: bytes by class of link, seconds of each part where they were most, ranks.

        Raises:
            SyncError: with what each of those that failed says. By then nobody takes part any more.
        Exception: what else went wrong for one of them.
        """
        rollout = self._workers()
        sending = self.actor_wg.update_weights(global_steps=global_steps, mode=self.backend)
        taking = rollout.update_weights(global_steps=global_steps, token=token, asleep=sorted(asleep))
        outcomes = await settled([*sending, *taking])
        raise_failure(outcomes)
        return figures(outcomes, self.actor_wg.world_size)


async def settled(taking_part: Sequence[Awaitable]) -> list[Any]:
    """What each returned, or its error. Where the sync itself fails, all end soon and are waited for; any other error (a lost
    actor, a lease that is gone) is there at once, and None for those that still take part: the next sync ends them.
    """
    tasks = [asyncio.ensure_future(it) for it in taking_part]
    left = set(tasks)
    while left:
        done, left = await asyncio.wait(left, return_when=asyncio.FIRST_EXCEPTION)
        if any((error := it.exception()) and not isinstance(_cause(error), SyncError) for it in done):
            break
    return [(it.exception() or it.result()) if it.done() else None for it in tasks]


def raise_failure(outcomes: list[Any]) -> None:
    """The first error that is no consequence of another's, as itself; of a sync, what all say of it.

    Raises:
        SyncError: only the sync failed.
    """
    errors = [_cause(it) for it in outcomes if isinstance(it, BaseException)]
    others = [error for error in errors if not isinstance(error, SyncError)]
    if others:
        raise others[0]
    if errors:
        said = dict.fromkeys(str(error) for error in sorted(errors, key=lambda error: isinstance(error, Lost)))
        raise SyncError("the weight sync failed: " + "; ".join(said))


def _cause(error: BaseException) -> BaseException:
    """Ray wraps what an actor raised."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, SyncError) else error


def figures(outcomes: list[Any], ranks: int) -> dict[str, Any]:
    """Bytes are added up over all ends, seconds are those of the slowest; `mux/sync/bytes`: weights that trainers sent."""
    told = [it if isinstance(it, dict) else {} for it in outcomes]
    found: dict[str, Any] = {f"mux/sync/{link}_bytes": 0.0 for link in LINKS}
    for each in told:
        for name, value in each.items():
            found[name] = found.get(name, 0.0) + value if name.endswith("_bytes") else max(found.get(name, 0.0), value)
    found["mux/sync/bytes"] = sum(it.get("mux/sync/sent_bytes", 0.0) for it in told[:ranks])
    return {**found, "ranks": ranks}
