"""Replicas that leave a rollout before its end (migration) or join it while it runs (growth): what replica_plan.py decides, done.

Runs in the trainer's driver; called by trainer/modes.py where a rollout begins and ends, and by trainer/step_rollout.py while it
runs. Touches engines, the load balancer and the agent loop workers over Ray, and leases of nodes.

    migration   another job waits, enough is done -> no new requests there -> those there go on elsewhere, tokens kept -> asleep
                -> nodes back; at the next step's begin all engines are back
    growth      the rollout's own nodes are granted -> a thread asks for each other unit's, when no job uses them
                granted before anything is launched -> its engines wake with this step's weights: requests are spread over all
                granted while the rollout runs      -> the same, and they take over what ends the rollout sooner
                another job asks for the nodes      -> what runs there goes on elsewhere, tokens kept -> asleep -> nodes back

All tokens of a response are by the same weights, so nothing becomes off-policy; the price is what the other engine reads again.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ray

from verl_mux.coordinator.bus.client import Lease, LeaseLost, LocalMux
from verl_mux.errors import UserError
from verl_mux.profiling.eventlog import events
from verl_mux.rollout.control.replica_plan import Migration, MigrationPolicy, Move, Room, Stay, Unit, estimated_speed, plan, pull
from verl_mux.rollout.instructions import RunningSample
from verl_mux.trainer.rollout_engines import RolloutEngines

# A node for which a rollout would not end sooner is asked for again after these seconds: what is left is known better then.
_AGAIN_S = 2.0
_MIGRATION = MigrationPolicy()
_POLL_S = 0.05  # while requests leave an engine

log = logging.getLogger(__name__)
Targets = dict[tuple[str, int], tuple[str, Any]]  # (group, sample) -> name and handle of the server it goes on with


class ReplicaMoves:
    """No replica leaves or joins. The calls of a step, in their order; all in the trainer's thread."""

    own_nodes: list[str] | None = None  # those that every rollout waits for; None: all
    lent: list[int] = []  # replicas on other nodes

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}

    def nodes_are_held(self, step: int) -> None:
        """The rollout of a step has its own nodes."""

    def engines_are_awake(self) -> None:
        """All engines of its nodes hold the step's weights; before anything is launched."""

    def consider(self, done: int, total: int) -> Migration | Stay | None:
        """Between two reports of the workers. done, total: responses of this step."""

    def rollout_ends(self) -> None:
        """The last response is there."""

    def leave(self) -> None:
        """No engine of other nodes is used until they are granted again. The caller holds the devices."""

    def __enter__(self) -> ReplicaMoves:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """The job is over, or has failed, and keeps its nodes until its processes are gone."""


class TailMigration(ReplicaMoves):
    """workers: the agent loop workers. room: what a replica holds."""

    def __init__(
        self, units: Sequence[Unit], engines: RolloutEngines, workers: Sequence[Any], room: Room,
        policy: MigrationPolicy = _MIGRATION,
    ) -> None:  # fmt: skip
        super().__init__()
        self._units, self._engines, self._workers, self._room, self._policy = list(units), engines, workers, room, policy
        self._freed: list[Unit] = []
        self._step = 0

    def nodes_are_held(self, step: int) -> None:
        self._step, self.metrics = step, {"migrated_requests": 0.0, "freed_nodes": 0.0}

    def engines_are_awake(self) -> None:
        if self._freed:
            self._engines.accept_requests(self._freed)
            self._freed = []

    def consider(self, done: int, total: int) -> Migration | Stay:
        """Free what another job waits for, if that pays now."""
        asked = self._policy.threshold * total <= done < total
        gangs = self._engines.phases.mux.gangs("rollout") if asked else []
        if not gangs:
            return Stay("no other job could begin on the nodes, or too few responses are done")
        samples, token_s = look(self._workers)
        if token_s is None:
            return Stay("no response has ended yet")
        replicas = self._room.replicas([unit for unit in self._units if unit not in self._freed], samples, token_s)
        planned = plan(replicas, done, total, gangs, estimated_speed(token_s, replicas), self._policy)
        if isinstance(planned, Migration):
            self._carry_out(planned, samples)
        return planned

    def _carry_out(self, planned: Migration, samples: Sequence[RunningSample]) -> None:
        began = time.perf_counter()
        leaving = [unit for unit in self._units if unit.nodes[0] in planned.freed]
        servers, nodes = [name for unit in leaving for name in unit.servers], [node for unit in leaving for node in unit.nodes]
        self._engines.refuse_requests(leaving)
        empty_servers(self._workers, servers, targets(planned.moves, samples, self._units, self._engines))
        self._freed += leaving
        for unit in leaving:
            self._engines.vacate(unit)
        extra = {"nodes": nodes, "requests": len(planned.moves), "tokens": planned.reprefill_tokens,
                 "gain_sec": round(planned.gain_s, 3)}  # fmt: skip
        self._engines.phases.log.log(events.MIGRATION, time.perf_counter() - began, extra=extra, step=self._step)
        self.metrics["migrated_requests"] += len(planned.moves)
        self.metrics["freed_nodes"] += len(nodes)


