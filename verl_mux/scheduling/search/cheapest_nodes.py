"""The cheapest nodes that a given set of jobs can share within everyone's SLO and the nodes' host memory.

Layouts of the jobs over both sides are tried cheapest first. Left out, as everywhere, are those that some departure would spoil:
first those in which two jobs share what they could not share on their own. (One side may be hopeless and *both* feasible: the
jobs then keep in step.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from verl_mux.scheduling.model import Cluster, JobSpec, NodeKind
from verl_mux.scheduling.search.layouts import Layout, layouts
from verl_mux.scheduling.time.conflicts import Pairs, connected
from verl_mux.scheduling.time.feasibility import TOLERANCE, Feasibility


class SharedNodes(msgspec.Struct, frozen=True):
    """usd_per_hour; nodes per side; for each job, in the order given, its nodes of each side as bits; the order."""

    usd_per_hour: float
    rollout_nodes: int
    train_nodes: int
    rollout: tuple[int, ...]
    train: tuple[int, ...]
    order: str


def isolated_usd(job: JobSpec, cluster: Cluster) -> float:
    return job.rollout_nodes * cluster.rollout.kind.usd_per_hour + job.train_nodes * cluster.train.kind.usd_per_hour


def cheapest_nodes(
    jobs: Sequence[JobSpec], cluster: Cluster, feasibility: Feasibility, below: float = math.inf
) -> SharedNodes | None:
    """The cheapest way for `jobs`, sorted by name, to share nodes as one group under `below` USD per hour, or None."""
    if least_usd(jobs, cluster) >= below:
        return None
    for usd, rollout, train in _by_price(jobs, cluster, feasibility, below):
        if order := feasibility.order(jobs, rollout.pairs, train.pairs):
            return SharedNodes(usd, rollout.nodes, train.nodes, rollout.on, train.on, order)
    return None


def least_usd(jobs: Sequence[JobSpec], cluster: Cluster) -> float:
    """No way to share costs less: nodes for the largest job, and node time for everybody's least share."""
    rollout = sum(j.rollout_nodes * j.rollout_share for j in jobs)
    train = sum(j.train_nodes * j.train_share for j in jobs)
    nodes = (
        max(max(j.rollout_nodes for j in jobs), math.ceil(rollout - 1e-6)),
        max(max(j.train_nodes for j in jobs), math.ceil(train - 1e-6)),
    )
    return nodes[0] * cluster.rollout.kind.usd_per_hour + nodes[1] * cluster.train.kind.usd_per_hour


def _by_price(
    jobs: Sequence[JobSpec], cluster: Cluster, feasibility: Feasibility, below: float
) -> list[tuple[float, Layout, Layout]]:
    """Layouts of both sides under `below`, cheapest first, that make one group and in which no two jobs clash."""
    usd = cluster.rollout.kind.usd_per_hour, cluster.train.kind.usd_per_hour
    on_rollout, on_train, on_both = feasibility.hopeless_pairs(jobs)
    rollout = [(j.rollout_share, j.rollout_memory_gb) for j in jobs]
    train = [(j.train_share, j.train_memory_gb) for j in jobs]
    never = on_rollout & on_train & on_both
    rollouts = _fitting(tuple(j.rollout_nodes for j in jobs), rollout, cluster.rollout.kind, never | on_rollout & on_both)
    trains = _fitting(tuple(j.train_nodes for j in jobs), train, cluster.train.kind, never | on_train & on_both)
    both = [
        (price, r, t)
        for r in rollouts
        for t in trains
        if (price := r.nodes * usd[0] + t.nodes * usd[1]) < below
        and not (r.pairs & t.pairs & on_both or r.pairs & ~t.pairs & on_rollout or t.pairs & ~r.pairs & on_train)
        and len(connected(r.pairs | t.pairs, len(jobs))) == 1
    ]
    return sorted(both, key=lambda found: found[0])


def _fitting(needs: tuple[int, ...], sizes: Sequence[tuple[float, float]], kind: NodeKind, hopeless: Pairs) -> list[Layout]:
    """Layouts where on every node the jobs' shares of its time and their states in its host memory both fit, and no `hopeless`
    pair shares one."""
    sums = [(0.0, 0.0)]
    for time, gb in sizes:
        sums += [(t + time, g + gb) for t, g in sums]
    fits = [time <= TOLERANCE and gb <= kind.host_memory_gb for time, gb in sums]
    return [layout for layout in layouts(needs) if not layout.pairs & hopeless and all([fits[jobs] for jobs in layout.occupied])]
