"""Who sends what to whom, and what that costs: the ways in which a model can get from trainer ranks to all rollout workers. Pure.

    pull       each worker takes the whole model from one trainer rank
    root       everything goes to one worker, which hands it on to all others
    chain      from worker to worker
    two_stage  each trainer rank sends its shard to each host, once; the host's workers share it
    relay      the same to one host of each cluster, then from host to host

A `Sink` is where one copy of the model comes together: at one worker, from which `readers` on the same host load it as well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from verl_mux.errors import UserError
from verl_mux.sync.planning.topology import LINKS, RolloutHost, Topology, bytes_per_second, link_between

# What is under way on each hop while the next one waits: the largest pieces, on as many streams as a pair has by default.
HOP_BYTES = 2 * (4 << 20)
# Where two ways cost about the same, the one that loads slow links least; of those the first of these.
METHODS = ("two_stage", "relay", "root", "chain", "pull")
# Seconds that differ by less say nothing: a link is not known that well, and many streams never share it evenly.
_ABOUT = 1.05


class Sink(NamedTuple):
    """`host`: index of it; `worker`: who receives; `readers`: who else loads from there."""

    host: int
    worker: int
    readers: tuple[int, ...] = ()


class Flow(NamedTuple):
    """To sink `to`: from trainer rank `trainer` its shard (`whole`: the model), or from sink `sink` everything."""

    to: int
    trainer: int | None = None
    sink: int | None = None
    whole: bool = False


class Plan(NamedTuple):
    method: str
    sinks: list[Sink]
    flows: list[Flow]


class Cost(NamedTuple):
    """`nbytes` by class of link."""

    seconds: float
    nbytes: dict[str, float]


def make_plan(method: str, topology: Topology) -> Plan:
    """Raises UserError: there is no such way, or not here."""
    if method not in METHODS:
        raise UserError(f"{method!r} is no way of a weight sync; there are {', '.join(METHODS)}")
    if method == "pull" and not all(trainer.whole for trainer in topology.trainers):
        raise UserError("pull takes the whole model from one trainer rank, and each of them holds a shard only")
    sinks, flows = _WAYS[method](topology)
    return Plan(method, sinks, flows)


def possible(topology: Topology) -> list[str]:
    wholes = all(trainer.whole for trainer in topology.trainers)
    return [method for method in METHODS if method != "pull" or wholes]


def choose(topology: Topology, model_bytes: int, hop_bytes: int = HOP_BYTES) -> tuple[Plan, dict[str, Cost]]:
    """The cheapest plan, and what each costs; see `cost`.

    Of about equal ones the one with the fewest bytes over the slow class, if that is slower: a pair that shares its link with
    others, or is late, then holds up one copy and not one for each host.
    """
    plans = {method: make_plan(method, topology) for method in possible(topology)}
    costs = {method: cost(plan, topology, model_bytes, hop_bytes) for method, plan in plans.items()}
    least = min(it.seconds for it in costs.values())
    near = [method for method in METHODS if method in costs and costs[method].seconds <= _ABOUT * least]
    slower = bytes_per_second(topology.links, "slow") < bytes_per_second(topology.links, "fast")
    chosen = min(near, key=lambda method: round(costs[method].nbytes["slow"])) if slower else near[0]
    return plans[chosen], costs


# ---------------------------------------------------------------- the ways

_Ways = tuple[list[Sink], list[Flow]]


def _from_all(topology: Topology, to: int) -> list[Flow]:
    return [Flow(to, trainer=rank) for rank, it in enumerate(topology.trainers) if it.share]


def _pull(topology: Topology) -> _Ways:
    sinks = _each_worker(topology)
    return sinks, [Flow(at, trainer=at % len(topology.trainers), whole=True) for at in range(len(sinks))]


def _root(topology: Topology) -> _Ways:
    sinks = _each_worker(topology)
    return sinks, [*_from_all(topology, 0), *(Flow(at, sink=0) for at in range(1, len(sinks)))]


def _chain(topology: Topology) -> _Ways:
    sinks = _each_worker(topology)
    return sinks, [*_from_all(topology, 0), *(Flow(at, sink=at - 1) for at in range(1, len(sinks)))]


def _two_stage(topology: Topology) -> _Ways:
    sinks = _each_host(topology)
    return sinks, [flow for at in range(len(sinks)) for flow in _from_all(topology, at)]


def _relay(topology: Topology) -> _Ways:
    sinks = _each_host(topology)
    last: dict[str, int] = {}
    flows: list[Flow] = []
    for at, sink in enumerate(sinks):
        cluster = topology.hosts[sink.host].cluster
        flows += [Flow(at, sink=last[cluster])] if cluster in last else _from_all(topology, at)
        last[cluster] = at
    return sinks, flows


_WAYS: dict[str, Callable[[Topology], _Ways]] = {
    "pull": _pull, "root": _root, "chain": _chain, "two_stage": _two_stage, "relay": _relay
}  # fmt: skip


def _each_worker(topology: Topology) -> list[Sink]:
    return [Sink(at, worker) for at, host in enumerate(topology.hosts) for worker in host.workers]


def _each_host(topology: Topology) -> list[Sink]:
    return [Sink(at, host.workers[0], host.workers[1:]) for at, host in enumerate(topology.hosts)]


# ---------------------------------------------------------------- what they cost


def cost(plan: Plan, topology: Topology, model_bytes: int, hop_bytes: int = HOP_BYTES) -> Cost:
    """Everything flows at once, piece by piece: the busiest link sets the pace, and each hop after the first adds the time of
    what is under way on it (`hop_bytes`).

    By hand, without those hops: B bytes of model; N trainer hosts, of which the one with most sends a share s; M rollout hosts of
    W workers in one cluster; S bytes a second over a slow link, F through an interface in each direction. The largest of

                 a slow link for each pair     one for all     interfaces
        two_stage            sB/S                  MB/S        B/F in, MsB/F out of a trainer
        relay, chain         sB/S                   B/S        B/F
        root                 sB/S                   B/S        B/F, (M - 1)WB/F out of the first host
        pull                 kB/S                 MWB/S        WB/F in, ceil(MW/N)B/F out of a trainer

    where k of a host's workers pull from the same trainer rank. So with a link for each pair two_stage and relay cost the same as
    long as a trainer's interface carries M copies of its share, and with one for all they differ M times.
    """
    load: dict[tuple, float] = defaultdict(float)
    nbytes = dict.fromkeys(LINKS, 0.0)
    for flow in plan.flows:
        link, passes = _passes(flow, plan, topology)
        share = 1.0 if flow.trainer is None or flow.whole else topology.trainers[flow.trainer].share
        nbytes[link] += share * model_bytes
        for resource, gbps in passes:
            load[resource] += share * model_bytes / gbps
    return Cost(max(load.values()) + _fill(plan, topology, min(hop_bytes, model_bytes)), nbytes)


def link_of(flow: Flow, plan: Plan, topology: Topology) -> str:
    return _passes(flow, plan, topology)[0]


def _passes(flow: Flow, plan: Plan, topology: Topology) -> tuple[str, list[tuple[tuple, float]]]:
    """The class of a flow's link, and what it takes its bytes through, with bytes a second."""
    to = topology.hosts[plan.sinks[flow.to].host]
    if flow.trainer is not None:
        link, source = link_between(topology.trainers[flow.trainer], to), topology.trainers[flow.trainer].host
    else:
        assert flow.sink is not None
        host = topology.hosts[plan.sinks[flow.sink].host]
        link, source = link_between(host, to), host.host
    rate, fast = bytes_per_second(topology.links, link), bytes_per_second(topology.links, "fast")
    if link == "local":
        return link, [(("local", to.host), rate)]
    passes: list[tuple[tuple, float]] = [(("out", source), fast), (("in", to.host), fast)]
    if link == "slow":
        shared = topology.links.slow_link == "shared"
        passes.append((("slow",) if shared else ("slow", source, to.host), rate))
    return link, passes


