"""All kinds of findings, and their order. A new kind is one function beside its siblings and one line here."""

from __future__ import annotations

from collections.abc import Callable

from verl_mux.profiling.report.findings import pools, stalls, step_shape, stragglers, waits
from verl_mux.profiling.report.findings.finding import Finding
from verl_mux.profiling.report.findings.sifted import Sifted
from verl_mux.profiling.report.measures.analysis import Analysis

# what looks for it -> the kinds it may find
DETECTORS: dict[Callable[[Sifted], list[Finding]], tuple[str, ...]] = {
    lambda run: stalls.find(run.stalls, run.analysis.engines): ("silent_gap",),
    lambda run: [f for f in run.slow if f.kind in ("slow_turn", "slow_request")]: ("slow_turn", "slow_request"),
    lambda run: [*stragglers.find(run.analysis, run.ordinary), *run.slow_engines]: ("straggler",),
    lambda run: step_shape.find_long_tail(run.awaited): ("long_tail",),
    lambda run: [
        *step_shape.find_heavy_preprocessing(run.analysis),
        *step_shape.find_slow_preparation(run.analysis),
    ]: ("preprocessing",),
    lambda run: waits.find_queueing(run.analysis, run.starved): ("queueing",),
    lambda run: waits.find_part(run.analysis, run.slow, "tool"): ("tool_wait",),
    lambda run: waits.find_part(run.analysis, run.slow, "reward"): ("reward_wait",),
    lambda run: waits.find_lease_wait(run.analysis): ("lease_wait",),
    lambda run: pools.find_kv_starvation(run.analysis): ("kv_starvation",),
    lambda run: pools.find_uneven_pools(run.analysis): ("uneven_pools",),
    lambda run: pools.find_thrashing(run.analysis): ("thrashing_switches",),
}


def find_all(analysis: Analysis) -> list[Finding]:
    """Everything found, what cost most first."""
    run = Sifted(analysis)
    found = [finding for detector in DETECTORS for finding in detector(run)]
    return sorted(found, key=lambda finding: (-(finding.cost_s or finding.seconds), finding.kind, finding.step or 0))
