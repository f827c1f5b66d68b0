"""All kinds of findings, and their order. A new kind is one function beside its siblings and one line here."""

from __future__ import annotations

from collections.abc import Callable

from verl_mux.profiling import find_gaps, find_pools, find_tail, find_workers
from verl_mux.profiling.analysis import Analysis
from verl_mux.profiling.finding import Finding

# what looks for it -> the kinds it may find
DETECTORS: dict[Callable[[Analysis], list[Finding]], tuple[str, ...]] = {
    find_gaps.find: ("silent_gap",),
    lambda analysis: analysis.abnormal: ("slow_reward", "slow_turn", "slow_tool", "slow_request"),
    find_workers.find: ("straggling_worker",),
    find_tail.find_long_tail: ("long_tail",),
    find_tail.find_heavy_preprocessing: ("heavy_preprocessing",),
    find_pools.find_kv_starvation: ("kv_starvation",),
    find_pools.find_uneven_pools: ("uneven_pools",),
    find_pools.find_thrashing: ("thrashing_switches",),
}
KINDS = tuple(kind for kinds in DETECTORS.values() for kind in kinds)


def find_all(analysis: Analysis) -> list[Finding]:
    """Everything found, what cost most first."""
    found = [finding for detector in DETECTORS for finding in detector(analysis)]
    return sorted(found, key=lambda finding: (-(finding.lost or finding.seconds), finding.kind, finding.step or 0))