def _fill(plan: Plan, topology: Topology, hop_bytes: int) -> float:
    """Seconds until the first piece is at the last sink, beyond the first hop."""
    came_by = {flow.to: flow for flow in plan.flows if flow.sink is not None}
    longest = 0.0
    for at in range(len(plan.sinks)):
        seconds = 0.0
        for flow in _way_to(at, came_by):
            seconds += hop_bytes / bytes_per_second(topology.links, link_of(flow, plan, topology))
        longest = max(longest, seconds)
    return longest


def _way_to(at: int, came_by: dict[int, Flow]) -> Iterator[Flow]:
    flow = came_by.get(at)
    while flow is not None and flow.sink is not None:
        yield flow
        flow = came_by.get(flow.sink)


def describe(plan: Plan, topology: Topology, model_bytes: int) -> list[dict]:
    """Each flow: from, to, class of link, bytes."""
    found = []
    for flow in plan.flows:
        share = 1.0 if flow.trainer is None or flow.whole else topology.trainers[flow.trainer].share
        source = f"trainer rank {flow.trainer} on {topology.trainers[flow.trainer].host}" if flow.trainer is not None else None
        found.append(
            {
                "from": source or name_of(plan.sinks[flow.sink or 0], topology.hosts),
                "to": name_of(plan.sinks[flow.to], topology.hosts),
                "link": link_of(flow, plan, topology),
                "bytes": round(share * model_bytes),
            }
        )
    return found


def name_of(sink: Sink, hosts: tuple[RolloutHost, ...]) -> str:
    return f"rollout worker {sink.worker} on {hosts[sink.host].host}"