class Growth(ReplicaMoves):
    """One thread for each unit that may join. own: `mux.rollout.growth.own`. connect: the client that asks for nodes whenever no
    job uses them. Raises UserError: a replica runs on own and on other nodes."""

    def __init__(
        self, own: Sequence[str], engines: RolloutEngines, workers: Sequence[Any], room: Room,
        connect: Callable[[Sequence[str]], LocalMux],
    ) -> None:  # fmt: skip
        super().__init__()
        asked, names = f"mux.rollout.growth.own={list(own)}", set(own)
        units = engines.units(asked)
        for unit in units:
            if 0 < len(names & set(unit.nodes)) < len(set(unit.nodes)):
                runs_on = f"replica {unit.replicas[0]} runs on {', '.join(unit.nodes)}"
                raise UserError(f"{asked} is not possible: {runs_on}; allowed: all nodes of a replica, or none")
        self._own, self._others = ([it for it in units if (it.nodes[0] in names) is owned] for owned in (True, False))
        self._engines, self._workers, self._room = engines, workers, room
        self._muxes = [connect(unit.nodes) for unit in self._others]
        for mux in self._muxes:  # their nodes too are given on only when the job's engines are gone
            mux.members(engines.manager.each("processes", None))
        self.own_nodes = [node for unit in self._own for node in unit.nodes]
        self.lent = [rank for unit in self._others for rank in unit.replicas]
        self._changed = threading.Condition()
        self._step: int | None = None  # whose rollout may grow; None: none
        self._logged = 0
        self._open = False  # its own engines are awake, and requests go out
        self._granted: dict[Unit, Lease] = {}
        self._joined: dict[Unit, float] = {}  # since when
        self._error: BaseException | None = None
        self._over = False
        engines.refuse_requests(self._others)
        for unit, mux in zip(self._others, self._muxes, strict=True):
            threading.Thread(target=self._borrow, args=(unit, mux), name=f"verl-mux-growth-{unit.nodes[0]}", daemon=True).start()

    # ---------------------------------------------------------------- a step, in the trainer's thread

    def nodes_are_held(self, step: int) -> None:
        """From now on the others are asked for."""
        self.metrics = {"grown_node_seconds": 0.0, "joined_nodes": 0.0, "joined_requests": 0.0}
        with self._changed:
            self._step, self._logged, self._open = step, step, False
            self._changed.notify_all()

    def engines_are_awake(self) -> None:
        """What is granted by now joins before anything is launched."""
        with self._changed:
            self._open = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._error is not None or set(self._granted) <= set(self._joined))
        self.consider()

    def consider(self, done: int = 0, total: int = 0) -> None:
        """Raises what went wrong in one of the threads."""
        if self._error is not None:
            raise self._error

    def rollout_ends(self) -> None:
        """All nodes that joined are given back."""
        with self._changed:
            self._step = None
            self._changed.notify_all()
        with self._engines.phases.device():
            self.leave()
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or not self._granted)
        self.consider()

    def leave(self) -> None:
        for unit in list(self._joined):
            self._leave(unit)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._over = True
        for mux in self._muxes:
            mux.close() if kind is None else mux.fail(f"its job ended with {kind.__name__}")

    # ---------------------------------------------------------------- a unit, in its thread

    def _borrow(self, unit: Unit, mux: LocalMux) -> None:
        try:
            while True:
                self._use(unit, mux)
        except LeaseLost as lost:  # by then its engines sleep: the job goes on without
            if not self._over:
                log.warning("no rollout of %s grows any more onto %s: %s", mux.job, ", ".join(unit.nodes), lost)
        except BaseException as error:
            # The nodes stay this job's, in which engines may be awake, until its processes are gone.
            log.exception("engines on %s could not be used", ", ".join(unit.nodes))
            self._error = error
        with self._changed:
            self._granted.pop(unit, None)
            self._changed.notify_all()

    def _use(self, unit: Unit, mux: LocalMux) -> None:
        """Once a rollout may grow: from the nodes' grant until they are given back, because another job wants them, they win
        nothing, or the rollout is over."""
        with self._changed:
            step = self._changed.wait_for(lambda: self._step)
        lease = mux.acquire("rollout", nodes=list(unit.nodes), num_nodes=len(unit.nodes))
        with self._changed:
            self._granted[unit] = lease
            self._changed.notify_all()
            early = self._step is not None and not self._open
            self._changed.wait_for(lambda: self._open or self._step is None)
        with self._engines.phases.device():
            takes_over = {} if early else self._takes_over(unit)
            joins = self._step is not None and not lease.wanted.is_set() and takes_over is not None
            if joins:
                self._enter(unit, lease, takes_over or {})
        if joins:
            lease.wanted.wait()
            with self._engines.phases.device():
                self._leave(unit)
        mux.release(lease)
        with self._changed:
            del self._granted[unit]
            self._changed.notify_all()
            if not joins:
                self._changed.wait_for(lambda: self._step != step, _AGAIN_S)

    def _takes_over(self, unit: Unit) -> Targets | None:
        """Samples that go on in these engines; None: the rollout would not end sooner."""
        samples, token_s = look(self._workers)
        if token_s is None or not samples:
            return None
        replicas = self._room.replicas([*self._own, *self._joined], samples, token_s)
        (joining,) = self._room.replicas([unit], (), token_s)
        moves = pull(replicas, joining, estimated_speed(token_s, replicas))
        return targets(moves, samples, [unit], self._engines) if moves else None

    # ---------------------------------------------------------------- by the thread that holds the devices

    def _enter(self, unit: Unit, lease: Lease, takes_over: Targets) -> None:
        self._engines.join(unit, lease)
        self._engines.accept_requests([unit])
        if takes_over:
            ray.get([worker.redirect.remote(takes_over) for worker in self._workers])
        self.metrics["joined_nodes"] += len(unit.nodes)
        self.metrics["joined_requests"] += len(takes_over)
        with self._changed:
            self._joined[unit] = time.perf_counter()
            self._changed.notify_all()

    def _leave(self, unit: Unit) -> None:
        """Once: a unit that has left already has nothing to leave."""
        if unit not in self._joined:
            return
        lease, since, began = self._granted[unit], self._joined.pop(unit), time.perf_counter()
        self._engines.refuse_requests([unit])
        requests = empty_servers(self._workers, unit.servers, {})
        self._engines.part(unit)
        now = time.perf_counter()
        about, log = {"nodes": list(unit.nodes), "token": lease.token}, self._engines.phases.log.log
        more = {"requests": requests, "leaving_sec": round(now - began, 3)}
        log(events.GROWTH, now - since, extra=about | more, step=self._logged)
        log(events.PHASE, now - since, extra={"phase": lease.phase, **about}, step=self._logged)
        self.metrics["grown_node_seconds"] += (now - since) * len(unit.nodes)
        lease.wanted.set()


