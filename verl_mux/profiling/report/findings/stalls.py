"""Finding `silent_gap`: an engine that stood still in a step, recognised by gaps between completions and by its own counters.

A place is (job, step, unit): the unit is a replica where the log says on which one a stay was, and a worker elsewhere. Runs in
the report; called by output/summary.py; pure.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import polars as pl

from verl_mux.profiling.eventlog import events
from verl_mux.profiling.plain.lines import clip, length, overlap
from verl_mux.profiling.report.findings.finding import Finding, Gap, Place
from verl_mux.profiling.report.measures.analysis import UNIT, Analysis, Engines, by_place, log_spread_of, times_of_steps

SAME = 0.8  # workers whose gaps share this part of the time stood still together
HELD_S = 0.5  # a stay that waited longer for its job's lease was not in the engine all the time
# A working engine logs counters once a second; one with requests that logs nothing for SILENT_S stands still.
SILENT_S = 5.0
MIN_REPORTS = 4
SILENT_PART = 0.10  # of the step's rollout
MIN_CLEAR = 8  # stays of the replica that tell its usual time per token
FEW_KNOWN, LEAST_SPREAD, LEAST_LATE = 0.3, 0.05, 0.5  # of its logarithm where they are fewer; at least; and seconds
SURE = 4.0  # deviations by which a stay took longer
ALIKE = 0.3  # of the gap: how far what it took longer may lie from it
MOST_OF_THEM = 0.75
ONE_LENGTH = 0.4  # of the usual spread
# While the trainer does one of these it may have taken the engines' device.
ENGINES_AWAY = [events.UPDATE_ACTOR, events.UPDATE_CRITIC, events.OLD_LOG_PROB, events.REF, events.SYNC, events.SLEEP]
ADVICE = (
    "the engine took no work off its hands here, then went on at the same pace: capture this worker with a GPU profiler "
    "when it happens again, look for a stuck NCCL or memory call, a paused process, another user of the GPU, a slow disk"
)


def stalls(analysis: Analysis, starved: Collection[Place] = ()) -> dict[Place, Gap]:
    """The gaps in which the engine stood still; not for want of KV cache, as in the places `starved`."""
    silent = _silent(analysis.engines.validation, analysis.engines) | _silent(analysis.engines.stays, analysis.engines)
    return {place: gap for place, gap in (_frozen(analysis) | _logged(analysis) | silent).items() if place not in starved}


def _logged(analysis: Analysis) -> dict[Place, Gap]:
    """Stalls that the engine's server saw itself."""
    rows = analysis.spans.filter((pl.col("event") == events.ENGINE_STALLED) & (pl.col("seconds") >= SILENT_S)).sort("seconds")
    rows = rows.with_columns(pl.coalesce("replica", "worker").alias("unit"))
    return {row[:3]: Gap(row[3], row[4], 0, 0) for row in rows.select(*UNIT, "start", "end").rows()}


