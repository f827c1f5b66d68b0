"""Finding `silent_gap`: an engine that stood still in a step, recognised by gaps between completions and by its own counters.

A place is (job, step, unit): the unit is a replica where the log says on which one a stay was, and a worker elsewhere. Runs in
the report; called by output/summary.py; pure.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import polars as pl

from verl_mux.profiling.plain.lines import overlap
from verl_mux.profiling.report.findings.finding import (
    ALIKE_MISSING,
    MIN_PART,
    MISSING,
    Finding,
    Gap,
    Place,
    enough,
    find_gap,
    in_tools,
    is_common,
    stalled,
)
from verl_mux.profiling.report.findings.slow_requests import held_up
from verl_mux.profiling.report.input.reduction import REQUEST_KEY
from verl_mux.profiling.report.measures.analysis import UNIT, Analysis, Engines, by_place, times_of_steps

SAME = 0.8  # workers whose gaps share this part of the time stood still together
# How far the paces of both sides may differ where the log has no tokens. The work after a stall is what was slowest
# anyway, so it comes thinner; where other workers and steps show that such work makes no gap of itself, more is let pass.
ALIKE_PACE = 8.0
ALIKE_PACE_WITH_PEERS = 25.0
PEERS = 3
HELD_S = 0.5  # a stay that waited longer for its job's lease was not in the engine all the time
# A working engine logs counters once a second; one with requests that logs nothing for SILENT_S stands still.
SILENT_S = 5.0
MIN_REPORTS = 4
SILENT_PART = 0.10  # of the step's rollout
WAVES = 0.6  # of the worker's and its peers' other steps that have such a gap too
ADVICE = (
    "the engine took no work off its hands here, then went on at the same pace: capture this worker with a GPU profiler "
    "when it happens again, look for a stuck NCCL or memory call, a paused process, another user of the GPU, a slow disk"
)


def stalls(analysis: Analysis, starved: Collection[Place] = ()) -> dict[Place, Gap]:
    """The gaps in which the engine stood still; not for want of KV cache, as in the places `starved`."""
    found: dict[Place, Gap | None] = {}
    large: dict[Place, Gap] = {}
    frames: dict[Place, pl.DataFrame] = {}
    for (job, step, unit), frame in _completions(analysis).group_by(UNIT, maintain_order=True):
        place, began, ends = (job, step, unit), frame["start"].min(), np.sort(frame["end"].to_numpy())
        frames[place] = frame
        # A peer's gap is compared by its length, however little of the peer's own time it is.
        gap = found[place] = find_gap(began, ends, ALIKE_MISSING, least_part=0.0)
        if gap and gap.missing >= enough(MISSING, len(ends)) and gap.seconds >= MIN_PART * (ends[-1] - began):
            large[place] = gap
    stood = {place: gap for place, gap in large.items() if _is_stall(place, gap, found, frames[place], analysis)}
    # Counters say more than completions, which come in bursts where requests of one length run together.
    known = counter_times(analysis.engines)
    stood = {place: gap for place, gap in stood.items() if (place[0], place[2]) not in known}
    silent = _silent(analysis.engines.validation, analysis.engines) | _silent(analysis.engines.stays, analysis.engines)
    return {place: gap for place, gap in (silent | stood).items() if place not in starved}


def _completions(analysis: Analysis) -> pl.DataFrame:
    """What is completed, by UNIT: stays of engines that the log knows, else requests. start, end, tokens, tool (seconds)."""
    columns = [*UNIT, "request_id", "start", "end", "tokens", "tool"]
    engines = analysis.engines
    stays = engines.stays.filter(~pl.col("cut").fill_null(False) & (pl.col("held").fill_null(0.0) < HELD_S))
    requests = analysis.finished.filter(~pl.col("job").is_in([*engines.jobs, *analysis.unawaited]))
    requests = requests.join(held_up(analysis), on=REQUEST_KEY, how="anti", maintain_order="left").select(columns)
    own = stays.with_columns(pl.lit(0.0).alias("tool")).select(columns).sort("end")
    return pl.concat([requests, own.cast(dict(requests.schema))])


def _silent(all_stays: pl.DataFrame, engines: Engines) -> dict[Place, Gap]:
    """The longest stretch of each place in which its engine gave no sign of life, no counters and no end of a stay, while stays
    went on through it."""
    found = {}
    times, steps = counter_times(engines), times_of_steps(all_stays)
    for (job, step, replica), stays in by_place(all_stays).items():
        if (job, replica) not in times:
            continue
        began, ended = steps[job, step]
        # What is still in it at the step's end is cut off there.
        first, last = float(stays["start"].min()), float(stays["end"].max())
        signs = np.concatenate((times[job, replica], stays["end"].to_numpy()))
        ends = np.concatenate(([first], np.sort(signs[(signs > first) & (signs < last)]), [last]))
        at = int(np.argmax(np.diff(ends)))
        start, end = float(ends[at]), float(ends[at + 1])
        edge, free = 0.1 * (end - start), pl.col("held").fill_null(0.0) < HELD_S
        through = stays.filter((pl.col("start") <= start + edge) & (pl.col("end") >= end - edge) & free)
        if end - start >= max(SILENT_S, SILENT_PART * (ended - began)) and through.height:
            before, after = int((stays["end"] <= start).sum()), int((stays["end"] >= end).sum())
            found[job, step, replica] = Gap(start, end, before, after, 0.0, before / max(start - began, 1e-6), 0.0)
    return found


def counter_times(engines: Engines) -> dict[tuple[str, int], np.ndarray]:
    """(job, replica) -> when its counters were written, of engines that write them regularly."""
    grouped = engines.counters.group_by("job", "replica").agg(pl.col("end"), pl.col("seconds").median().alias("usual"))
    return {
        (job, replica): np.array(ends)
        for job, replica, ends, usual in grouped.rows()
        if len(ends) >= MIN_REPORTS and (usual or 0.0) <= SILENT_S / 2
    }


def _is_stall(place: Place, gap: Gap, found: dict, frame: pl.DataFrame, analysis: Analysis) -> bool:
    if not _is_silent(place, gap, analysis.turns):
        return False
    starts, ends = frame["start"].to_numpy(), frame["end"].to_numpy()
    if in_tools(gap, starts, ends, frame["tool"].fill_null(0.0).to_numpy()):
        return False
    tokens = frame["tokens"].cast(pl.Float64).fill_null(float("nan")).to_numpy()
    verdict = stalled(gap, starts, ends, tokens)
    if verdict is not None:
        # Where requests wait for a slot, their speed shows nothing; a wave of them ends in every step.
        elsewhere = [other for where, other in found.items() if where[0] == place[0] and where[1] != place[1]]
        return verdict and not (len(elsewhere) >= PEERS and is_common(gap, elsewhere, WAVES))
    others = [other for where, other in found.items() if where[0] == place[0] and where != place]
    most = ALIKE_PACE_WITH_PEERS if len(others) >= PEERS else ALIKE_PACE
    alike = max(gap.pace_before, gap.pace_after) <= most * min(gap.pace_before, gap.pace_after)
    return alike and not is_common(gap, others)


def _is_silent(place: Place, gap: Gap, turns: pl.DataFrame) -> bool:
    """No turn ended deep inside the gap, or hardly any."""
    job, step, unit = place
    edge = 0.05 * gap.seconds
    inside = turns.filter(pl.col("end").is_between(gap.start + edge, gap.end - edge), job=job, step=step, unit=unit)
    return inside.height < 0.1 * gap.missing


def find(gaps: dict[Place, Gap], engines: Engines) -> list[Finding]:
    """One finding a stall; workers that stood still together share one."""
    left = sorted(gaps.items(), key=lambda item: -item[1].seconds)
    findings = []
    while left:
        (place, gap), *left = left
        together = [
            other for other, another in left
            if other[:2] == place[:2] and overlap((gap.start, gap.end), (another.start, another.end)) >= SAME * gap.seconds
        ]  # fmt: skip
        left = [item for item in left if item[0] not in together]
        findings.append(_finding(place, gap, sorted({place[2], *(unit for _, _, unit in together)}), engines))
    return findings


def _finding(place: Place, gap: Gap, units: list[int], engines: Engines) -> Finding:
    job, step, unit = place
    where = engines.where(job, unit)
    evidence = {
        "completed_before": gap.before,
        "completed_after": gap.after,
        "per_second_before": round(gap.pace_before, 4),
        "per_second_after": round(gap.pace_after, 4),
        "expected_in_gap": round(gap.missing, 1),
        "replicas" if where else "workers": units,
    }
    text = (
        f"{gap.before} requests were done, then none for {gap.seconds:.1f} s, then the other {gap.after} "
        f"({gap.pace_before:.3g} a second before, {gap.pace_after:.3g} after)"
    )
    if where:
        text = f"replica {unit} on {where['node']} stood still: {text}"
    if where and (path := engines.stacks(job, unit, gap.start, gap.end)):
        evidence["stacks"] = path
        text = f"{text}; what its processes were doing: {path}"
    return Finding(
        "silent_gap", job, step, None if where else unit, gap.seconds, text, ADVICE,
        start=gap.start, end=gap.end, evidence=evidence, **where,
    )  # fmt: skip