def targets(moves: Iterable[Move], samples: Iterable[RunningSample], units: Iterable[Unit], engines: RolloutEngines) -> Targets:
    """Where each moved sample goes on; a unit's servers take turns."""
    servers = {unit.nodes[0]: itertools.cycle(unit.servers) for unit in units}
    by_name = {it.name: (it.group, it.sample) for it in samples}
    names = {by_name[move.request]: next(servers[move.target]) for move in moves}
    return {sample: (name, engines.handle(name)) for sample, name in names.items()}


def empty_servers(workers: Sequence[Any], servers: Sequence[str], planned: Targets) -> int:
    """Returns when nothing runs on these servers any more, which get no new requests: a sample that did goes on on the server
    planned, else where there is least to do. How many samples those were."""
    moved = left = sum(ray.get([worker.evacuate.remote(list(servers), planned) for worker in workers]))
    while left:
        time.sleep(_POLL_S)
        left = sum(ray.get([worker.evacuate.remote(list(servers), planned) for worker in workers]))
    return moved


def look(workers: Sequence[Any]) -> tuple[list[RunningSample], float | None]:
    """What runs, and the seconds a token takes: of the workers' latest, the median; None before any response has ended."""
    reports = ray.get([worker.running_samples.remote() for worker in workers])
    speeds = sorted(seconds for _, seconds in reports if seconds)
    return [sample for samples, _ in reports for sample in samples], speeds[len(speeds) // 2] if speeds else None
