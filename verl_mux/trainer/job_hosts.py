"""Where a job's processes run, and whether they live: hosts of its worker groups, actors that a rollout needs, the network.

Runs in the trainer's driver; called by trainer/modes.py. Asks Ray where processes run and which actors have died; tries
connections to the hosts. `ActorWatch` and `HostWatch` each have a thread.

A dead actor or a cut-off host would keep its job, and the nodes that the job holds, for ever: verl draws other prompts where
calls to a dead engine, load balancer or reward worker failed; a call to a dead TransferQueue is never answered; a prompt on a
dead agent loop worker and a collective with a cut-off rank never end, and Ray may take five minutes to report a lost call.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from types import TracebackType
from typing import TYPE_CHECKING, Any

import ray
from omegaconf import DictConfig, OmegaConf
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError
from verl.single_controller.ray.base import RayResourcePool, ResourcePoolManager
from verl.trainer.ppo.utils import Role
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path, get_checkpoint_tracker_filename

from verl_mux.config.job_checks import own_pools
from verl_mux.config.queue_namespace import CONTROLLER, namespace
from verl_mux.coordinator.bus.client import LocalMux
from verl_mux.errors import Failure
from verl_mux.places.place import Location, Place, check, resource_of
from verl_mux.places.ray_nodes import OWN, PlacedPool, check_cluster, check_own, in_rank_order, ray_node_of, ray_nodes
from verl_mux.trainer.phases import Phases
from verl_mux.worker_settings import WorkerSettings, node_of

if TYPE_CHECKING:
    from verl_mux.places.ray_nodes import RayNode

log = logging.getLogger(__name__)

_EVERY_S = 1.0  # the next job waits for the nodes: 10 s at most from a death to its lease, with this job's own end in between
_ACTOR_ANSWER_S = 1.0  # an actor that answered is asked again in the next round; a busy one need not answer
_PATIENCE_S = 30.0  # longer than a trainer in a rollout goes without `check`, unless it waits for a dead actor
_HOST_ANSWER_S = 2.0
# A host that refuses, or too few files of our own, is another matter.
_NO_WAY = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)

Address = tuple[str, int]


# ---------------------------------------------------------------- set-up


def settle_nodes(client: LocalMux, config: DictConfig, colocated: bool) -> tuple[list[str], list[str], dict[str, Place]]:
    """Rollout and training nodes that the coordinator gives the job, in the order in which Ray puts ranks on them, and where each
    is. Without a coordinator the job is alone, and nodes are names.

    Raises UserError: Ray cannot put the job on its nodes, or it could not be checked whether it did.
    """
    rollout, train = list(client.nodes["rollout"]), list(client.nodes["train"])
    if client.address is None:
        return rollout, train, {}
    places, cluster = {node: client.place(node) for node in (*rollout, *train)}, ray_nodes()
    asked = dict.fromkeys(train, int(config.trainer.n_gpus_per_node))
    for node in [] if colocated else rollout:
        asked[node] = asked.get(node, 0) + int(config.actor_rollout_ref.rollout.n_gpus_per_node)
    check_cluster(places, asked, cluster)
    if own := sum(prod(int(OmegaConf.select(config, key)) for key in keys) for keys in own_pools(config)):
        check_own(own, any(place.host is not None for place in places.values()), cluster)
    return in_rank_order(rollout, places, cluster), in_rank_order(train, places, cluster), places


def checkpoint_to_resume(config: DictConfig) -> str | None:
    """The folder from which verl will go on, as verl determines it."""
    trainer = config.trainer
    if trainer.resume_mode == "resume_path":
        return os.path.abspath(trainer.resume_from_path)
    folder = os.path.abspath(trainer.default_local_dir)
    if trainer.resume_mode != "auto" or not os.path.exists(get_checkpoint_tracker_filename(folder)):
        return None
    return find_latest_ckpt_path(folder)


@dataclass
class PlacedPools(ResourcePoolManager):
    """verl's pools of a trainer: the actor's on the training nodes (none: wherever Ray puts it), others on GPUs of their own.

    nodes: in the order of ranks, see PlacedPool. before_own: called when verl is about to start what runs on GPUs of its own,
    minutes that need no training node.
    """

    nodes: Mapping[str, tuple[Place, int]] = field(default_factory=dict)
    before_own: Callable[[], None] = lambda: None

    def create_resource_pool(self) -> None:
        super().create_resource_pool()
        for name, pool in self.resource_pool_dict.items() if self.nodes else ():
            if name == self.mapping[Role.Actor]:
                self.resource_pool_dict[name] = PlacedPool(self.nodes, pool.store[0], self.max_colocate_count, name)
            else:  # what verl offers for a kind of accelerator is a custom resource like any other
                pool.accelerator_type = resource_of(OWN)

    def get_resource_pool(self, role: Role) -> RayResourcePool:
        if role in (Role.RewardModel, Role.TeacherModel):
            self.before_own()
        return super().get_resource_pool(role)


def check_ranks(ranks: Sequence[Location], settings: WorkerSettings) -> None:
    """Before the ranks of a training group touch a device. Raises UserError naming each that runs on a wrong node."""
    nodes = settings.train_nodes
    located = [(f"training rank {rank}", node_of(nodes, rank, len(ranks)), at) for rank, at in enumerate(ranks)]
    check(located, settings.places)


# ---------------------------------------------------------------- actors


class DeadActor(Failure):
    """The cause is Ray's error."""


