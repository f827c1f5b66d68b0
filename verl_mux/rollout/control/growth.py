"""A rollout grows onto nodes of its job that no other job uses, and leaves them when one asks: what growth_plan decides, done.

    the rollout's own nodes are granted --> a thread asks for each other unit's, as a filler does (docs/hold.md)
    granted before anything is launched --> its engines wake with this step's weights: requests are spread over all
    granted while it runs               --> the same, and they take over what ends the rollout sooner
    a job asks for the nodes            --> what runs there goes on elsewhere, tokens kept --> asleep --> nodes back

All tokens are by the same weights, so nothing becomes off-policy.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import ray

from verl_mux.coordinator.bus.client import Lease, LeaseLost, LocalMux
from verl_mux.profiling.eventlog import events
from verl_mux.rollout.control.growth_plan import GrowthPolicy, pull, seconds_won
from verl_mux.rollout.control.migration_plan import estimated_speed
from verl_mux.rollout.control.units import Room, Unit, empty_servers, look, sample_name

# A node that a rollout would not end sooner for is asked for again after so long: what is left of it is known better then.
_AGAIN_S = 2.0

log = logging.getLogger(__name__)


class Growth:
    """ask -> open -> check* -> close of each step, by the trainer's thread; one thread for each unit that may join.

    own, others: units of the job's own nodes and of those that may join. muxes: the client of each of the others, of a filler
    that names its nodes. workers: the agent loop workers. balancer: handle of verl's load balancer; handles: its servers by name.
    join: wakes a unit's engines under a lease, with the weights of the rollout. part: puts them to sleep.
    device: the trainer's hold on its devices; whatever moves memory has it.
    """

    def __init__(
        self, policy: GrowthPolicy, own: Sequence[Unit], others: Sequence[Unit], muxes: Sequence[LocalMux], *,
        workers: Callable[[], list], balancer: Any, handles: dict[str, Any], join: Callable[[Unit, Lease], None],
        part: Callable[[Unit], None], device: Callable[[], AbstractContextManager], log: Any, room: Room,
    ) -> None:  # fmt: skip
        self._policy, self._own, self._others, self._muxes = policy, list(own), list(others), list(muxes)
        self._workers, self._balancer, self._handles = workers, balancer, handles
        self._join, self._part, self._device, self._log, self._room = join, part, device, log, room
        self._changed = threading.Condition()
        self._step: int | None = None  # whose rollout may grow; None: none
        self._logged = 0
        self._open = False  # its own engines are awake, and requests go out
        self._granted: dict[Unit, Lease] = {}
        self._joined: dict[Unit, float] = {}  # since when
        self._error: BaseException | None = None
        self._over = False
        self.metrics: dict[str, float] = {}
        ray.get(self._balancer.remove_servers.remote([name for unit in self._others for name in unit.servers]))
        for unit, mux in zip(self._others, self._muxes, strict=True):
            threading.Thread(target=self._borrow, args=(unit, mux), name=f"verl-mux-growth-{unit.nodes[0]}", daemon=True).start()

    @property
    def replicas(self) -> list[int]:
        """Those that are not the job's own."""
        return [rank for unit in self._others for rank in unit.replicas]

    # ---------------------------------------------------------------- a step, in the trainer's thread

    def ask(self, step: int) -> None:
        """The rollout of a step has its own nodes: from now on the others are asked for."""
        self.metrics = {"grown_node_seconds": 0.0, "joined_nodes": 0.0, "joined_requests": 0.0}
        with self._changed:
            self._step, self._logged, self._open = step, step, False
            self._changed.notify_all()

    def open(self) -> None:
        """Its own engines are awake and hold the step's weights; what is granted by now joins before anything is launched."""
        with self._changed:
            self._open = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._error is not None or set(self._granted) <= set(self._joined))
        self.check()

    def check(self) -> None:
        """Raises what went wrong in one of the threads."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """The rollout is over: all nodes that joined are given back."""
        with self._changed:
            self._step = None
            self._changed.notify_all()
        with self._device():
            self.leave()
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or not self._granted)
        self.check()

    def leave(self) -> None:
        """No engine of these nodes is used from now on, until they are granted again. Whoever calls has the device."""
        for unit in list(self._joined):
            self._leave(unit)

    def end(self, failed: str | None) -> None:
        """The job is over, or has failed for this reason, and keeps its nodes until its processes are gone."""
        self._over = True
        for mux in self._muxes:
            mux.close() if failed is None else mux.fail(failed)

    # ---------------------------------------------------------------- a unit, in its thread

    def _borrow(self, unit: Unit, mux: LocalMux) -> None:
        try:
            while True:
                self._use(unit, mux, self._asked())
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

    def _asked(self) -> int:
        """Waits for a rollout that may grow: its step."""
        with self._changed:
            self._changed.wait_for(lambda: self._step is not None)
            assert self._step is not None
            return self._step

    def _use(self, unit: Unit, mux: LocalMux, step: int) -> None:
        """From the nodes' grant until they are given back, since they are wanted, not worth having, or the rollout is over."""
        lease = mux.acquire("rollout", nodes=list(unit.nodes), num_nodes=len(unit.nodes))
        with self._changed:
            self._granted[unit] = lease
            self._changed.notify_all()
            early = self._step is not None and not self._open
            self._changed.wait_for(lambda: self._open or self._step is None)
        with self._device():
            targets = {} if early else self._targets(unit)
            joins = self._step is not None and not lease.wanted.is_set() and targets is not None
            if joins:
                self._enter(unit, lease, targets or {})
        if joins:
            lease.wanted.wait()
            with self._device():
                self._leave(unit)
        mux.release(lease)
        with self._changed:
            del self._granted[unit]
            self._changed.notify_all()
            if not joins:
                self._changed.wait_for(lambda: self._step != step, _AGAIN_S)

    def _targets(self, unit: Unit) -> dict[tuple[str, int], tuple[str, Any]] | None:
        """Samples that go on in these engines: name and handle of the server of each. None: the rollout would not end sooner."""
        samples, token_s = look(self._workers())
        if token_s is None or not samples:
            return None
        replicas = self._room.replicas([*self._own, *self._joined], samples, token_s)
        (joining,) = self._room.replicas([unit], (), token_s)
        speed = estimated_speed(token_s, replicas)
        moves = pull(replicas, joining, (), speed)
        if not moves or seconds_won(replicas, joining, moves, speed) < self._policy.min_gain_s:
            return None
        servers, moved = itertools.cycle(unit.servers), {move.request for move in moves}
        names = {(it.group, it.sample): next(servers) for it in samples if sample_name(it) in moved}
        return {sample: (name, self._handles[name]) for sample, name in names.items()}

    # ---------------------------------------------------------------- by whoever has the device

    def _enter(self, unit: Unit, lease: Lease, targets: dict[tuple[str, int], tuple[str, Any]]) -> None:
        self._join(unit, lease)
        ray.get(self._balancer.add_servers.remote({name: self._handles[name] for name in unit.servers}))
        if targets:
            ray.get([worker.redirect.remote(targets) for worker in self._workers()])
        self.metrics["joined_nodes"] += len(unit.nodes)
        self.metrics["joined_requests"] += len(targets)
        with self._changed:
            self._joined[unit] = time.perf_counter()
            self._changed.notify_all()

    def _leave(self, unit: Unit) -> None:
        """Once: what has been left already is nothing to leave."""
        if unit not in self._joined:
            return
        lease, since, began = self._granted[unit], self._joined.pop(unit), time.perf_counter()
        ray.get(self._balancer.remove_servers.remote(list(unit.servers)))
        requests = empty_servers(self._workers(), unit.servers, {})
        self._part(unit)
        now = time.perf_counter()
        about = {"nodes": list(unit.nodes), "token": lease.token}
        told = {**about, "requests": requests, "leaving_sec": round(now - began, 3)}
        self._log.log(events.GROWTH, now - since, extra=told, step=self._logged)
        self._log.log(events.PHASE, now - since, extra={"phase": lease.phase, **about}, step=self._logged)
        self.metrics["grown_node_seconds"] += (now - since) * len(unit.nodes)
        lease.wanted.set()
