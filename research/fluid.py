"""Runs in which jobs move on at the rate of their settled period, not phase by phase: the optimum, and
systems that share no nodes.

At every change jobs count as they are then: with the means of what their phases really take at that time of their lives. By how
much a job is slower than alone then holds until the next change. Called by policies.py; pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import msgspec

from research.optimum import Optimum
from research.outcome import Finished, Ledger, Run, Span
from research.workload.varying import Moments
from research.workload.workload import Arrival
from verl_mux.placement.group_run import periods, rollout_bits
from verl_mux.placement.model import Cluster, JobSpec, Rules, modes_of


class Holding(msgspec.Struct, frozen=True):
    """What is held at a time. nodes: per side, or parts. periods: seconds per iteration of every job. busy: nodes' worth of
    phases, per side."""

    nodes: tuple[float, float]
    usd_per_hour: float
    periods: Mapping[str, float]
    busy: tuple[float, float]


# The jobs there are, as they are at the time, by name.
Hold = Callable[[Mapping[str, JobSpec]], Holding]


def run_fluid(arrivals: Sequence[Arrival], moments: Mapping[str, Moments], hold: Hold) -> Run:
    """`hold` says what the jobs run on; it is asked at every arrival and departure."""
    ledger, finished, spans = Ledger(), [], []
    solo_s = {name: its.alone_s[-1] for name, its in moments.items()}
    coming = sorted(arrivals, key=lambda arrival: arrival.at_s)[::-1]
    live: dict[str, Arrival] = {}
    left: dict[str, float] = {}  # seconds that it would still take alone
    now = 0.0
    while coming or live:
        steps = {name: moments[name].step_after(solo_s[name] - left[name]) for name in live}
        jobs = {name: moments[name].at(step) for name, step in steps.items()}
        holding = hold(jobs)
        slower = {name: holding.periods[name] / job.iteration_s for name, job in jobs.items()}
        arrives = coming[-1].at_s if coming else math.inf
        ends = {name: now + left[name] * slower[name] for name in live}
        first = min(ends, key=ends.__getitem__, default=None)
        until = min(arrives, ends[first]) if first else arrives
        ledger.hold(now, until, holding.nodes, holding.usd_per_hour)
        ledger.busy_s[0] += holding.busy[0] * (until - now)
        ledger.busy_s[1] += holding.busy[1] * (until - now)
        spans.append(Span(until - now, steps, holding.usd_per_hour))
        for name in live:
            left[name] -= (until - now) / slower[name]
        now = until
        if until < arrives and first:
            finished.append(_finished(live.pop(first), now, solo_s[first]))
        else:
            arrival = coming.pop()
            name = arrival.job.name
            live[name], left[name] = arrival, solo_s[name]
    return Run(finished, ledger, spans)


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

    def hold(jobs: Mapping[str, JobSpec]) -> Holding:
        nodes = sum(job.train_nodes for job in jobs.values())
        periods_s = {name: job.iteration_s for name, job in jobs.items()}
        return Holding((0, nodes), cluster.usd(0, nodes), periods_s, (0.0, nodes))

    return hold


def optimal(optimum: Optimum) -> Hold:
    """The cheapest division of the jobs present; moving costs nothing."""
    cluster = optimum.cluster

    def hold(present: Mapping[str, JobSpec]) -> Holding:
        found = optimum.solve(frozenset(job.name for job in present.values()))
        names = {job.name: name for name, job in present.items()}
        nodes, seconds, busy = [0, 0], {}, [0.0, 0.0]
        for jobs, shared in found.parts:
            if shared is None:
                held = jobs[0].nodes
                settled = [jobs[0].iteration_s]
            else:
                held = shared.rollout_nodes, shared.train_nodes
                train = [bits << shared.rollout_nodes for bits in shared.train]
                rollout = rollout_bits(jobs, shared.rollout, train)
                settled = periods(jobs, rollout, train)
            nodes = [nodes[0] + held[0], nodes[1] + held[1]]
            for job, period in zip(jobs, settled, strict=True):
                seconds[names[job.name]] = period
                busy[0] += job.nodes[0] * job.rollout_hold_s / period
                busy[1] += job.nodes[1] * job.train_hold_s / period
        return Holding((nodes[0], nodes[1]), cluster.usd(*nodes), seconds, (busy[0], busy[1]))

    return hold


Pair = tuple[float, float]  # of (rollout, training) nodes


def gavel(cluster: Cluster) -> Hold:
    """Gavel+ as far as the paper tells it (RollMux, arXiv 2512.11306v2, section 7): every job alone, on GPUs of both kinds, in
    the fractions that are best for it.

    Taken for that here: the fractions that cost the least while an iteration lasts no longer than on the nodes that the job
    asks for. Phases take as many node-seconds on any number of nodes, the sync its time. Prices must be above 0."""
    usd = cluster.usd(1, 0), cluster.usd(0, 1)

    def split(job: JobSpec) -> tuple[Pair, Pair]:
        rollout, train = own_split(job, usd)
        # Nodes' worth of phases: the rollout's node-seconds are the same on any number of nodes, those of the sync are not.
        busy = job.rollout_nodes * job.rollout.seconds + rollout * job.sync_s, job.train_nodes * job.train.seconds
        return (rollout, train), (busy[0] / job.iteration_s, busy[1] / job.iteration_s)

    return _each(split, cluster)


def own_split(job: JobSpec, usd_per_hour: Pair) -> Pair:
    """Nodes r and t for which usd . (r, t) is least under a / r + b / t = rollout + training seconds alone, where a and b are the
    node-seconds of a rollout and of a training: r = k sqrt(a / usd of r), and t likewise."""
    work = job.rollout_nodes * job.rollout.seconds, job.train_nodes * job.train.seconds
    k = sum(math.sqrt(w * usd) for w, usd in zip(work, usd_per_hour, strict=True)) / (job.rollout.seconds + job.train.seconds)
    rollout, train = (k * math.sqrt(w / usd) for w, usd in zip(work, usd_per_hour, strict=True))
    return rollout, train


def ideal(cluster: Cluster, rules: Rules) -> Hold:
    """Nodes are paid for only while a phase runs on them, as if all phases could be packed without a gap, whatever SLOs, host
    memory, whole nodes and switches ask for. So a run of any policy costs no less; at a moment it may, with slower jobs."""

    def busy(job: JobSpec) -> Pair:
        rollout, train = job.nodes
        return rollout * job.rollout_hold_s / job.iteration_s, train * job.train_hold_s / job.iteration_s

    def split(job: JobSpec) -> tuple[Pair, Pair]:
        least = min((busy(placed) for placed in modes_of(job, cluster, rules)), key=lambda nodes: cluster.usd(*nodes))
        return least, least

    return _each(split, cluster)


def _each(split: Callable[[JobSpec], tuple[Pair, Pair]], cluster: Cluster) -> Hold:
    """split: nodes that a job holds, and that its phases keep busy, in the mean. Jobs run as fast as alone."""

    def hold(jobs: Mapping[str, JobSpec]) -> Holding:
        parts = [split(job) for job in jobs.values()]
        nodes = _sum([held for held, _ in parts])
        periods = {name: job.iteration_s for name, job in jobs.items()}
        return Holding(nodes, cluster.usd(*nodes), periods, _sum([busy for _, busy in parts]))

    return hold


def _sum(pairs: Sequence[Pair]) -> Pair:
    return math.fsum(rollout for rollout, _ in pairs), math.fsum(train for _, train in pairs)