def own_replicas(trainer: Any) -> dict[str, Any]:
    """verl's replicas of a trainer's reward model and teachers, by the names that users know."""
    reward = getattr(trainer.reward_loop_manager, "reward_model_manager", None)
    teachers = getattr(trainer.teacher_model_manager, "teacher_model_managers", {})
    managers = {"the reward model": reward, **{f"teacher {key}": it for key, it in teachers.items()}}
    return {f"replica {it.replica_rank} of {who}": it for who, of in managers.items() if of for it in of.rollout_replicas}


def actors_of_rollout(
    engines: Any, workers: Sequence[Any], reward_workers: Sequence[Any], own: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Ray's handles, by the names that users know. engines: MuxLLMServerManager. workers: the agent loop workers. own: replicas
    of other models that a sample needs."""
    stores = [name for name in ray.util.list_named_actors() if name.startswith("TransferQueue")]
    return {
        "the load balancer": engines.global_load_balancer,
        **{f"server {at} of replica {it.replica_rank}": s for it in engines.get_replicas() for at, s in enumerate(it.servers)},
        **{f"server {at} of {who}": server for who, it in (own or {}).items() for at, server in enumerate(it.servers)},
        **{f"agent loop worker {at}": worker for at, worker in enumerate(workers)},
        **{f"reward worker {at}": worker for at, worker in enumerate(reward_workers)},
        **{name: ray.get_actor(name) for name in stores},
        CONTROLLER: ray.get_actor(CONTROLLER, namespace()),
    }


class ActorWatch:
    """Looks after `actors`, by name, in a thread of its own for as long as it is entered.

    A trainer that calls `check` gets a DeadActor; so does one that leaves the block with Ray's error about a dead actor. A
    trainer that does neither within `patience_s` waits for the dead actor itself, and `end` is called, in that thread: it ends
    the process.
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
        self._thread.join(10 * _ACTOR_ANSWER_S)
        if isinstance(error, RayActorError) and (dead := self._dead or self._look()) is not None:
            raise dead

    def check(self) -> None:
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
        answered, _ = ray.wait(list(self._asked.values()), num_returns=len(self._asked), timeout=_ACTOR_ANSWER_S)
        died: dict[str, ActorDiedError] = {}
        for name in [name for name, asked in self._asked.items() if asked in answered]:
            try:
                with contextlib.suppress(ActorUnavailableError):  # Ray does not know yet
                    ray.get(self._asked.pop(name))
            except ActorDiedError as error:
                died[name] = error
        if not died:
            return None
        dead = DeadActor(f"no rollout can end any more: {' and '.join(died)} died")
        dead.__cause__ = next(iter(died.values()))
        return dead


def end_process(phases: Phases, reason: Failure) -> None:
    """Ends this process, and with it its actors, at once: its main thread waits for a dead actor and cannot be woken."""
    try:
        log.critical("%s: this process ends. %s", reason, reason.__cause__ or "")
        phases.fail(str(reason))
        phases.log.close()
    finally:
        os._exit(1)


# ---------------------------------------------------------------- hosts


def hosts_of(places: Mapping[str, Place], cluster: Sequence[RayNode], here: str) -> dict[str, Address]:
    """Where Ray listens on the hosts of these mux nodes but `here`, this host's own address; by the names that users know."""
    on: dict[Address, list[str]] = {}
    for node, place in places.items():
        if place.host is not None and (at := ray_node_of(node, place, cluster)).address != here:
            on.setdefault((at.address, at.port), []).append(node)
    return {f"the host of {' and '.join(nodes)} ({at[0]})": at for at, nodes in on.items()}


class HostWatch:
    """Tries to connect to each of `hosts` once a second, in a thread of its own until `close`.

    `end` is called in that thread when one that answered before has not for `limit_s` seconds of this process's running time.
    """

    def __init__(
        self, hosts: Mapping[str, Address], limit_s: float, end: Callable[[Failure], None], every_s: float = _EVERY_S
    ) -> None:
        self._hosts, self._limit_s, self._end, self._every_s = hosts, limit_s, end, every_s
        self._silent_s: dict[str, float] = {}  # of those that have answered once
        self._over = threading.Event()
        if hosts:
            threading.Thread(target=self._watch, name="verl-mux-hosts", daemon=True).start()

    def close(self) -> None:
        self._over.set()

    def _watch(self) -> None:
        since = time.monotonic()
        while not self._over.wait(self._every_s):
            silent = [name for name, address in self._hosts.items() if not _answers(address)]
            now = time.monotonic()
            # More is a pause of this process itself.
            passed, since = min(now - since, self._every_s + len(self._hosts) * _HOST_ANSWER_S), now
            for name in self._hosts:
                if name not in silent:
                    self._silent_s[name] = 0.0
                elif name in self._silent_s:
                    self._silent_s[name] += passed
            lost = [name for name, seconds in self._silent_s.items() if seconds > self._limit_s]
            if lost and not self._over.is_set():
                return self._end(Failure(f"{' and '.join(lost)} could not be reached for {self._limit_s:g} s"))


def _answers(address: Address) -> bool:
    try:
        socket.create_connection(address, _HOST_ANSWER_S).close()
    except OSError as error:
        return not isinstance(error, TimeoutError) and error.errno not in _NO_WAY
    return True
