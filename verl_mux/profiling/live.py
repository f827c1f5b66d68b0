"""A step's figures while the run goes on: `mux/*` metrics for verl's Tracking, from the step's own events.

The same definitions as the report's, without its dataframe engine, so that a trainer can do without that. Pure, except
`step_events`, which reads the files.
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from verl_mux.profiling import events
from verl_mux.profiling.line_writer import writer
from verl_mux.profiling.log_files import find_step_files

QUANTILES = {"p50": 0.50, "p80": 0.80, "p90": 0.90, "p95": 0.95, "p99": 0.99}
SWITCHES = (events.SLEEP, events.WAKE, events.SYNC)


def metrics_of_step(log: Any, step: int) -> dict[str, float]:
    """`step_metrics` of a step from the files that a trainer's event log lies among; nothing where the log is off.

    Waits at most a second for lines that are still queued. What cannot be read is left out: metrics must not stop training.
    """
    if not log.enabled:
        return {}
    began = time.perf_counter()
    log.flush(1.0)
    try:
        return step_metrics(step_events(log.files.directory.parent, step))
    except OSError:
        return {}
    finally:
        writer().caller_seconds += time.perf_counter() - began


def step_metrics(lines: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Metrics of one step of one job from its events, as dicts of the log's format. Seconds, bytes, parts of 1.

    mux/completion/{p50,p80,p90,p95,p99,total,t80_over_total}, mux/requests, mux/requests_aborted, mux/turns_mean,
    mux/share/<event>, mux/lease_wait/<phase>, mux/{sleep,wake,sync}/{seconds,bytes}, mux/barrier_wait/max,
    mux/unused/<pool>: the part of the step in which this job ran nothing on its nodes of the pool (alone, its bubble).
    """
    known = [line for line in lines if isinstance(line.get("event"), str)]
    found = {**_completion(known), **_shares(known), **_waits(known), **_unused(known), **_switches(known)}
    return {f"mux/{name}": float(value) for name, value in found.items()}


def step_events(directory: str | Path, step: int, max_bytes: int = 64 * 2**20) -> Iterator[dict[str, Any]]:
    """The events of one step of a job, from all its logs; lines that do not parse are left out.

    Reads at most `max_bytes`, for it runs beside training. Flush the writers first: what is queued is not in the files.
    """
    for file in find_step_files(directory, step):
        if (max_bytes := max_bytes - file.size) < 0:
            return
        with open(file.path, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                try:
                    given = json.loads(line)
                except ValueError:
                    continue
                if isinstance(given, dict):
                    yield {"role": file.role, "workid": file.worker, **given}


def _event(line: Mapping[str, Any]) -> str:
    return events.ALIASES.get(line["event"], line["event"])


def _extra(line: Mapping[str, Any]) -> Mapping[str, Any]:
    extra = line.get("extra")
    return extra if isinstance(extra, Mapping) else {}


def _seconds(line: Mapping[str, Any]) -> float:
    value = line.get("duration_sec")
    return float(value) if isinstance(value, (int, float)) and value >= 0 else 0.0


def _completion(lines: list[Mapping[str, Any]]) -> dict[str, float]:
    starts, ends, turns, aborted = [], [], [], 0
    for line in lines:
        if "request_id" not in _extra(line) or _extra(line).get("validate") or line.get("role") == "server":
            continue
        event, end = _event(line), _time(line)
        if end is None:
            continue
        starts.append(end - _seconds(line))
        aborted += event == events.REQUEST_ABORTED
        if event == events.REQUEST_COMPLETE:
            ends.append(end)
            turns += [count for count in [_extra(line).get("turns")] if isinstance(count, int)]
    if not ends:
        return {}
    ends = sorted(end - min(starts) for end in ends)
    found = {f"completion/{name}": ends[max(math.ceil(q * len(ends)) - 1, 0)] for name, q in QUANTILES.items()}
    found |= {"completion/total": ends[-1], "requests": len(ends), "requests_aborted": aborted}
    found["completion/t80_over_total"] = found["completion/p80"] / ends[-1] if ends[-1] > 0 else 1.0
    return found | ({"turns_mean": sum(turns) / len(turns)} if turns else {})


def _time(line: Mapping[str, Any]) -> float | None:
    try:
        return datetime.fromisoformat(line["timestamp"]).timestamp()
    except (KeyError, TypeError, ValueError):
        return None


def _shares(lines: list[Mapping[str, Any]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for role, whole in (("rollout", events.TOTAL_STEP), ("trainer", events.STEP)):
        mine = [line for line in lines if line.get("role", "rollout") == role and "request_id" not in _extra(line)]
        spent: dict[str, float] = defaultdict(float)
        for line in mine:
            spent[_event(line)] += _seconds(line)
        inside = {event: seconds for event, seconds in spent.items() if event not in events.ENCLOSING}
        total = spent.get(whole) or sum(inside.values())
        if total > 0:
            found |= {f"share/{event}": seconds / total for event, seconds in inside.items() if seconds > 0}
    waits = [_seconds(line) for line in lines if _event(line) == events.BARRIER_WAIT]
    return found | ({"barrier_wait/max": max(waits)} if waits else {})


def _waits(lines: list[Mapping[str, Any]]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for line in lines:
        if _event(line) == events.LEASE_WAIT and line.get("role") == "trainer":
            found[f"lease_wait/{_extra(line).get('phase', 'phase')}"] += _seconds(line)
    return dict(found)


def _unused(lines: list[Mapping[str, Any]]) -> dict[str, float]:
    mine = [line for line in lines if line.get("role") == "trainer"]
    whole = sum(_seconds(line) for line in mine if _event(line) == events.STEP)
    busy: dict[str, float] = defaultdict(float)
    for line in mine:
        pool = events.POOL_OF_PHASE.get(str(_extra(line).get("phase")))
        if _event(line) == events.PHASE and pool:
            busy[pool] += _seconds(line)
    return {f"unused/{pool}": max(1 - seconds / whole, 0.0) for pool, seconds in busy.items() if whole > 0}


def _switches(lines: list[Mapping[str, Any]]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for line in lines:
        if _event(line) in SWITCHES:
            found[f"{_event(line)}/seconds"] += _seconds(line)
            nbytes = _extra(line).get("bytes")
            found[f"{_event(line)}/bytes"] += nbytes if isinstance(nbytes, (int, float)) else 0
    return dict(found)
