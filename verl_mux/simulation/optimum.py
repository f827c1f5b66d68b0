"""The cheapest placement that this project's own search finds, solved anew at every arrival and departure, moving everybody
for nothing.

Something to measure policies against, not a policy one could run: all divisions into groups of up to `cap`, each on the
nodes that search/cheapest_nodes.py finds. It is no true optimum, as that search leaves out some layouts that would do (it
says which), so a policy can come out below it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from verl_mux.scheduling.model import Cluster, JobSpec
from verl_mux.scheduling.search.partition import Part, Partitioner
from verl_mux.scheduling.search.rules import Rules
from verl_mux.scheduling.time.feasibility import Feasibility

# Jobs at a time. On the packaged trace 9 takes seconds and covers two thirds of the time, 12 takes minutes for nine tenths.
MAX_JOBS = 9


class Optimum:
    """usd(names) -> USD per hour, or None beyond `max_jobs`. Answers are remembered."""

    def __init__(self, jobs: Iterable[JobSpec], cluster: Cluster, rules: Rules, max_jobs: int = MAX_JOBS) -> None:
        self.jobs = {job.name: job for job in jobs}
        self.cluster = cluster
        self.max_jobs = max(max_jobs, 1)
        self.partitioner = Partitioner(cluster, Feasibility(rules.orders), rules.cap)

    def usd(self, names: frozenset[str]) -> float | None:
        return self.solve(names)[0] if len(names) <= self.max_jobs else None

    def solve(self, names: frozenset[str]) -> tuple[float, list[Part]]:
        """Beyond `max_jobs`, blocks of so many by name, each on its own: then this is no bound any more."""
        ordered = sorted(names)
        usd = 0.0
        parts: list[Part] = []
        for start in range(0, len(ordered), self.max_jobs):
            block = ordered[start : start + self.max_jobs]
            block_usd, block_parts = self.partitioner.solve(self.jobs[name] for name in block)
            usd, parts = usd + block_usd, parts + block_parts
        return usd, parts

    def compare(self, spans: Sequence[tuple[float, frozenset[str], float]]) -> tuple[float | None, float]:
        """(USD spent over USD of the optimum, both over the time in which it is tractable; that part of the time).

        spans: seconds, names of the jobs placed, USD per hour."""
        spent = least = covered = 0.0
        for seconds, names, usd in spans:
            if (best := self.usd(names)) is not None:
                spent += seconds * usd
                least += seconds * best
                covered += seconds
        everything = sum(seconds for seconds, _, _ in spans)
        return (spent / least if least else None), covered / everything
