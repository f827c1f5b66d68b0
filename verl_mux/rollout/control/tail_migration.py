"""Gathers a rollout's tail on few nodes and gives the others back while it still runs: what migration_plan decides, done.

    others wait, enough is done -> no new requests there -> those there go on elsewhere, tokens kept -> asleep -> nodes back

All tokens of a response are by the same weights, so nothing becomes off-policy; what is read again on the other engine is
the price. At the next step's begin all engines are back.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ray

from verl_mux.errors import UserError
from verl_mux.profiling.eventlog import events
from verl_mux.rollout.control.migration_plan import (
    Migration,
    MigrationPolicy,
    Replica,
    Request,
    Stay,
    estimated_speed,
    expected_remaining,
    plan,
)
from verl_mux.rollout.messages import RunningSample

_AGAIN_S = 0.05


class Unit(NamedTuple):
    """What is given back together: nodes, and the replicas that run on them alone. servers: the balancer's names."""

    nodes: tuple[str, ...]
    replicas: tuple[int, ...]
    servers: tuple[str, ...]


def units(runs_on: Sequence[Sequence[str]], servers: Sequence[str]) -> list[Unit]:
    """`runs_on`: the nodes of each replica, by rank, as they were found to run. Together are those that share a node.

    Raises:
        UserError: neither as many whole replicas on each node nor whole nodes under each replica.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank, nodes in enumerate(runs_on):
        groups.setdefault(tuple(dict.fromkeys(nodes)), []).append(rank)
    every = [node for nodes in groups for node in nodes]
    shared = len(set(every)) < len(every) or any(len(nodes) > 1 and len(ranks) > 1 for nodes, ranks in groups.items())
    if shared or len({len(ranks) for ranks in groups.values()}) > 1:
        raise UserError(
            f"mux.rollout.migration.enable=True is not possible with {len(servers)} replicas on {len(set(every))} rollout nodes; "
            "allowed: whole replicas on each node, or whole nodes under each replica"
        )
    return [Unit(nodes, tuple(ranks), tuple(servers[rank] for rank in ranks)) for nodes, ranks in groups.items()]


class Room(NamedTuple):
    """longest: most tokens of a response. max_requests, max_tokens: what one replica holds at once."""

    longest: int
    max_requests: int
    max_tokens: int

    def replicas(self, units: Sequence[Unit], samples: Sequence[RunningSample], token_s: float) -> list[Replica]:
        """Each unit, with the samples that run there, as one replica of a plan. token_s: seconds a token takes."""
        out = []
        for unit in units:
            requests = tuple(self._request(it, token_s) for it in samples if it.server in unit.servers)
            count = len(unit.replicas)
            out.append(Replica(unit.nodes[0], unit.nodes, requests, count * self.max_requests, count * self.max_tokens))
        return out

    def _request(self, it: RunningSample, token_s: float) -> Request:
        so_far = it.tokens + it.seconds / token_s
        remaining = expected_remaining(so_far, self.longest)
        return Request(sample_name(it), round(it.context + it.seconds / token_s), remaining)


def sample_name(it: RunningSample) -> str:
    """As a plan's requests are called."""
    return f"{it.group}_{it.sample}"


def empty_servers(workers: Sequence[Any], servers: Sequence[str], targets: dict[tuple[str, int], tuple[str, Any]]) -> int:
    """Returns when nothing runs on these servers any more, which get no new requests: what did goes on, by (group, sample), on
    the server planned, else where there is least to do. How many those were."""
    names = list(servers)
    found = left = sum(ray.get([worker.evacuate.remote(names, targets) for worker in workers]))
    while left:
        time.sleep(_AGAIN_S)
        left = sum(ray.get([worker.evacuate.remote(names, targets) for worker in workers]))
    return found


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
        reports = ray.get([worker.running_samples.remote() for worker in self._workers()])
        samples = [sample for its, _ in reports for sample in its]
        speeds = sorted(seconds for _, seconds in reports if seconds)
        if not speeds:
            return Stay("no response has ended yet")
        token_s = speeds[len(speeds) // 2]
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
