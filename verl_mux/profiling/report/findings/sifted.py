"""A run with what is abnormal set aside: the stalls, the slow requests, and the rest, which is judged as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import polars as pl

from verl_mux.profiling.report.findings import pools, slow_engines, slow_requests, stalls
from verl_mux.profiling.report.findings.completion_gaps import Gap, Place
from verl_mux.profiling.report.findings.finding import Finding
from verl_mux.profiling.report.input.reduction import REQUEST_KEY
from verl_mux.profiling.report.measures.analysis import Analysis


@dataclass(frozen=True)
class Sifted:
    """What several kinds of findings build on, derived once from an Analysis."""

    analysis: Analysis

    @cached_property
    def stalls(self) -> dict[Place, Gap]:
        return stalls.stalls(self.analysis, self.starved)

    @cached_property
    def slow(self) -> list[Finding]:
        return slow_requests.find(self.analysis, self.stalls, self.starved)

    @cached_property
    def slow_engines(self) -> list[Finding]:
        return slow_engines.find(self.analysis, self.stalls, self.starved)

    @cached_property
    def of_even_engines(self) -> pl.DataFrame:
        """`ordinary`, without what ran on engines that are findings themselves: the shape of the rest is the lengths'."""
        odd = {(f.job, replica) for f in self.slow_engines for replica in f.evidence.get("replicas", [f.replica])}
        rows = pl.DataFrame(list(odd), {"job": pl.String, "unit": pl.Int64}, orient="row")
        return self.ordinary.join(rows, on=["job", "unit"], how="anti", maintain_order="left")

    @cached_property
    def awaited(self) -> pl.DataFrame:
        """`of_even_engines`, of jobs whose steps wait for their last request: a tail costs nobody else."""
        return self.of_even_engines.filter(~pl.col("job").is_in(list(self.analysis.unawaited)))

    @cached_property
    def starved(self) -> set[Place]:
        return {(job, step, unit) for job, step, unit in pools.starved_places(self.analysis) if step is not None}

    @cached_property
    def ordinary(self) -> pl.DataFrame:
        """Finished requests without the slow ones, and with the stalls cut out of time."""
        slow = slow_requests.requests_of(self.slow, self.analysis)
        rest = self.analysis.finished.join(slow, on=REQUEST_KEY, how="anti", maintain_order="left")
        for (job, step, unit), gap in self.stalls.items():
            here = (pl.col("job") == job) & (pl.col("step") == step) & (pl.col("unit") == unit)
            after = here & (pl.col("end") >= gap.end)
            rest = rest.with_columns(pl.when(after).then(pl.col("end") - gap.seconds).otherwise("end").alias("end"))
        return rest
