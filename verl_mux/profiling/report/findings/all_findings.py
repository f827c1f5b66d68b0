"""All kinds of findings and their order. A new kind is one function beside its siblings and one line in DETECTORS. Runs in
the report; called by output/summary.py; pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import polars as pl

from verl_mux.profiling.report.findings import slow_requests, stalls, stragglers, waits
from verl_mux.profiling.report.findings.finding import Finding, Gap, Place
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
        return stragglers.find_engines(self.analysis, self.stalls, self.starved)

    @cached_property
    def of_even_engines(self) -> pl.DataFrame:
        """`ordinary`, without what ran on engines that are findings themselves: the shape of the rest is the lengths'."""
        odd = {(f.job, replica) for f in self.slow_engines for replica in f.evidence.get("replicas", [f.replica])}
        rows = pl.DataFrame(list(odd), {"job": pl.String, "unit": pl.Int64}, orient="row")
        return self.ordinary.join(rows, on=["job", "unit"], how="anti", maintain_order="left")

    @cached_property
    def awaited(self) -> pl.DataFrame:
        """`of_even_engines`, of jobs whose steps wait for their last request: elsewhere a tail delays no other request."""
        return self.of_even_engines.filter(~pl.col("job").is_in(list(self.analysis.unawaited)))

    @cached_property
    def starved(self) -> set[Place]:
        return {(job, step, unit) for job, step, unit in waits.starved_places(self.analysis) if step is not None}

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


# what looks for it -> the kinds it may find
DETECTORS: dict[Callable[[Sifted], list[Finding]], tuple[str, ...]] = {
    lambda run: stalls.find(run.stalls, run.analysis.engines): ("silent_gap",),
    lambda run: [f for f in run.slow if f.kind in ("slow_turn", "slow_request")]: ("slow_turn", "slow_request"),
    lambda run: [*stragglers.find_workers(run.analysis, run.ordinary), *run.slow_engines]: ("straggler",),
    lambda run: stragglers.find_long_tail(run.awaited): ("long_tail",),
    lambda run: stragglers.find_preprocessing(run.analysis): ("preprocessing",),
    lambda run: waits.find_queueing(run.analysis, run.starved): ("queueing",),
    lambda run: waits.find_part(run.analysis, run.slow, "tool"): ("tool_wait",),
    lambda run: waits.find_part(run.analysis, run.slow, "reward"): ("reward_wait",),
    lambda run: waits.find_lease_wait(run.analysis): ("lease_wait",),
    lambda run: waits.find_kv_starvation(run.analysis): ("kv_starvation",),
    lambda run: waits.find_uneven_pools(run.analysis): ("uneven_pools",),
    lambda run: waits.find_thrashing(run.analysis): ("thrashing_switches",),
}


def find_all(analysis: Analysis) -> list[Finding]:
    """Everything found, what cost most first."""
    run = Sifted(analysis)
    found = [finding for detector in DETECTORS for finding in detector(run)]
    return sorted(found, key=lambda finding: (-(finding.cost_s or finding.seconds), finding.kind, finding.step or 0))
