"""What the page draws, as one JSON-able dictionary. Times are seconds since `t0`, the run's first moment.

A hundred thousand requests travel as packed columns (base64 of little-endian arrays), not as JSON objects.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import polars as pl

from verl_mux.profiling.eventlog import events
from verl_mux.profiling.report.input.request_table import SHOWN_PARTS
from verl_mux.profiling.report.measures.analysis import Analysis
from verl_mux.profiling.report.measures.leases import WORK, Hold, Leases
from verl_mux.profiling.report.output.lives import Key, lives, texts

MAX_REQUESTS = 200_000
MAX_NAMED = 2_000  # requests whose names the page knows
NOWHERE = 0xFFFF  # the lane of a request whose log does not say where it was
MOVES = [events.SYNC, events.SLEEP, events.WAKE, events.OLD_LOG_PROB, events.REF, events.UPDATE_ACTOR, events.UPDATE_CRITIC]
# The parts the page colours, and which of ours they hold.
GROUPS = {"engine": ["engine"], "tool": ["tool", "tool_response", "interaction"], "reward": ["reward"]}


def page_data(analysis: Analysis, summary: dict[str, Any], name: str, solo: Analysis | None = None) -> dict[str, Any]:
    """See the module; the keys are those that the page's scripts read. `solo`: another run of the same jobs, each alone."""
    origin, end = extent(analysis)
    leases = analysis.leases
    jobs = list(summary["jobs"]) or sorted(set(analysis.requests["job"]))
    window = _turns_window(leases, origin, end)
    return {
        "name": name,
        "t0": origin,
        "length": end - origin,
        "jobs": jobs,
        "summary": _slim(summary),
        "pools": leases.pools,
        "holds": [_hold(hold, origin) for hold in leases.holds],
        "waits": [
            {"job": w.job, "phase": w.phase, "nodes": w.nodes, "start": w.start - origin, "end": w.end - origin}
            | {"step": w.step, "behind": w.behind}
            for w in leases.waits
        ],
        "moves": _moves(analysis, origin),
        "segments": [{"mode": s.mode, "start": s.window[0] - origin, "end": s.window[1] - origin} for s in leases.segments],
        "window": [window[0] - origin, window[1] - origin],
        **_alone(leases, window, origin, solo),
        "steps": _steps(analysis, origin),
        "shares": analysis.step_shares.drop("seconds").rows(),
        "requests": _requests(analysis, summary, origin),
    }


def extent(analysis: Analysis) -> tuple[float, float]:
    """First and last moment of the run, in seconds since the epoch."""
    totals = analysis.run.tables.totals.filter(~pl.col("event").is_in(events.ABOUT_THE_LOG))
    if totals.is_empty():
        return 0.0, 1.0
    first, last = float(totals["first"].min()), float(totals["last"].max())
    return first, max(last, first + 1e-3)


def _turns_window(leases: Leases, origin: float, end: float) -> tuple[float, float]:
    """The part of the run in which jobs took turns, the longest if several; else all of it."""
    shared = [s.window for s in leases.segments if s.mode == "interleaved"] or [s.window for s in leases.segments]
    return max(shared, key=lambda window: window[1] - window[0], default=(origin, end))


def _alone(leases: Leases, window: tuple[float, float], origin: float, solo: Analysis | None) -> dict[str, Any]:
    jobs = {hold.job for hold in leases.holds}
    measured = [] if solo is None else measured_alone(leases, window, solo.leases)
    if measured and {hold.job for hold in measured} == jobs:
        return {"alone": [_hold(hold, origin) for hold in measured], "alone_measured": True}
    return {"alone": [_hold(hold, origin) for hold in alone(leases, window)], "alone_measured": False}


def measured_alone(leases: Leases, window: tuple[float, float], solo: Leases) -> list[Hold]:
    """Another run's phases of the same jobs, each moved to where the job begins in `window`, as many as it has here."""
    moved = []
    for job in sorted({hold.job for hold in leases.holds}):
        here = [h for h in leases.holds if h.job == job and h.phase in WORK and window[0] <= h.start < window[1]]
        there = [h for h in solo.holds if h.job == job and h.phase in WORK][: len(here)]
        for hold in there:
            shift = here[0].start - there[0].start
            moved.append(Hold(job, hold.phase, hold.nodes, hold.start + shift, hold.end + shift, hold.step))
    return moved


def alone(leases: Leases, window: tuple[float, float]) -> list[Hold]:
    """The same phases of the same jobs with the waiting for leases taken out: how they would have run by themselves.

    Each job starts when it does in `window`; what it did between leases besides waiting stays.
    """
    shifted = []
    waits = {(w.job, w.phase, w.step, round(w.end, 3)): w.end - w.start for w in leases.waits}
    for job in sorted({hold.job for hold in leases.holds}):
        mine = [h for h in leases.holds if h.job == job and h.phase in WORK and window[0] <= h.start < window[1]]
        saved, before = 0.0, None
        for hold in mine:
            if before is not None:
                waited = waits.get((hold.job, hold.phase, hold.step, round(hold.start, 3)), 0.0)
                saved += min(waited, max(hold.start - before.end, 0.0))
            shifted.append(Hold(job, hold.phase, hold.nodes, hold.start - saved, hold.end - saved, hold.step))
            before = hold
    return shifted


