"""Runs in which nothing has to be carried out phase by phase: jobs move on at the rate of their settled period.

Where real phases differ from the announced ones, a job's iterations count for as many announced ones as they take alone: within
a group all its phases are taken to be longer or shorter by the job's own mean.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import msgspec

from verl_mux.scheduling.model import Cluster
from verl_mux.scheduling.time.periods import periods, rollout_bits
from verl_mux.simulation.ledger import Finished, Ledger, Run
from verl_mux.simulation.optimum.optimum import Optimum
from verl_mux.simulation.workload.workload import Arrival


class Holding(msgspec.Struct, frozen=True):
    """What is held at a time. periods: seconds per iteration of every job. busy: nodes' worth of phases, per side."""

    nodes: tuple[int, int]
    usd_per_hour: float
    periods: Mapping[str, float]
    busy: tuple[float, float]


Hold = Callable[[Mapping[str, Arrival]], Holding]


def run_fluid(arrivals: Sequence[Arrival], hold: Hold) -> Run:
    """`hold` says what the jobs there are, by name, run on; it is asked at every arrival and departure."""
    ledger, finished, spans = Ledger(), [], []
    solo_s = {arrival.job.name: alone_s(arrival) for arrival in arrivals}
    coming = sorted(arrivals, key=lambda arrival: arrival.at_s)[::-1]
    live: dict[str, Arrival] = {}
    left: dict[str, float] = {}
    now = 0.0
    while coming or live:
        holding = hold(live)
        arrives = coming[-1].at_s if coming else math.inf
        ends = {name: now + left[name] * holding.periods[name] for name in live}
        first = min(ends, key=ends.__getitem__, default=None)
        until = min(arrives, ends[first]) if first else arrives
        ledger.hold(now, until, holding.nodes, holding.usd_per_hour)
        ledger.busy_s[0] += holding.busy[0] * (until - now)
        ledger.busy_s[1] += holding.busy[1] * (until - now)
        spans.append((until - now, frozenset(live), holding.usd_per_hour))
        for name in live:
            left[name] -= (until - now) / holding.periods[name]
        now = until
        if until < arrives and first:
            finished.append(_finished(live.pop(first), now, solo_s[first]))
        else:
            arrival = coming.pop()
            name = arrival.job.name
            live[name], left[name] = arrival, solo_s[name] / arrival.job.iteration_s
    return Run(finished, ledger, spans)


def alone_s(arrival: Arrival) -> float:
    """Seconds that its iterations really take alone."""
    job, count = arrival.job, arrival.iterations
    if arrival.draws is None:
        return count * job.iteration_s
    return count * job.sync_s + math.fsum(rollout + train for rollout, train in itertools.islice(arrival.draws(), count))


def _finished(arrival: Arrival, now: float, solo_s: float) -> Finished:
    return Finished(
        job=arrival.job.name,
        slo=arrival.job.slo,
        arrived_s=arrival.at_s,
        placed_s=arrival.at_s,
        ended_s=now,
        iterations=arrival.iterations,
        solo_s=solo_s,
        planned_solo_s=arrival.iterations * arrival.job.iteration_s,
    )


def colocated(cluster: Cluster) -> Hold:
    """Both phases on training nodes of one's own, at the same speed, as the paper prices veRL at scale."""

    def hold(live: Mapping[str, Arrival]) -> Holding:
        nodes = sum(arrival.job.train_nodes for arrival in live.values())
        periods_s = {name: arrival.job.iteration_s for name, arrival in live.items()}
        return Holding((0, nodes), nodes * cluster.train.kind.usd_per_hour, periods_s, (0.0, nodes))

    return hold


def optimal(optimum: Optimum) -> Hold:
    """The cheapest division of whoever is there; moving costs nothing."""

    def hold(live: Mapping[str, Arrival]) -> Holding:
        found = optimum.solve(frozenset(live))
        nodes, seconds, busy = [0, 0], {}, [0.0, 0.0]
        for jobs, shared in found.parts:
            if shared is None:
                held = jobs[0].nodes
                settled = [jobs[0].iteration_s]
            else:
                held = shared.rollout_nodes, shared.train_nodes
                train = [bits << shared.rollout_nodes for bits in shared.train]
                rollout = rollout_bits(jobs, shared.rollout, train)
                settled = [period.mean_s for period in periods(jobs, rollout, train, shared.order)]
            nodes = [nodes[0] + held[0], nodes[1] + held[1]]
            for job, period in zip(jobs, settled, strict=True):
                seconds[job.name] = period
                busy[0] += job.nodes[0] * job.rollout_hold_s / period
                busy[1] += job.nodes[1] * job.train_hold_s / period
        return Holding((nodes[0], nodes[1]), found.usd, seconds, (busy[0], busy[1]))

    return hold
