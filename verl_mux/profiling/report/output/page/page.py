"""The report as one HTML file that needs nothing beside it: styles, scripts and data are inside.

Times are seconds since `t0`, the run's first moment. Runs on the command line; called by report_command.py; reads the scripts
beside this file.
"""

from __future__ import annotations

import html
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl

from verl_mux.profiling.eventlog import events
from verl_mux.profiling.plain.lines import ROLES
from verl_mux.profiling.report.measures.analysis import Analysis
from verl_mux.profiling.report.measures.lease_times import WORK, Hold, Leases
from verl_mux.profiling.report.output.page.requests import columns, lives, shown, texts

_HERE = Path(__file__).parent
SCRIPTS = ["base.js", "time.js", "replay.js", "lanes.js", "life.js", "charts.js", "tables.js", "main.js"]  # in order of use


def make_page(analysis: Analysis, summary: dict[str, Any]) -> str:
    """The page's text. It loads nothing, so it opens from a mail or a ticket, without a network."""
    name = _name(analysis.run.directory.resolve())
    data = json.dumps(page_data(analysis, summary, name), separators=(",", ":"), allow_nan=False)
    parts = {
        "title": html.escape(f"{name}: where the time went", quote=False),
        "style": (_HERE / "page.css").read_text(),
        "script": "\n".join((_HERE / script).read_text() for script in SCRIPTS),
        "data": data.replace("<", "\\u003c"),  # so that no name in the log can end the script element
    }
    text = (_HERE / "page.html").read_text()
    for key, value in parts.items():
        text = text.replace("{{" + key + "}}", value, 1)
    return text


def _name(directory: Path) -> str:
    """The run's or job's name, not that of a folder inside its log."""
    while directory.name in ("events", *ROLES) and directory.parent.name:
        directory = directory.parent
    return directory.name


MOVES = [events.SYNC, events.SLEEP, events.WAKE, events.OLD_LOG_PROB, events.REF, events.UPDATE_ACTOR, events.UPDATE_CRITIC]


def page_data(analysis: Analysis, summary: dict[str, Any], name: str) -> dict[str, Any]:
    """See the module; the keys are those that the page's scripts read."""
    origin, end = extent(analysis)
    leases = analysis.leases
    jobs = list(summary["jobs"]) or sorted(set(analysis.requests["job"]))
    window = _turns_window(leases, origin, end)
    return {
        "name": name,
        "t0": origin,
        "length": end - origin,
        "jobs": jobs,
        "summary": summary | {"completion": {k: v for k, v in summary["completion"].items() if k != "per_worker"}},
        "pools": leases.pools,
        "holds": [_hold(hold, origin) for hold in leases.holds],
        "waits": [_hold(wait, origin) | {"behind": wait.behind} for wait in leases.waits],
        "moves": _moves(analysis, origin),
        "segments": [{"mode": s.mode, "start": s.window[0] - origin, "end": s.window[1] - origin} for s in leases.segments],
        "window": [window[0] - origin, window[1] - origin],
        "alone": [_hold(hold, origin) for hold in alone(leases, window)],
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


def alone(leases: Leases, window: tuple[float, float]) -> list[Hold]:
    """The same phases of the same jobs with the waiting for leases taken out: how they would have run by themselves.

    Each job starts when it does in `window`; what it did between leases besides waiting stays.
    """
    shifted = []
    waits = {(wait.job, wait.phase, wait.step, round(wait.end, 3)): wait.seconds for wait in leases.waits}
    for job in sorted({hold.job for hold in leases.holds}):
        own = [h for h in leases.holds if h.job == job and h.phase in WORK and window[0] <= h.start < window[1]]
        saved, before = 0.0, None
        for hold in own:
            if before is not None:
                waited = waits.get((hold.job, hold.phase, hold.step, round(hold.start, 3)), 0.0)
                saved += min(waited, max(hold.start - before.end, 0.0))
            shifted.append(replace(hold, start=hold.start - saved, end=hold.end - saved))
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


def _requests(analysis: Analysis, summary: dict[str, Any], origin: float) -> dict[str, Any]:
    found = shown(analysis, summary)
    return {
        "count": found.frame.height,
        "of": found.of,
        "each": found.each,
        "lanes": {"worker": found.workers, "replica": found.replicas},
        "columns": columns(found, origin),
        "lives": lives(analysis, found),
        "texts": texts(analysis.run, found),
    }
