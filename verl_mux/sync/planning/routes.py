"""From what all ends of a sync say of themselves to the part that each has in it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from verl_mux.sync.planning.plan import Plan, choose, link_of, make_plan
from verl_mux.sync.planning.topology import Links, RolloutHost, Topology, Trainer
from verl_mux.sync.streams.connection import Address
from verl_mux.sync.streams.receiving import Role
from verl_mux.sync.streams.sending import Target

# To compare ways by, before anybody knows the model: large enough that pieces under way count for little.
_NOMINAL_BYTES = 8 << 30


class Meeting(msgspec.Struct, frozen=True):
    """One end. `address`: for other hosts, `local`: for its own; `host` tells machines apart, `name` is for people; `cluster`: in
    which its links are fast."""

    address: tuple[str, int]
    local: str
    host: str
    name: str
    cluster: str


class Wish(msgspec.Struct, frozen=True):
    """What keys say of the way. `method` "auto": the cheapest."""

    method: str = "auto"
    links: Links = Links()


class SenderPart(msgspec.Struct, frozen=True):
    me: str
    targets: list[Target]


class WorkerPart(msgspec.Struct, frozen=True):
    """`role`: this one receives; else it loads from the memory of the worker `whom`, which listens at `follows`."""

    me: str
    role: Role | None = None
    follows: str = ""
    whom: str = ""


def part_of(plain: dict[str, Any]) -> SenderPart | WorkerPart:
    """Back from what msgspec.to_builtins made of one."""
    return msgspec.convert(plain, SenderPart) if "targets" in plain else msgspec.convert(plain, WorkerPart)


def topology_of(trainers: Sequence[Meeting], workers: Sequence[Meeting], links: Links) -> Topology:
    """Names are for people: two machines of one name are told apart by their ids."""
    ids: dict[str, str] = {}
    for it in [*trainers, *workers]:
        ids.setdefault(it.host, it.name)
    names = {key: name if list(ids.values()).count(name) == 1 else f"{name} ({key[:8]})" for key, name in ids.items()}
    by_host: dict[str, list[int]] = {}
    for number, worker in enumerate(workers):
        by_host.setdefault(worker.host, []).append(number)
    hosts = tuple(
        RolloutHost(names[host], workers[numbers[0]].cluster, tuple(numbers)) for host, numbers in by_host.items()
    )  # fmt: skip
    share = 1 / len(trainers)
    return Topology(tuple(Trainer(names[it.host], it.cluster, share, len(trainers) == 1) for it in trainers), hosts, links)


def plan_for(topology: Topology, wish: Wish) -> Plan:
    """Raises UserError: the wished way is none, or not possible."""
    return choose(topology, _NOMINAL_BYTES)[0] if wish.method == "auto" else make_plan(wish.method, topology)


def parts(
    plan: Plan, topology: Topology, trainers: Sequence[Meeting], workers: Sequence[Meeting]
) -> tuple[list[SenderPart], list[WorkerPart]]:
    """Of each trainer rank, and of each worker."""
    ranks = [f"trainer rank {rank} on {it.host}" for rank, it in enumerate(topology.trainers)]
    where = {worker: host.host for host in topology.hosts for worker in host.workers}
    names = [f"rollout worker {worker} on {where[worker]}" for worker in range(len(workers))]
    targets: list[list[Target]] = [[] for _ in ranks]
    onward: list[list[Target]] = [[] for _ in plan.sinks]
    upstream: list[dict[str, list[int]]] = [{} for _ in plan.sinks]
    senders = sorted({flow.trainer for flow in plan.flows if flow.trainer is not None})  # a sink hands on what all of them sent
    for flow in plan.flows:
        owner = plan.sinks[flow.to].worker
        address: Address = workers[owner].address
        target = Target(address, names[owner], link_of(flow, plan, topology))
        if flow.trainer is not None:
            targets[flow.trainer].append(target)
            upstream[flow.to][ranks[flow.trainer]] = [flow.trainer]
        elif flow.sink is not None:
            onward[flow.sink].append(target)
            upstream[flow.to][names[plan.sinks[flow.sink].worker]] = senders
    found: dict[int, WorkerPart] = {}
    for at, sink in enumerate(plan.sinks):
        me = names[sink.worker]
        found[sink.worker] = WorkerPart(me, Role(me, upstream[at], onward[at], [names[it] for it in sink.readers]))
        for reader in sink.readers:
            found[reader] = WorkerPart(names[reader], follows=workers[sink.worker].local, whom=me)
    return [SenderPart(me, to) for me, to in zip(ranks, targets, strict=True)], [found[it] for it in range(len(workers))]
