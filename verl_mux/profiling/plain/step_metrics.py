"""A step's figures and tables while the run goes on: `mux/*` metrics for verl's Tracking, from the step's own events.

Uses the definitions of the report, without its dataframe engine. Runs in the trainer's driver; called by trainer/;
`step_metrics` and `step_tables` are pure.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from verl_mux.profiling.eventlog import events
from verl_mux.profiling.eventlog.log import writer
from verl_mux.profiling.plain.intervals import overlap
from verl_mux.profiling.plain.lines import Line, find_step_files, read_lines

QUANTILES = {"p50": 0.50, "p80": 0.80, "p90": 0.90, "p95": 0.95, "p99": 0.99}
SWITCHES = (events.SLEEP, events.WAKE, events.SYNC)


def metrics_of_step(log: Any, step: int, also: Callable[[list[Line]], None] | None = None) -> dict[str, float]:
    """`step_metrics` of a step from the files that a trainer's event log lies among; nothing where the log is off. also: gets
    the same lines.

    Waits at most a second for lines that are still queued. What cannot be read is left out: metrics must not stop training.
    """
    if not log.enabled:
        return {}
    began = time.perf_counter()
    log.flush(1.0)
    try:
        lines = step_lines(log.files.directory.parent, step)
        own = [line for line in lines if line.run in (None, log.run)]  # an earlier run may have left its own there
        if also is not None and own:
            also(own)
        return step_metrics(own)
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
    found = {**_completion(known), **_shares(known), **_waits(known), **_unused(known), **_switches(known)}
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
        end = line.end
        if not (logs_stays and line.event in events.REACHING_BACK):
            starts.append(end - line.seconds)
        aborted += line.event == events.REQUEST_ABORTED
        if line.event == events.REQUEST_COMPLETE:
            ends.append(end)
            turns += [count for count in [line.extra.get("turns")] if isinstance(count, int)]
    if not ends or not starts:
        return {}
    ends = sorted(end - min(starts) for end in ends)
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
    waits = [line.seconds for line in lines if line.event == events.BARRIER_WAIT]
    return found | ({"barrier_wait/max": max(waits)} if waits else {})


def _waits(lines: list[Line]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for line in lines:
        if line.event == events.LEASE_WAIT and line.role == "trainer":
            found[f"lease_wait/{line.extra.get('phase', 'phase')}"] += line.seconds
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


def _switches(lines: list[Line]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for line in lines:
        if line.event in SWITCHES:
            found[f"{line.event}/seconds"] += line.seconds
            nbytes = line.extra.get("bytes")
            found[f"{line.event}/bytes"] += nbytes if isinstance(nbytes, (int, float)) else 0
    return dict(found)


SLOWEST = 20
POINTS = 100  # of a curve
_PARTS = {events.TOOL_EXECUTION: "tool_s", events.REWARD: "reward_s", events.REQUEST_PARKED: "parked_s"}
_NO_JOB = [(None, 0.0)]
_STAYED = ("queue_sec", "prefill_sec", "decode_sec")

Value = str | float | int | None


class Table(NamedTuple):
    """rows: a value for each column."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[Value, ...]]


def step_tables(lines: Iterable[Line], beside: Iterable[Line] = ()) -> dict[str, Table]:
    """{name: table} of one step of one job; those without a row are left out. Seconds, tokens, parts of 1.

    slowest_requests, replicas, completion (seconds since the step's first request, part of the requests that were over),
    lease_waits (a row for each job that had a node meanwhile, and for how long). Validation is in none. beside: phases of jobs
    that share nodes with this one.
    """
    known = list(lines)
    validated = {line.extra.get("request_id") for line in known if line.extra.get("validate")}
    own = [line for line in known if not (line.extra.get("request_id") in validated and "request_id" in line.extra)]
    tables = {
        "slowest_requests": _slowest(own),
        "replicas": _replicas(own),
        "completion": _completion_table(own),
        "lease_waits": _lease_waits(waits_for_leases(own), list(beside)),
    }
    return {name: table for name, table in tables.items() if table.rows}


