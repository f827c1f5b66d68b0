"""Finding `silent_gap`: a worker whose engine stood still in a step, told from gaps between its completions."""

from __future__ import annotations

import numpy as np
import polars as pl

from verl_mux.profiling.plain.intervals import overlap
from verl_mux.profiling.report.findings.completion_gaps import (
    ALIKE_MISSING,
    MIN_PART,
    MISSING,
    Gap,
    Place,
    enough,
    find_gap,
    in_tools,
    is_common,
    stalled,
)
from verl_mux.profiling.report.findings.finding import Finding
from verl_mux.profiling.report.findings.slow_requests import PLACE, held_up
from verl_mux.profiling.report.input.reduction import REQUEST_KEY
from verl_mux.profiling.report.measures.analysis import Analysis

SAME = 0.8  # workers whose gaps share this part of the time stood still together
# How far the paces of both sides may differ where the log has no tokens. The work after a stall is what was slowest
# anyway, so it comes thinner; where other workers and steps show that such work makes no gap of itself, more is let pass.
ALIKE_PACE = 8.0
ALIKE_PACE_WITH_PEERS = 25.0
PEERS = 3
WAVES = 0.6  # of the worker's and its peers' other steps that have such a gap too
ADVICE = (
    "the engine took no work off its hands here, then went on at the same pace: capture this worker with a GPU profiler "
    "when it happens again, look for a stuck NCCL or memory call, a paused process, another user of the GPU, a slow disk"
)


def stalls(analysis: Analysis) -> dict[Place, Gap]:
    """The gaps in which the engine stood still."""
    found: dict[Place, Gap | None] = {}
    large: dict[Place, Gap] = {}
    frames: dict[Place, pl.DataFrame] = {}
    usual = analysis.finished.join(held_up(analysis), on=REQUEST_KEY, how="anti", maintain_order="left")
    for (job, step, worker), frame in usual.group_by(PLACE, maintain_order=True):
        place, began, ends = (job, step, worker), frame["start"].min(), np.sort(frame["end"].to_numpy())
        frames[place] = frame
        # A peer's gap is compared by its length, however little of the peer's own time it is.
        gap = found[place] = find_gap(began, ends, ALIKE_MISSING, least_part=0.0)
        if gap and gap.missing >= enough(MISSING, len(ends)) and gap.seconds >= MIN_PART * (ends[-1] - began):
            large[place] = gap
    return {place: gap for place, gap in large.items() if _is_stall(place, gap, found, frames[place], analysis)}


def _is_stall(place: Place, gap: Gap, found: dict, frame: pl.DataFrame, analysis: Analysis) -> bool:
    if not _is_silent(place, gap, analysis.turns):
        return False
    starts, ends = frame["start"].to_numpy(), frame["end"].to_numpy()
    if in_tools(gap, starts, ends, frame["tool"].fill_null(0.0).to_numpy()):
        return False
    tokens = frame["tokens"].cast(pl.Float64).fill_null(float("nan")).to_numpy()
    told = stalled(gap, starts, ends, tokens)
    if told is not None:
        # Where requests wait for a slot, their speed tells nothing; a wave of them ends in every step.
        elsewhere = [other for where, other in found.items() if where[0] == place[0] and where[1] != place[1]]
        return told and not (len(elsewhere) >= PEERS and is_common(gap, elsewhere, WAVES))
    others = [other for where, other in found.items() if where[0] == place[0] and where != place]
    most = ALIKE_PACE_WITH_PEERS if len(others) >= PEERS else ALIKE_PACE
    alike = max(gap.pace_before, gap.pace_after) <= most * min(gap.pace_before, gap.pace_after)
    return alike and not is_common(gap, others)


def _is_silent(place: Place, gap: Gap, turns: pl.DataFrame) -> bool:
    """No turn ended deep inside the gap, or hardly any."""
    job, step, worker = place
    edge = 0.05 * gap.seconds
    here = (pl.col("job") == job) & (pl.col("step") == step) & (pl.col("worker") == worker)
    inside = turns.filter(here & pl.col("end").is_between(gap.start + edge, gap.end - edge)).height
    return inside < 0.1 * gap.missing


def find(gaps: dict[Place, Gap]) -> list[Finding]:
    """One finding a stall; workers that stood still together share one."""
    left = sorted(gaps.items(), key=lambda item: -item[1].seconds)
    findings = []
    while left:
        (place, gap), *left = left
        together = [item for item in left if _same_stall(place, gap, *item)]
        left = [item for item in left if item not in together]
        findings.append(_finding(place, gap, sorted({place[2], *(other[2] for other, _ in together)})))
    return findings


def _same_stall(place: Place, gap: Gap, other_place: Place, other: Gap) -> bool:
    shared = overlap((gap.start, gap.end), (other.start, other.end))
    return place[:2] == other_place[:2] and shared >= SAME * gap.seconds


def _finding(place: Place, gap: Gap, workers: list[int]) -> Finding:
    job, step, worker = place
    evidence = {
        "completed_before": gap.before,
        "completed_after": gap.after,
        "per_second_before": round(gap.pace_before, 4),
        "per_second_after": round(gap.pace_after, 4),
        "expected_in_gap": round(gap.missing, 1),
        "workers": workers,
    }
    text = (
        f"{gap.before} requests were done, then none for {gap.seconds:.1f} s, then the other {gap.after} "
        f"({gap.pace_before:.3g} a second before, {gap.pace_after:.3g} after)"
    )
    return Finding("silent_gap", job, step, worker, gap.seconds, text, ADVICE, start=gap.start, end=gap.end, evidence=evidence)
