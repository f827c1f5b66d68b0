"""The cheapest placement of the jobs that are there, solved anew at every arrival and departure, moving everybody for nothing.

Something to measure policies against, not a policy one could run: all divisions into groups of up to `cap`, each on the cheapest
nodes on which its settled periods, all jobs beginning at once under FIFO, keep every SLO. Up to `EXACT_JOBS` jobs nothing is left
out (sharing.py). Beyond, groups that a departure would spoil are (search/cheapest_nodes.py), and the division of the jobs
says how far from proven it is (division.py). Where a policy holds the same jobs for less, that is the answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from research.optimum.division import Divided, Division
from research.optimum.sharing import Sharing
from verl_mux.placement.feasibility import Feasibility
from verl_mux.placement.layouts import Price, cheapest_nodes
from verl_mux.placement.model import Cluster, JobSpec
from verl_mux.placement.repack import Part, Partitioner
from verl_mux.placement.rules import Rules

EXACT_JOBS = 5
# Policies are compared where no more jobs are there at a time.
MAX_JOBS = 9
# Beyond so many the sets alone are too many.
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
        """Beyond MOST_JOBS, blocks of so many by name, each on its own, and nothing proven."""
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