def _slowest(lines: list[Line]) -> Table:
    parts: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    replicas: dict[str, list[str]] = defaultdict(list)
    ended: list[Line] = []
    for line in lines:
        name = str(line.extra.get("request_id"))
        if line.event == events.REQUEST_COMPLETE:
            ended.append(line)
        elif line.event in _PARTS:
            parts[name][_PARTS[line.event]] += line.seconds
        elif line.event == events.ENGINE_GENERATE:
            for key in _STAYED:
                parts[name][key] += _number(line, key) or 0.0
            replicas[name].append(str(line.extra.get("replica")))
    columns = ("request_id", "seconds", "turns", "stays", "tokens", *_STAYED, *_PARTS.values(), "finish", "replicas")
    rows = []
    for line in sorted(ended, key=lambda line: -line.seconds)[:SLOWEST]:
        name, of = str(line.extra.get("request_id")), line.extra.get
        spent = [round(parts[name][key], 4) for key in (*_STAYED, *_PARTS.values())]
        went = " ".join(dict.fromkeys(replicas[name]))
        cells = name, round(line.seconds, 4), of("turns"), of("stays"), of("response_length")
        rows.append((*cells, *spent, of("finish_reason"), went))
    return Table(columns, rows)


def _replicas(lines: list[Line]) -> Table:
    stays, counters = defaultdict(list), defaultdict(list)
    for line in lines:
        where = line.extra.get("replica"), line.extra.get("node")
        if line.event == events.ENGINE_GENERATE:
            stays[where].append(line)
        elif line.event == events.ENGINE_DECODE:
            counters[where].append(line)
    columns = (
        *("replica", "node", "stays", "tokens", "seconds_per_token", "queue_s"),
        *("most_running", "most_queued", "most_token_usage", "tokens_per_sec"),
    )
    rows = []
    for where in sorted(stays.keys() | counters.keys(), key=str):
        tokens = [_number(line, "response_tokens") or 0.0 for line in stays[where]]
        each = [seconds / count for line, count in zip(stays[where], tokens, strict=True)
                if count and (seconds := _number(line, "decode_sec"))]  # fmt: skip
        most = [max((_number(line, key) or 0.0 for line in counters[where]), default=None) for key in
                ("running", "queued", "token_usage")]  # fmt: skip
        rates = [rate for line in counters[where] if (rate := _number(line, "tokens_per_sec")) is not None]
        queue = sum(_number(line, "queue_sec") or 0.0 for line in stays[where])
        rows.append(
            (*map(str, where), len(stays[where]), int(sum(tokens)), median(each) if each else None, round(queue, 4),
             *most, median(rates) if rates else None)
        )  # fmt: skip
    return Table(columns, rows)


def _completion_table(lines: list[Line]) -> Table:
    ended = [line for line in lines if line.event == events.REQUEST_COMPLETE]
    began = min((line.end - line.seconds for line in lines if line.event == events.TURN_ENGINE_CALL), default=None)
    began = min((line.end - line.seconds for line in ended), default=0.0) if began is None else began
    ends = sorted(max(line.end - began, 0.0) for line in ended)
    some = sorted({round(at * (len(ends) - 1) / max(POINTS - 1, 1)) for at in range(POINTS)}) if ends else []
    return Table(("seconds", "part_done"), [(round(ends[at], 4), round((at + 1) / len(ends), 4)) for at in some])


def waits_for_leases(lines: Iterable[Line]) -> list[Line]:
    """The trainer's own; a coordinator logs all jobs'."""
    return [line for line in lines if line.event == events.LEASE_WAIT and line.role == "trainer"]


def _lease_waits(waits: list[Line], beside: list[Line]) -> Table:
    rows = []
    for wait in waits:
        cells = (str(wait.extra.get("phase")), " ".join(_nodes(wait)), round(wait.seconds, 4))
        rows += [(*cells, job, round(seconds, 4)) for job, seconds in _behind(wait, beside) or _NO_JOB]
    return Table(("phase", "nodes", "seconds", "behind", "behind_s"), rows)


def _behind(wait: Line, phases: Iterable[Line]) -> list[tuple[str | None, float]]:
    """(job, seconds of the wait in which it had one of the nodes), the longest first."""
    behind: dict[str, float] = defaultdict(float)
    for phase in phases:
        if set(_nodes(phase)) & set(_nodes(wait)):
            behind[phase.job] += overlap((phase.end - phase.seconds, phase.end), (wait.end - wait.seconds, wait.end))
    return [(job, seconds) for job, seconds in sorted(behind.items(), key=lambda held: -held[1]) if seconds > 0]


def _nodes(line: Line) -> list[str]:
    return [str(node) for node in line.extra.get("nodes") or ()]


def _number(line: Line, key: str) -> float | None:
    value = line.extra.get(key)
    return value if isinstance(value, (int, float)) else None
