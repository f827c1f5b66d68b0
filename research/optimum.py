"""The cheapest placement of the jobs that are there, solved anew at every arrival and departure, moving every job for nothing.

Something to measure policies against, not a policy one could run: all divisions into groups of up to `cap`, each on the cheapest
nodes on which its settled periods, all jobs beginning at once under FIFO, keep every SLO. Up to EXACT_JOBS jobs nothing is left
out (`Sharing`). Beyond, groups that a departure would spoil are (placement/divisions.py), and the division of the jobs
says how far from proven it is (`Division`). Where a policy holds the same jobs for less, that is the answer.
Runs in `verl-mux simulate` and the paper's re-run; imports the periods of placement, none of its searches.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from verl_mux.errors import UserError
from verl_mux.placement.divisions import (
    Find,
    Layout,
    Part,
    Partitioner,
    SharedNodes,
    by_nodes,
    cheapest_nodes,
    fits_on_node,
    in_cheapest_modes,
    layouts,
)
from verl_mux.placement.feasibility import TOLERANCE, Feasibility, Pairs, connected, nodes_for
from verl_mux.placement.group_run import periods
from verl_mux.placement.groups import EPSILON_USD, Classes, Price, cheapest_alone, isolated_usd
from verl_mux.placement.model import Cluster, JobSpec, Rules

EXACT_NODES = 2


class Sharing:
    """Remembers which conflicts keep which jobs within their SLOs; job names are unique. price: what ways to share are compared
    by, from the mean iteration of each job, no less than USD per hour; None: just that. simulated: groups that were run."""

    def __init__(
        self, cluster: Cluster, price: Callable[[float, Sequence[JobSpec], Sequence[float]], float] | None = None
    ) -> None:
        self.cluster = cluster
        self.price = price
        self.simulated = 0
        self._kept: dict[tuple[tuple[tuple[str, bool], ...], Pairs, Pairs], Sequence[float] | None] = {}

    def cheapest(self, jobs: Sequence[JobSpec], below: float = math.inf) -> SharedNodes | None:
        """For jobs as they are placed, sorted by name; None if nothing under `below` keeps every SLO."""
        rollouts, trains = self._by_nodes(jobs, 0), self._by_nodes(jobs, 1)
        prices = sorted((self.cluster.usd(nodes, more), nodes, more) for nodes in rollouts for more in trains)
        best = None
        for least, nodes, more in prices:
            if least >= below:
                break
            for r, t in itertools.product(rollouts[nodes], trains[more]):
                if (seconds := self._kept_in(jobs, r.pairs, t.pairs)) is None:
                    continue
                found = SharedNodes(tuple(jobs), least, nodes, more, r.on, t.on, least)
                if self.price is None:
                    return found
                if (asked := self.price(least, jobs, seconds)) < below:
                    best, below = msgspec.structs.replace(found, price=asked), asked - EPSILON_USD
        return best

    def _by_nodes(self, jobs: Sequence[JobSpec], side: int) -> dict[int, list[Layout]]:
        """The layouts in which everything fits, by their number of nodes: of those in which the same jobs meet the smallest.
        side: 0 rollout, 1 training."""
        kind = self.cluster.kinds[side]
        fits = fits_on_node([((job.rollout_share, job.train_share)[side], job.memory_gb[side]) for job in jobs], kind)
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
        found = periods(jobs, *nodes_for(jobs, rollout, train))
        kept = all([seconds <= job.limit_s * TOLERANCE for job, seconds in zip(jobs, found, strict=True)])
        return found if kept else None


def _all_layouts(needs: tuple[int, ...]) -> tuple[Layout, ...]:
    """Fewest nodes first."""
    return _spread_out(needs) if max(needs) <= EXACT_NODES else layouts(needs)


@functools.lru_cache(maxsize=4096)
def _spread_out(needs: tuple[int, ...]) -> tuple[Layout, ...]:
    """Every layout there is, none twice up to renaming nodes."""
    found: set[Classes] = {()}
    for job, need in enumerate(needs):
        found = {laid for classes in found for laid in _join(classes, 1 << job, need)}
    return by_nodes(found, len(needs))


def _join(classes: Classes, bit: int, need: int) -> Iterator[Classes]:
    """The job on any of the nodes there are, and on new ones."""
    for taken in itertools.product(*[range(min(count, need) + 1) for _, count in classes]):
        left = need - sum(taken)
        if left >= 0:
            shared = [(on | bit, took) for (on, _), took in zip(classes, taken, strict=True) if took]
            rest = [(on, count - took) for (on, count), took in zip(classes, taken, strict=True) if count > took]
            yield tuple(sorted([*shared, *rest, *([(bit, left)] if left else [])]))


# Of more jobs no groups of more than MANY are looked at: there are most of those, and they save the least.
FEW_JOBS, MANY = 10, 4


class Divided(msgspec.Struct, frozen=True):
    """usd: per hour, or what else is counted. proven: no division into such groups costs less than that."""

    usd: float
    parts: list[Part]
    proven: float


class _Priced(msgspec.Struct, frozen=True):
    """usd: as in Divided, of these jobs, as a group or in the best way found to split one off. shared: None if splitting is no
    dearer."""

    usd: float
    shared: SharedNodes | None


class Division:
    """`solve` is asked about many sets of jobs; what sets cost by `find` is remembered."""

    def __init__(self, cluster: Cluster, find: Find, rules: Rules) -> None:
        self.cluster = cluster
        self.find = find
        self.rules = rules
        self._known: dict[tuple[str, ...], _Priced] = {}

    def solve(self, jobs: Sequence[JobSpec]) -> Divided:
        """Jobs sorted by name."""
        alone = [cheapest_alone(job, self.cluster, self.rules) for job in jobs]
        columns: list[tuple[float, Part]] = [(isolated_usd(job, self.cluster), ((job,), None)) for job in alone]
        most = self.rules.cap if len(jobs) <= FEW_JOBS else min(self.rules.cap, MANY)
        for size in range(2, min(most, len(jobs)) + 1):
            for members in itertools.combinations(jobs, size):
                if (shared := self._price(members).shared) is not None:
                    columns.append((shared.price, (shared.jobs, shared)))
        return _cheapest_cover(columns, jobs)

    def _price(self, jobs: tuple[JobSpec, ...]) -> _Priced:
        """Smaller sets have been priced before."""
        key = tuple([job.name for job in jobs])
        if key not in self._known:
            apart = min([self._usd(jobs[:i] + jobs[i + 1 :]) + self._usd((job,)) for i, job in enumerate(jobs)])
            shared = in_cheapest_modes(jobs, self.cluster, self.rules, self.find, apart - EPSILON_USD)
            self._known[key] = _Priced(shared.price if shared else apart, shared)
        return self._known[key]

    def _usd(self, jobs: tuple[JobSpec, ...]) -> float:
        if len(jobs) > 1:
            return self._price(jobs).usd
        return isolated_usd(cheapest_alone(jobs[0], self.cluster, self.rules), self.cluster)


@contextlib.contextmanager
def _stdout_aside() -> Iterator[None]:
    """HiGHS prints lines of its own now and then, past Python: to stderr, since programs read what we print."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _cheapest_cover(columns: Sequence[tuple[float, Part]], jobs: Sequence[JobSpec]) -> Divided:
    """Every job in just one group, at the least sum of prices."""
    try:
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csc_array
    except ImportError as error:
        raise UserError("the optimum of more than 5 jobs needs scipy; install it, or leave the optimum out") from error
    number = {job.name: i for i, job in enumerate(jobs)}
    rows = [number[job.name] for _, (members, _) in columns for job in members]
    ends = np.cumsum([0, *(len(members) for _, (members, _) in columns)])
    cover = csc_array((np.ones(len(rows)), rows, ends), shape=(len(jobs), len(columns)))
    with _stdout_aside():
        found = milp(
            [usd for usd, _ in columns],
            integrality=np.ones(len(columns)),
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(cover, 1, 1),
        )
    chosen = [column for column, taken in zip(columns, found.x, strict=True) if taken > 0.5]
    return Divided(sum(usd for usd, _ in chosen), [part for _, part in chosen], found.mip_dual_bound)