def _hold(hold: Hold, origin: float) -> dict[str, Any]:
    times = {"start": hold.start - origin, "end": hold.end - origin}
    return {"job": hold.job, "phase": hold.phase, "nodes": hold.nodes, "step": hold.step} | times


def _moves(analysis: Analysis, origin: float) -> list[dict[str, Any]]:
    rows = analysis.spans.filter(pl.col("event").is_in(MOVES) & pl.col("seconds").is_not_null())
    return [
        {"job": row["job"], "event": row["event"], "start": row["start"] - origin, "end": row["end"] - origin}
        | {key: row[key] for key in ("tag", "side", "node", "bytes", "step") if row[key] is not None}
        for row in rows.iter_rows(named=True)
    ]


def _steps(analysis: Analysis, origin: float) -> list[list]:
    """[job, step, start, end] of the requests of each step."""
    spans = analysis.finished.group_by("job", "step").agg(pl.col("start").min(), pl.col("end").max())
    return [[job, step, a - origin, b - origin] for job, step, a, b in spans.sort("start").rows()]


def _slim(summary: dict[str, Any]) -> dict[str, Any]:
    completion = {key: value for key, value in summary["completion"].items() if key != "per_worker"}
    return summary | {"completion": completion}


def _requests(analysis: Analysis, summary: dict[str, Any], origin: float) -> dict[str, Any]:
    every = analysis.requests.filter(~pl.col("validate"))
    frame = every
    if every.height > MAX_REQUESTS:  # the longest are what people look for; the rest is thinned evenly
        longest = every.sort("seconds", descending=True)
        kept = longest.head(MAX_REQUESTS // 2)
        frame = pl.concat([kept, longest.tail(-MAX_REQUESTS // 2).sample(MAX_REQUESTS // 2, seed=0)])
    frame, lanes = _laid(_with_places(frame, analysis))
    frame = frame.sort("worker_lane", "start")
    columns = {
        **{f"{by}_lane": _pack(frame[f"{by}_lane"], "<u2") for by in lanes},
        "step": _pack(frame["step"].clip(0, None), "<u4"),
        "start": _pack(frame["start"] - origin, "<f4"),
        "end": _pack(frame["end"] - origin, "<f4"),
        "tokens": _pack(frame["tokens"].fill_null(0), "<u4"),
        "turns": _pack(frame["turns"].fill_null(0).clip(0, 255), "<u1"),
        "done": _pack(frame["status"] == "complete", "<u1"),
    }
    grouped = {part for parts in GROUPS.values() for part in parts}
    groups = GROUPS | {"other": [part for part in SHOWN_PARTS if part not in grouped]}
    for name, parts in groups.items():
        columns[name] = _pack(frame.select(pl.sum_horizontal(parts)).to_series(), "<f4")
    named = _named(frame, summary)
    return {
        "count": frame.height,
        "of": every.height,
        "lanes": lanes,
        "columns": columns,
        "names": {index: key[2] for index, key in named.items()},
        "lives": lives(analysis, named, origin),
        "texts": texts(analysis, named),
    }


def _with_places(frame: pl.DataFrame, analysis: Analysis) -> pl.DataFrame:
    """With `replica` and `node` of each request's longest stay; null where the log does not say."""
    stays = analysis.stays.filter(pl.col("replica").is_not_null()).sort("seconds")
    longest = stays.group_by("job", "request_id").agg(pl.col("replica", "node").last())
    return frame.drop("replica", "node", strict=False).join(longest, on=["job", "request_id"], how="left")


def _laid(frame: pl.DataFrame) -> tuple[pl.DataFrame, dict[str, list[list]]]:
    """A lane for each worker, replica and node of a job, `<by>_lane`, and the lanes of each view: [job, name]."""
    views = {}
    for by in ("worker", "replica", "node"):
        lanes = frame.select("job", by).drop_nulls().unique().sort("job", by)
        frame = frame.join(lanes.with_row_index(f"{by}_lane"), on=["job", by], how="left")
        frame = frame.with_columns(pl.col(f"{by}_lane").fill_null(NOWHERE))
        if lanes.height:
            views[by] = [list(row) for row in lanes.rows()]
    return frame, views


def _named(frame: pl.DataFrame, summary: dict[str, Any]) -> dict[str, Key]:
    """Index -> job, step, request: all of them in a small run; in a large one the slowest and those that findings name."""
    if frame.height > MAX_NAMED:
        found = {finding["request_id"] for finding in summary["findings"]}
        least = frame["seconds"].top_k(MAX_NAMED).min()
        chosen = (pl.col("seconds") >= least) | pl.col("request_id").is_in(list(found - {None}))
        rows = frame.with_row_index("i").filter(chosen).select("i", "job", "step", "request_id")
    else:
        rows = frame.with_row_index("i").select("i", "job", "step", "request_id")
    return {str(index): (job, step, name) for index, job, step, name in rows.rows()}


def _pack(values: pl.Series, kind: str) -> str:
    return base64.b64encode(np.ascontiguousarray(values.to_numpy()).astype(kind).tobytes()).decode()
