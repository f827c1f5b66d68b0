"""A run with what is abnormal set aside: the stalls, the slow requests, and the rest, which is judged as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import polars as pl

from verl_mux.profiling.report.findings import pools, slow_requests, stalls
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
