"""What jobs would cost on parts of nodes, as if these could be cut anywhere: a baseline, and a bound that no policy can reach."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from research.fluid import Hold, Holding
from verl_mux.placement.model import Cluster, JobSpec
from verl_mux.placement.rules import Rules, modes_of

Pair = tuple[float, float]  # of (rollout, training) nodes


def gavel(cluster: Cluster) -> Hold:
    """Gavel+ as far as the paper tells it (RollMux, arXiv 2512.11306v2, section 7): every job alone, on GPUs of both kinds, in
    the fractions that are best for it.

    Taken for that here: the fractions that cost the least while an iteration lasts no longer than on the nodes that the job
    asks for. Phases take as many node-seconds on any number of nodes, the sync its time. Prices must be above 0."""
    usd = cluster.rollout.kind.usd_per_hour, cluster.train.kind.usd_per_hour

    def split(job: JobSpec) -> tuple[Pair, Pair]:
        rollout, train = own_split(job, usd)
        # Nodes' worth of phases: the rollout's node-seconds are the same on any number of nodes, those of the sync are not.
        busy = job.rollout_nodes * job.rollout.seconds + rollout * job.sync_s, job.train_nodes * job.train.seconds
        return (rollout, train), (busy[0] / job.iteration_s, busy[1] / job.iteration_s)

    return _each(split, usd)


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
    usd = cluster.rollout.kind.usd_per_hour, cluster.train.kind.usd_per_hour

    def busy(job: JobSpec) -> Pair:
        rollout, train = job.nodes
        return rollout * job.rollout_hold_s / job.iteration_s, train * job.train_hold_s / job.iteration_s

    def split(job: JobSpec) -> tuple[Pair, Pair]:
        least = min((busy(placed) for placed in modes_of(job, cluster, rules)), key=lambda nodes: _cost(nodes, usd))
        return least, least

    return _each(split, usd)


def _each(split: Callable[[JobSpec], tuple[Pair, Pair]], usd: Pair) -> Hold:
    """split: nodes that a job holds, and that its phases keep busy, in the mean. Jobs run as fast as alone."""

    def hold(jobs: Mapping[str, JobSpec]) -> Holding:
        parts = [split(job) for job in jobs.values()]
        nodes = _sum([held for held, _ in parts])
        periods = {name: job.iteration_s for name, job in jobs.items()}
        return Holding(nodes, _cost(nodes, usd), periods, _sum([busy for _, busy in parts]))

    return hold


def _sum(pairs: Sequence[Pair]) -> Pair:
    return math.fsum(rollout for rollout, _ in pairs), math.fsum(train for _, train in pairs)


def _cost(nodes: Pair, usd: Pair) -> float:
    return nodes[0] * usd[0] + nodes[1] * usd[1]
