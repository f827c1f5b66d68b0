"""Gathers a rollout's tail on few nodes and gives the others back while it still runs: what migration_plan decides, done.

    others wait, enough is done -> no new requests there -> those there go on elsewhere, tokens kept -> asleep -> nodes back

All tokens of a response are by the same weights, so nothing becomes off-policy; what is read again on the other engine is
the price. At the next step's begin all engines are back.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray

from verl_mux.profiling.eventlog import events
from verl_mux.rollout.control.migration_plan import Migration, MigrationPolicy, Stay, estimated_speed, plan
from verl_mux.rollout.control.units import Room, Unit, empty_servers, look, sample_name
from verl_mux.rollout.messages import RunningSample


class TailMigration:
    """begin -> consider* of each step; `restore` when all engines are awake again.

    workers: the agent loop workers. balancer: handle of verl's load balancer; handles: its servers by name.
    gangs: sets of nodes; if all of one came back another job would begin.
    vacate: puts a unit's engines to sleep and gives its nodes back.
    """

    def __init__(
        self, policy: MigrationPolicy, units: Sequence[Unit], *, workers: Callable[[], list], balancer: Any,
        handles: dict[str, Any], gangs: Callable[[], list[list[str]]], vacate: Callable[[Unit], None], log: Any,
        room: Room,
    ) -> None:  # fmt: skip
        self._policy, self._units = policy, list(units)
        self._workers, self._balancer, self._handles = workers, balancer, handles
        self._gangs, self._vacate, self._log, self._room = gangs, vacate, log, room
        self._freed: list[Unit] = []
        self._step = 0
        self.metrics: dict[str, float] = {}

    def begin(self, step: int) -> None:
        """A step begins; all units generate."""
        self._step, self.metrics = step, {"migrated_requests": 0.0, "freed_nodes": 0.0}

    def restore(self) -> None:
        """All engines are awake and hold the step's weights: they may be asked again."""
        if self._freed:
            back = {name: self._handles[name] for unit in self._freed for name in unit.servers}
            ray.get(self._balancer.add_servers.remote(back))
            self._freed = []

    def consider(self, done: int, total: int) -> Migration | Stay:
        """Free what another job waits for, if that pays now. done, total: responses of this step."""
        gangs = self._gangs() if self._policy.threshold * total <= done < total else []
        if not gangs:
            return Stay("no other job could begin on the nodes, or too few responses are done")
        samples, token_s = look(self._workers())
        if token_s is None:
            return Stay("no response has ended yet")
        replicas = self._room.replicas([unit for unit in self._units if unit not in self._freed], samples, token_s)
        found = plan(replicas, done, total, gangs, estimated_speed(token_s, replicas), self._policy)
        if isinstance(found, Migration):
            self._carry_out(found, samples)
        return found

    def _targets(self, found: Migration, samples: Sequence[RunningSample]) -> dict[tuple[str, int], tuple[str, Any]]:
        """Name and handle of the server that each moved sample goes on with; a unit's servers take turns."""
        servers = {unit.nodes[0]: itertools.cycle(unit.servers) for unit in self._units}
        by_id = {sample_name(it): (it.group, it.sample) for it in samples}
        names = {by_id[move.request]: next(servers[move.target]) for move in found.moves}
        return {sample: (name, self._handles[name]) for sample, name in names.items()}

    def _carry_out(self, found: Migration, samples: Sequence[RunningSample]) -> None:
        began = time.perf_counter()
        leaving = [unit for unit in self._units if unit.nodes[0] in found.freed]
        names = [name for unit in leaving for name in unit.servers]
        ray.get(self._balancer.remove_servers.remote(names))
        targets = self._targets(found, samples)
        empty_servers(self._workers(), names, targets)
        self._freed += leaving
        for unit in leaving:
            self._vacate(unit)
        nodes = [node for unit in leaving for node in unit.nodes]
        extra = {
            "nodes": nodes,
            "requests": len(found.moves),
            "tokens": found.reprefill_tokens,
            "gain_sec": round(found.gain_s, 3),
        }
        self._log.log(events.MIGRATION, time.perf_counter() - began, extra=extra, step=self._step)
        self.metrics["migrated_requests"] += len(found.moves)
        self.metrics["freed_nodes"] += len(nodes)
