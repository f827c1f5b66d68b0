"""Do the actors live that a rollout needs? One that has died would keep its job, and the nodes that it holds, for ever.

What is asked of a dead engine, load balancer or reward worker fails, and verl draws other prompts in the place of those that
failed. What is asked of a dead TransferQueue is never answered. A prompt on a dead agent loop worker never ends.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError

from verl_mux.errors import Failure
from verl_mux.trainer.phases import Phases

log = logging.getLogger(__name__)

# The next one waits for the node: 10 s at most from a death to its lease, with the job's own end in between.
_EVERY_S = 1.0
# Whoever has answered is asked again in the next round; whoever is busy need not answer.
_ANSWER_S = 1.0
# Longer than a trainer in a rollout goes without `check`, unless what it waits for is dead.
_PATIENCE_S = 30.0


class DeadActor(Failure):
    """An actor that the job's rollouts need has died; the cause is Ray's error."""


class _Trainer(Protocol):
    agent_loop_manager: Any
    rollout_server_manager: Any

    def get_reward_handles(self) -> list | None: ...


def actors_of_rollout(trainer: _Trainer) -> dict[str, Any]:
    """Ray's handles, by what people call them. Once the agent loop manager is there."""
    engines = trainer.rollout_server_manager
    return {
        "the load balancer": engines.global_load_balancer,
        **{f"server {at} of replica {it.replica_rank}": s for it in engines.get_replicas() for at, s in enumerate(it.servers)},
        **{f"agent loop worker {at}": worker for at, worker in enumerate(trainer.agent_loop_manager.agent_loop_workers)},
        **{f"reward worker {at}": worker for at, worker in enumerate(trainer.get_reward_handles() or [])},
        **_transfer_queue(),
    }


def _transfer_queue() -> dict[str, Any]:
    """Its controller and its storage units. No other job's: a Ray cluster has one job."""
    named = ray.util.list_named_actors(all_namespaces=True)
    return {it["name"]: ray.get_actor(**it) for it in named if it["name"].startswith("TransferQueue")}


class ActorWatch:
    """Looks after `actors`, by name, in a thread of its own for as long as it is entered.

    A trainer that calls `check` hears of a death, and one that asked the dead and leaves with Ray's error hears who it was. One
    that does not leave within `patience_s` waits for the dead itself, and `end` is called, in that thread: it ends the process.
    """

    def __init__(
        self, actors: dict[str, Any], end: Callable[[DeadActor], None], every_s: float = _EVERY_S, patience_s: float = _PATIENCE_S
    ) -> None:
        self._actors, self._end, self._every_s, self._patience_s = actors, end, every_s, patience_s
        self._asked: dict[str, ray.ObjectRef] = {}
        self._dead: DeadActor | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="verl-mux-actors", daemon=True)

    def __enter__(self) -> ActorWatch:
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._thread.join(10 * _ANSWER_S)
        if isinstance(error, RayActorError) and (dead := self._dead or self._look()) is not None:
            raise dead

    def check(self) -> None:
        """Asks nobody. Raises DeadActor."""
        if self._dead is not None:
            raise self._dead

    def _watch(self) -> None:
        while self._dead is None:
            if self._over.wait(self._every_s):
                return
            self._dead = self._look()
        if not self._over.wait(self._patience_s):
            self._end(self._dead)

    def _look(self) -> DeadActor | None:
        for name in self._actors.keys() - self._asked.keys():
            self._asked[name] = self._actors[name].__ray_ready__.remote()
        answered, _ = ray.wait(list(self._asked.values()), num_returns=len(self._asked), timeout=_ANSWER_S)
        died: dict[str, ActorDiedError] = {}
        for name in [name for name, asked in self._asked.items() if asked in answered]:
            try:
                ray.get(self._asked.pop(name))
            except ActorUnavailableError:  # nobody knows yet
                pass
            except ActorDiedError as error:
                died[name] = error
        if not died:
            return None
        dead = DeadActor(f"no rollout can end any more: {' and '.join(died)} died")
        dead.__cause__ = next(iter(died.values()))
        return dead


def end_process(phases: Phases, dead: Failure) -> None:
    """Ends this process, and with it its actors, at once: its main thread waits for the dead and cannot be woken."""
    try:
        log.critical("%s: this process ends. %s", dead, dead.__cause__ or "")
        phases.fail(str(dead))
        phases.log.close()
    finally:
        os._exit(1)
