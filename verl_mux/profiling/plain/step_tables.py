"""A step as tables, for trackers that take some: its slowest requests, its replicas, how its requests came to their ends, and its
waits for leases. Pure; from the same lines as step_metrics.py's figures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from verl_mux.profiling.eventlog import events
from verl_mux.profiling.plain.intervals import overlap
from verl_mux.profiling.plain.lines import Line

SLOWEST = 20
POINTS = 100  # of a curve
_PARTS = {events.TOOL_EXECUTION: "tool_s", events.REWARD: "reward_s", events.REQUEST_PARKED: "parked_s"}
_NOBODY = [(None, 0.0)]
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
    mine = [line for line in known if not (line.extra.get("request_id") in validated and "request_id" in line.extra)]
    tables = {
        "slowest_requests": _slowest(mine),
        "replicas": _replicas(mine),
        "completion": _completion(mine),
        "lease_waits": _lease_waits(waits_for_leases(mine), list(beside)),
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
        told = name, round(line.seconds, 4), of("turns"), of("stays"), of("response_length")
        rows.append((*told, *spent, of("finish_reason"), went))
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


def _completion(lines: list[Line]) -> Table:
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
        told = (str(wait.extra.get("phase")), " ".join(_nodes(wait)), round(wait.seconds, 4))
        rows += [(*told, job, round(seconds, 4)) for job, seconds in _behind(wait, beside) or _NOBODY]
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
