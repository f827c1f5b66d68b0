"""Engines that come and go together in a rollout, what runs on them, and how they are emptied. For migration and growth."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import ray

from verl_mux.errors import UserError
from verl_mux.rollout.control.migration_plan import Replica, Request, expected_remaining
from verl_mux.rollout.messages import RunningSample

_AGAIN_S = 0.05


class Unit(NamedTuple):
    """What is given back together: nodes, and the replicas that run on them alone. servers: the balancer's names."""

    nodes: tuple[str, ...]
    replicas: tuple[int, ...]
    servers: tuple[str, ...]


def units(runs_on: Sequence[Sequence[str]], servers: Sequence[str], asked: str) -> list[Unit]:
    """`runs_on`: the nodes of each replica, by rank, as they were found to run. Together are those that share a node. asked:
    `key=value` of who needs them.

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
            f"{asked} is not possible with {len(servers)} replicas on {len(set(every))} rollout nodes; "
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


def look(workers: Sequence[Any]) -> tuple[list[RunningSample], float | None]:
    """What runs, and the seconds a token takes: of the workers' latest, the median; None before any response has ended."""
    reports = ray.get([worker.running_samples.remote() for worker in workers])
    speeds = sorted(seconds for _, seconds in reports if seconds)
    return [sample for samples, _ in reports for sample in samples], speeds[len(speeds) // 2] if speeds else None