def _frozen(analysis: Analysis) -> dict[Place, Gap]:
    """The longest stretch of each place in which no stay ended, while those in it took just that much longer than their tokens
    do. What is usual are the replica's stays outside such stretches; where they are few, the job's."""
    found = {}
    stays = analysis.worked.filter(pl.col("pace").is_not_null() & (pl.col("held").fill_null(0.0) < HELD_S))
    before = pl.col("end").shift().fill_null(pl.col("start").min())
    longest = (pl.col("end") - before).arg_max()
    steps = stays.group_by("job", "step").agg(pl.col("start").min().alias("began"), pl.col("end").max().alias("over"))
    gaps = stays.sort("end").group_by(UNIT, maintain_order=True).agg(
        before.get(longest).alias("from"), pl.col("end").get(longest).alias("to"), longest.alias("done"), pl.len().alias("all"),
    ).join(steps, on=["job", "step"])  # fmt: skip
    took = pl.col("to") - pl.col("from")
    gaps = gaps.filter(took >= (SILENT_PART * (pl.col("over") - pl.col("began"))).clip(SILENT_S))
    let_in = pl.col("end") - pl.col("work")
    inside = stays.join(gaps, on=UNIT).filter((let_in < pl.col("to") - 0.5 * took) & (pl.col("end") >= pl.col("to")))
    clear = stays.join(inside.select(*UNIT, "request_id", "part"), on=[*UNIT, "request_id", "part"], how="anti")
    usual = clear.group_by("job", "unit").agg(
        pl.len().alias("clear"), pl.col("pace").median().alias("usual"), log_spread_of(pl.col("pace"))
    ).filter(pl.col("clear") >= MIN_CLEAR)  # fmt: skip
    rows = inside.join(usual, on=["job", "unit"], how="left").join(
        stays.group_by("job").agg(pl.col("pace").median().alias("all_paces")), on="job"
    )
    rows = rows.with_columns(
        pl.col("tokens") * pl.coalesce("usual", "all_paces"), unknown=pl.col("tokens") == 1,
        shared=pl.col("to") - pl.max_horizontal(let_in, "from"),
        spread=pl.col("spread").fill_null(FEW_KNOWN).clip(LEAST_SPREAD),
    ).with_columns(more=pl.col("work") - pl.col("tokens"))  # fmt: skip
    for row in (
        rows.group_by(UNIT, maintain_order=True)
        .agg(*_took_longer(), pl.col("from", "to", "done", "all", "began", "over").first())
        .rows(named=True)
    ):
        place, gap, shared = (row["job"], row["step"], row["unit"]), (row["from"], row["to"]), row["shared"]
        # Two are too few to tell it from an engine that is slow all the time, unless it is far longer than they are.
        # Where no tokens are known: a long time more makes different lengths the same, which a slow engine does not.
        alike = row["unknown"] and row["times"] < ONE_LENGTH * row["spread"]
        like_it = row["stood"] < row["times"] or alike if row["n"] > 2 else row["n"] == 2 and shared >= 2 * row["usual"]
        sure = like_it and min(row["clearly"], row["alike"]) >= MOST_OF_THEM
        if sure and not _trains(analysis, place[0], gap):
            paces = row["done"] / max(gap[0] - row["began"], 1e-6), (row["all"] - row["done"]) / max(row["over"] - gap[1], 1e-6)
            found[place] = Gap(*gap, row["done"], row["all"] - row["done"], *paces)
    return found


def _took_longer() -> list[pl.Expr]:
    """Of a place's stays in a gap, `tokens` in seconds: did they take longer by what each shares of the gap, neither more nor
    less? An engine that is slow all the time multiplies each instead (`times`, beside `stood`)."""
    took, usual, more, shared = (pl.col(name) for name in ("work", "tokens", "more", "shared"))
    unsure = pl.col("spread") * usual + LEAST_LATE
    times = (took / usual).log()
    return [
        pl.len().alias("n"), pl.col("spread").median(), pl.col("unknown").all(), shared.median(), usual.median().alias("usual"),
        (more >= SURE * unsure).mean().alias("clearly"),
        ((more - shared).abs() <= ALIKE * shared + 2 * unsure).mean().alias("alike"),
        (took / (usual + pl.min_horizontal(shared, more.median().clip(0.0)))).log().abs().mean().alias("stood"),
        (times - times.median()).abs().mean().alias("times"),
    ]  # fmt: skip


def _trains(analysis: Analysis, job: str, gap: tuple[float, float]) -> bool:
    """Had the trainer taken the engines' device?"""
    busy = analysis.spans.filter((pl.col("job") == job) & pl.col("event").is_in(ENGINES_AWAY))
    return length(clip(busy.select("start", "end").rows(), gap)) >= 0.5 * (gap[1] - gap[0])


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
            found[job, step, replica] = Gap(start, end, before, after, before / max(start - began, 1e-6))
    return found


def counter_times(engines: Engines) -> dict[tuple[str, int], np.ndarray]:
    """(job, replica) -> when its counters were written, of engines that write them regularly."""
    grouped = engines.counters.group_by("job", "replica").agg(pl.col("end"), pl.col("seconds").median().alias("usual"))
    return {
        (job, replica): np.array(ends)
        for job, replica, ends, usual in grouped.rows()
        if len(ends) >= MIN_REPORTS and (usual or 0.0) <= SILENT_S / 2
    }


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
        "expected_in_gap": round(gap.pace_before * gap.seconds, 1),
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