EXACT_JOBS = 5
# Policies are compared where no more jobs are there at a time.
MAX_JOBS = 9
# Beyond this number of jobs the sets alone are too many.
MOST_JOBS = 20


class Compared(msgspec.Struct, frozen=True):
    """over: USD spent over USD of the optimum, both over the time with few enough jobs. covers: that part of the time."""

    over: float | None
    covers: float


class Optimum:
    """Answers are remembered. By the rule `count_stays` divisions are compared by what the same work costs."""

    def __init__(self, jobs: Iterable[JobSpec], cluster: Cluster, rules: Rules, max_jobs: int = MAX_JOBS) -> None:
        self.jobs = {job.name: job for job in jobs}
        self.cluster = cluster
        self.max_jobs = max_jobs
        feasibility = Feasibility()
        price = Price(cluster, rules).of_shared if rules.count_stays else None
        self._small = Partitioner(cluster, feasibility, rules, Sharing(cluster, price).cheapest)
        self._large = Division(cluster, lambda jobs, below: cheapest_nodes(jobs, cluster, feasibility, below, price), rules)
        self._known: dict[frozenset[str], Divided] = {}

    def solve(self, names: frozenset[str]) -> Divided:
        """Beyond MOST_JOBS, blocks of that size by name, each on its own, and nothing proven."""
        if names not in self._known:
            jobs = [self.jobs[name] for name in sorted(names)]
            self._known[names] = self._solve(jobs) if len(jobs) <= MOST_JOBS else self._in_blocks(jobs)
        return self._known[names]

    def _solve(self, jobs: Sequence[JobSpec]) -> Divided:
        if len(jobs) > EXACT_JOBS:
            return self._large.solve(jobs)
        usd, parts = self._small.solve(jobs)
        return Divided(usd, parts, usd)

    def _in_blocks(self, jobs: Sequence[JobSpec]) -> Divided:
        usd = 0.0
        parts: list[Part] = []
        for start in range(0, len(jobs), MOST_JOBS):
            block = self._solve(jobs[start : start + MOST_JOBS])
            usd, parts = usd + block.usd, parts + block.parts
        return Divided(usd, parts, 0.0)

    def compare(self, spans: Sequence[tuple[float, frozenset[str], float]]) -> Compared:
        """Only where there are no more than `max_jobs` jobs. spans: seconds, names of the jobs placed as they then were, USD per
        hour."""
        spent = least = covered = 0.0
        for seconds, names, usd in spans:
            if len(names) <= self.max_jobs:
                spent += seconds * usd
                least += seconds * min(self.solve(names).usd, usd)
                covered += seconds
        return Compared(spent / least if least else None, covered / sum(seconds for seconds, _, _ in spans))
