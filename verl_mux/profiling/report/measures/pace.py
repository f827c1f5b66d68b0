"""Steps a second of several jobs in turns, against the same jobs one after the other in the same run.

The definitions are those of `verl-mux run`'s summary: a job's period is the median time from one step's end to the next;
a segment's first step is left out (it may have begun behind the barrier, or warmed up), and so is, in turns, what came after
the first job was through.
"""

from __future__ import annotations

from statistics import median
from typing import Any

import polars as pl

from verl_mux.profiling.eventlog import events
from verl_mux.profiling.plain.intervals import Interval
from verl_mux.profiling.plain.throughput import throughput_ratio
from verl_mux.profiling.report.measures.leases import Leases, Segment

Ends = dict[str, list[float]]  # job -> when its steps ended, in order


def step_ends(spans: pl.DataFrame) -> Ends:
    """From the trainers' `step` events."""
    steps = spans.filter((pl.col("event") == events.STEP) & (pl.col("role") == "trainer")).sort("end")
    return {job: rows["end"].to_list() for (job,), rows in steps.group_by("job", maintain_order=True)}


def shared_window(segment: Segment, ends: Ends) -> Interval:
    """From when every job has ended a step of the segment until the first job is through; the segment where that is empty."""
    inside = [[end for end in found if _within(end, segment)] for found in ends.values()]
    if not inside or not all(inside):
        return segment.window
    start, end = max(found[0] for found in inside), min(found[-1] for found in inside)
    return (start, end) if end > start else segment.window


def _within(end: float, segment: Segment) -> bool:
    return segment.window[0] < end <= segment.window[1] + 1.0  # a step ends a moment after its last lease


def throughput(leases: Leases, ends: Ends) -> dict[str, Any] | None:
    """`alone_s` and `together_s` by job, and their `ratio` (throughput_ratio). None without both."""
    alone = _periods([s for s in leases.segments if s.mode == "sequential"], ends, whole=True)
    together = _periods([s for s in leases.segments if s.mode == "interleaved"], ends, whole=False)
    if set(alone) != set(ends):
        return None
    ratio = throughput_ratio(alone, together)
    return None if ratio is None else {"ratio": ratio, "alone_s": _rounded(alone), "together_s": _rounded(together)}


def _periods(segments: list[Segment], ends: Ends, whole: bool) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for segment in segments:
        until = float("inf") if whole else shared_window(segment, ends)[1]
        for job, times in ends.items():
            inside = [end for end in times if _within(end, segment) and end <= until]
            found.setdefault(job, []).extend(b - a for a, b in zip(inside, inside[1:]))  # noqa: B905 (neighbours)
    return {job: median(periods) for job, periods in found.items() if periods and median(periods) > 0}


def _rounded(periods: dict[str, float]) -> dict[str, float]:
    return {job: round(period, 4) for job, period in periods.items()}
