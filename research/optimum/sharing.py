"""The least that a set of jobs costs as one co-execution group: every layout of both sides, cheapest first.

Unlike the live search it leaves nothing out that would do at this moment: two jobs may share both sides though neither alone
would do, and what a departure would bring is not asked, as the optimum moves everybody for nothing. Jobs that need more than
`EXACT_NODES` nodes a side are laid out by the live search's own layouts: whole classes of nodes and part of one more.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import msgspec

from verl_mux.placement.feasibility import TOLERANCE, Pairs, connected, nodes_for
from verl_mux.placement.group_run import mean_seconds
from verl_mux.placement.layouts import EPSILON_USD, Classes, Layout, SharedNodes, layout_of, layouts
from verl_mux.placement.model import Cluster, JobSpec, NodeKind

EXACT_NODES = 2
ORDER = "fifo"


class Sharing:
    """Remembers which conflicts keep which jobs within their SLOs; job names are unique. price: what ways to share are compared
    by, from the mean iteration of each job, no less than USD per hour; None: just that. simulated: groups that were run."""

    def __init__(self, cluster: Cluster, price: Callable[[SharedNodes, Sequence[float]], float] | None = None) -> None:
        self.cluster = cluster
        self.price = price
        self.simulated = 0
        self._kept: dict[tuple[tuple[tuple[str, bool], ...], Pairs, Pairs], Sequence[float] | None] = {}

    def cheapest(self, jobs: Sequence[JobSpec], below: float = math.inf) -> SharedNodes | None:
        """For jobs as they are placed, sorted by name; None if nothing under `below` keeps every SLO."""
        usd = self.cluster.rollout.kind.usd_per_hour, self.cluster.train.kind.usd_per_hour
        rollouts, trains = self._by_nodes(jobs, 0), self._by_nodes(jobs, 1)
        prices = sorted((nodes * usd[0] + more * usd[1], nodes, more) for nodes in rollouts for more in trains)
        best = None
        for least, nodes, more in prices:
            if least >= below:
                break
            for r, t in itertools.product(rollouts[nodes], trains[more]):
                if (seconds := self._kept_in(jobs, r.pairs, t.pairs)) is None:
                    continue
                found = SharedNodes(tuple(jobs), least, nodes, more, r.on, t.on, ORDER, least)
                if self.price is None:
                    return found
                if (asked := self.price(found, seconds)) < below:
                    best, below = msgspec.structs.replace(found, price=asked), asked - EPSILON_USD
        return best

    def _by_nodes(self, jobs: Sequence[JobSpec], side: int) -> dict[int, list[Layout]]:
        """The layouts in which everything fits, by their number of nodes: of those in which the same jobs meet the smallest.
        side: 0 rollout, 1 training."""
        kind = (self.cluster.rollout, self.cluster.train)[side].kind
        fits = _fits([((job.rollout_share, job.train_share)[side], job.memory_gb[side]) for job in jobs], kind)
        met: set[Pairs] = set()
        found: dict[int, list[Layout]] = {}
        for layout in _all_layouts(tuple(job.nodes[side] for job in jobs)):
            if layout.pairs not in met and all([fits[on] for on in layout.occupied]):
                met.add(layout.pairs)
                found.setdefault(layout.nodes, []).append(layout)
        return found

    def _kept_in(self, jobs: Sequence[JobSpec], rollout: Pairs, train: Pairs) -> Sequence[float] | None:
        """The mean iteration of each job, if they make one group and all keep within their SLOs."""
        if len(connected(rollout | train, len(jobs))) > 1:
            return None
        key = tuple([job.placed_as for job in jobs]), rollout, train
        if key not in self._kept:
            self._kept[key] = self._run(jobs, rollout, train)
        return self._kept[key]

    def _run(self, jobs: Sequence[JobSpec], rollout: Pairs, train: Pairs) -> Sequence[float] | None:
        self.simulated += 1
        found = mean_seconds(jobs, *nodes_for(jobs, rollout, train), ORDER)
        kept = all([seconds <= job.limit_s * TOLERANCE for job, seconds in zip(jobs, found, strict=True)])
        return found if kept else None


def _fits(sizes: Sequence[tuple[float, float]], kind: NodeKind) -> list[bool]:
    """By the jobs on a node as bits: whether their least shares of its time and their states both have room there."""
    sums = [(0.0, 0.0)]
    for time, gb in sizes:
        sums += [(t + time, g + gb) for t, g in sums]
    return [time <= TOLERANCE and gb <= kind.host_memory_gb for time, gb in sums]


def _all_layouts(needs: tuple[int, ...]) -> tuple[Layout, ...]:
    """Fewest nodes first."""
    return _spread_out(needs) if max(needs) <= EXACT_NODES else layouts(needs)


@functools.lru_cache(maxsize=4096)
def _spread_out(needs: tuple[int, ...]) -> tuple[Layout, ...]:
    """Every layout there is, none twice up to renaming nodes."""
    found: set[Classes] = {()}
    for job, need in enumerate(needs):
        found = {laid for classes in found for laid in _join(classes, 1 << job, need)}
    ordered = sorted(found, key=lambda classes: (sum(count for _, count in classes), classes))
    return tuple(layout_of(classes, len(needs)) for classes in ordered)


def _join(classes: Classes, bit: int, need: int) -> Iterator[Classes]:
    """The job on any of the nodes there are, and on new ones."""
    for taken in itertools.product(*[range(min(count, need) + 1) for _, count in classes]):
        left = need - sum(taken)
        if left >= 0:
            shared = [(on | bit, took) for (on, _), took in zip(classes, taken, strict=True) if took]
            rest = [(on, count - took) for (on, count), took in zip(classes, taken, strict=True) if count > took]
            yield tuple(sorted([*shared, *rest, *([(bit, left)] if left else [])]))
