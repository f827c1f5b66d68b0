"""Whether jobs that share nodes in a given way all keep within their SLOs, remembered so that no case is run twice.

A way of sharing counts as feasible only if it stays so whoever leaves: the group without any one of its jobs must be
feasible as well. With several nodes a departure can slow the others down (a scheduling anomaly); such groups are
refused. It also means that most large groups are refused by a small one, without simulating them.
"""

from __future__ import annotations

from collections.abc import Sequence

from verl_mux.placement.model import JobSpec
from verl_mux.placement.time.chance import likely
from verl_mux.placement.time.conflicts import Pairs, connected, nodes_of_pairs, pair, pairs_without, within
from verl_mux.placement.time.periods import mean_seconds, rollout_bits

_Placed = tuple[tuple[str, bool], ...]

TOLERANCE = 1 + 1e-9
# Where planned periods take no more of what is allowed, phases may vary as they do.
SURE = 0.75


class Feasibility:
    """Remembers verdicts by the jobs as they are placed: `forget` a job when it leaves or when its estimates change.

    keep: probability with which all must keep within their SLOs while phases vary (see chance.py); 0: phases last as estimated.
    """

    def __init__(self, orders: Sequence[str] = ("fifo",), keep: float = 0.0) -> None:
        self.orders = tuple(orders)
        self.keep = keep
        self.simulated = 0
        # By the jobs as they are placed, sorted by name, then by the pairs that share rollout and training nodes.
        self._known: dict[_Placed, dict[tuple[Pairs, Pairs], str | None]] = {}
        # Of those that keep theirs, each run as one group: mean seconds of an iteration of each job.
        self._seconds: dict[_Placed, dict[tuple[Pairs, Pairs], Sequence[float]]] = {}
        self._sets: dict[str, list[_Placed]] = {}
        self._hopeless_pairs: dict[_Placed, tuple[bool, bool, bool]] = {}

    def order(self, jobs: Sequence[JobSpec], rollout: Pairs, train: Pairs) -> str | None:
        """The first order under which all jobs keep within their SLOs when these pairs share nodes, or None."""
        if not rollout | train:
            return self.orders[0]
        # The order of arrival must not matter: from another start a group may settle otherwise (group_periods begins alike).
        rank = tuple(sorted(range(len(jobs)), key=lambda i: jobs[i].name))
        return self._order([jobs[i] for i in rank], within(rollout, rank), within(train, rank))

    def keeps(self, jobs: Sequence[JobSpec], rollout: Pairs, train: Pairs, order: str) -> bool:
        """Whether all keep within their SLOs under this very order, whoever of them leaves under the first one that will do."""
        found = self.order(jobs, rollout, train)
        if order in (found, *self.orders):
            return found is not None
        rank = tuple(sorted(range(len(jobs)), key=lambda i: jobs[i].name))
        ordered = [jobs[i] for i in rank]
        return self._kept_under(ordered, *_masks(ordered, within(rollout, rank), within(train, rank)), order) is not None

    def seconds(self, jobs: Sequence[JobSpec], rollout: Pairs, train: Pairs) -> Sequence[float]:
        """The mean iteration of each job under the order that `order` found. The jobs make one group and are sorted by name."""
        return self._seconds[tuple([job.placed_as for job in jobs])][rollout, train]

    def hopeless_pairs(self, jobs: Sequence[JobSpec]) -> tuple[Pairs, Pairs, Pairs]:
        """Pairs that cannot even on their own share rollout nodes, training nodes, or both. Jobs sorted by name."""
        rollout = train = both = 0
        for high in range(1, len(jobs)):
            for low in range(high):
                hopeless = self._hopeless(jobs[low], jobs[high])
                bit = pair(low, high)
                rollout, train, both = rollout | hopeless[0] * bit, train | hopeless[1] * bit, both | hopeless[2] * bit
        return rollout, train, both

    def _hopeless(self, low: JobSpec, high: JobSpec) -> tuple[bool, bool, bool]:
        """Whether the two cannot share rollout nodes, training nodes, both."""
        placed = low.placed_as, high.placed_as
        if placed not in self._hopeless_pairs:
            ways = ((1, 0), (0, 1), (1, 1))
            rollout, train, both = [self._order([low, high], *way) is None for way in ways]
            self._hopeless_pairs[placed] = rollout, train, both
        return self._hopeless_pairs[placed]

    def forget(self, name: str) -> None:
        for placed in self._sets.pop(name, ()):
            self._known.pop(placed, None)
            self._hopeless_pairs.pop(placed, None)
            self._seconds.pop(placed, None)

    def _order(self, jobs: Sequence[JobSpec], rollout: Pairs, train: Pairs) -> str | None:
        placed = tuple([job.placed_as for job in jobs])
        known = self._known.get(placed)
        if known is None:
            known = self._known[placed] = {}
            for job in jobs:
                self._sets.setdefault(job.name, []).append(placed)
        if (rollout, train) not in known:
            known[rollout, train] = self._judge(jobs, rollout, train, len(jobs))
        return known[rollout, train]

    def _judge(self, jobs: Sequence[JobSpec], rollout: Pairs, train: Pairs, count: int) -> str | None:
        groups = connected(rollout | train, count)
        if len(groups) > 1:
            orders = [
                self._order([jobs[i] for i in kept], within(rollout, kept), within(train, kept))
                for kept in groups
                if len(kept) > 1
            ]
            return None if None in orders else max(orders, key=self.orders.index, default=self.orders[0])
        for gone in range(count) if count > 2 else ():
            rest = [*jobs[:gone], *jobs[gone + 1 :]]
            if self._order(rest, pairs_without(rollout, count, gone), pairs_without(train, count, gone)) is None:
                return None
        return self._simulate(jobs, rollout, train)

    def _simulate(self, jobs: Sequence[JobSpec], rollout: Pairs, train: Pairs) -> str | None:
        self.simulated += 1
        on_rollout, on_train = _masks(jobs, rollout, train)
        for order in self.orders:
            if (found := self._kept_under(jobs, on_rollout, on_train, order)) is not None:
                self._seconds.setdefault(tuple([job.placed_as for job in jobs]), {})[rollout, train] = found
                return order
        return None

    def _kept_under(
        self, jobs: Sequence[JobSpec], rollout: Sequence[int], train: Sequence[int], order: str
    ) -> Sequence[float] | None:
        """The mean iteration of each job under this order, if all keep theirs."""
        found = mean_seconds(jobs, rollout, train, order)
        room = max(seconds / job.limit_s for job, seconds in zip(jobs, found, strict=True))
        kept = room <= TOLERANCE and (not self.keep or room < SURE or likely(jobs, rollout, train, order, self.keep))
        return found if kept else None


def _masks(jobs: Sequence[JobSpec], rollout: Pairs, train: Pairs) -> tuple[Sequence[int], Sequence[int]]:
    """Nodes as bits of one numbering that bring about just these conflicts."""
    count = len(jobs)
    on_train = [bits << (count * (count - 1) // 2) for bits in nodes_of_pairs(train, count)]
    return rollout_bits(jobs, nodes_of_pairs(rollout, count), on_train), on_train
