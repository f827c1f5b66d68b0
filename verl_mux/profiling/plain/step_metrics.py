"""A step's figures while the run goes on: `mux/*` metrics for verl's Tracking, from the step's own events.

Uses the definitions of the report, without its dataframe engine. Runs in the trainer's driver; called by trainer/;
`step_metrics` is pure.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from verl_mux.profiling.eventlog import events
from verl_mux.profiling.eventlog.log import writer
from verl_mux.profiling.plain.lines import Line, find_step_files, read_lines

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
        lines = step_lines(log.files.directory.parent, step)
        return step_metrics(line for line in lines if line.run in (None, log.run))  # an earlier run may have left some there
    except (OSError, ValueError, OverflowError):  # a time stamp may be of no time
        return {}
    finally:
        writer().caller_seconds += time.perf_counter() - began


def step_metrics(lines: Iterable[Line]) -> dict[str, float]:
    """Metrics of one step of one job from its events. Seconds, bytes, parts of 1.

    mux/completion/{p50,p80,p90,p95,p99,total,t80_over_total}, mux/requests, mux/requests_aborted, mux/turns_mean,
    mux/share/<event>, mux/lease_wait/<phase>, mux/{sleep,wake,sync}/{seconds,bytes}, mux/barrier_wait/max,
    mux/unused/<pool>: the part of the step in which this job ran nothing on its nodes of the pool (alone, its bubble).
    """
    known = list(lines)
    found = {**_completion(known), **_shares(known), **_sums(known), **_unused(known)}
    return {f"mux/{name}": float(value) for name, value in found.items()}


def step_lines(directory: str | Path, step: int, max_bytes: int = 64 * 2**20) -> Iterator[Line]:
    """The events of one step of a job, from all its logs. Flush the writers first: what is queued is not in the files.

    Reads at most `max_bytes`, for it runs beside training: of logs that are larger together (100 turns of 1,000 requests) the
    trainer's alone. Figures of some of the requests would be taken for those of all.
    """
    files = find_step_files(directory, step)
    for some in (files, [file for file in files if file.role == "trainer"]):
        if sum(file.size for file in some) <= max_bytes:
            yield from read_lines(some)
            return


def _completion(lines: list[Line]) -> dict[str, float]:
    starts, ends, turns, aborted = [], [], [], 0
    logs_stays = any("stay" in line.extra for line in lines)
    for line in lines:
        if "request_id" not in line.extra or line.extra.get("validate") or line.role == "server":
            continue
        if not (logs_stays and line.event in events.REACHING_BACK):
            starts.append(line.start)
        aborted += line.event == events.REQUEST_ABORTED
        if line.event == events.REQUEST_COMPLETE:
            ends.append(line.end)
            turns += [count for count in [line.extra.get("turns")] if isinstance(count, int)]
    if not ends or not starts:
        return {}
    first = min(starts)
    ends = sorted(end - first for end in ends)
    found = {f"completion/{name}": ends[max(math.ceil(q * len(ends)) - 1, 0)] for name, q in QUANTILES.items()}
    found |= {"completion/total": ends[-1], "requests": len(ends), "requests_aborted": aborted}
    found["completion/t80_over_total"] = found["completion/p80"] / ends[-1] if ends[-1] > 0 else 1.0
    return found | ({"turns_mean": sum(turns) / len(turns)} if turns else {})


def _shares(lines: list[Line]) -> dict[str, float]:
    found: dict[str, float] = {}
    for role, whole in (("rollout", events.TOTAL_STEP), ("trainer", events.STEP)):
        own = [line for line in lines if line.role == role and "request_id" not in line.extra]
        spent: dict[str, float] = defaultdict(float)
        for line in own:
            spent[line.event] += line.seconds
        inside = {event: seconds for event, seconds in spent.items() if event not in events.ENCLOSING}
        total = spent.get(whole) or sum(inside.values())
        if total > 0:
            found |= {f"share/{event}": seconds / total for event, seconds in inside.items() if seconds > 0}
    return found


def _sums(lines: list[Line]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for line in lines:
        if line.event == events.LEASE_WAIT and line.role == "trainer":
            found[f"lease_wait/{line.extra.get('phase', 'phase')}"] += line.seconds
        elif line.event in SWITCHES:
            found[f"{line.event}/seconds"] += line.seconds
            found[f"{line.event}/bytes"] += line.number("bytes") or 0
        elif line.event == events.BARRIER_WAIT:
            found["barrier_wait/max"] = max(found["barrier_wait/max"], line.seconds)
    return dict(found)


def _unused(lines: list[Line]) -> dict[str, float]:
    own = [line for line in lines if line.role == "trainer"]
    whole = sum(line.seconds for line in own if line.event == events.STEP)
    busy: dict[str, float] = defaultdict(float)
    for line in own:
        pool = events.POOL_OF_PHASE.get(str(line.extra.get("phase")))
        if line.event == events.PHASE and pool:
            busy[pool] += line.seconds
    return {f"unused/{pool}": max(1 - seconds / whole, 0.0) for pool, seconds in busy.items() if whole > 0}
