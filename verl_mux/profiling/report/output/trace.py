"""The run as a trace that ui.perfetto.dev and chrome://tracing open: the Chrome JSON trace format.

One process a job (and one for the nodes), one thread a worker or node; spans are complete events ("X"), counters "C".
Requests of one worker overlap, and complete events of one thread must nest, so each worker gets as many threads as it had
requests open at once; other spans that do not nest go to a further thread. Written line by line: a large run does not have to fit
in memory twice. Runs on the command line; called by report_command.py; writes one file.
"""

from __future__ import annotations

import heapq
import itertools
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl

from verl_mux.profiling.eventlog import events
from verl_mux.profiling.report.input.reduction import REQUEST_KEY
from verl_mux.profiling.report.measures.analysis import Analysis
from verl_mux.profiling.report.output.page.page import extent

SLACK_US = 2000
# Events that may overlap get threads of their own, for spans of one thread must nest.
APART = {events.PHASE: "phases", events.STEP: "steps", events.SLEEP: "memory", events.WAKE: "memory"}
SHOWN = ["engine", "tool", "interaction", "reward"]


def write_trace(analysis: Analysis, path: str | Path) -> int:
    """Writes the trace; returns how many events it holds. Times are microseconds since the run's first event."""
    count = 0
    with open(path, "w", encoding="utf-8") as out:
        out.write('{"displayTimeUnit":"ms","traceEvents":[')
        for event in trace_events(analysis):
            out.write(("," if count else "") + "\n" + json.dumps(event, separators=(",", ":")))
            count += 1
        out.write("\n]}\n")
    return count


def trace_events(analysis: Analysis) -> Iterator[dict[str, Any]]:
    """Metadata, then nodes, trainer spans, requests with their turns, memory and throughput."""
    origin = extent(analysis)[0]
    names = _Names()
    for event in (*_nodes(analysis, names), *_spans(analysis, names), *_requests(analysis, names), *_counters(analysis, names)):
        start = round((event["ts"] - origin) * 1e6)
        if event["ph"] == "X":
            end = max(round((event["ts"] + event["dur"] - origin) * 1e6), start)
            start, end = names.fit(event, start, end)
            event["dur"] = end - start
        event["ts"] = start
        yield event
    yield from names.metadata()


class _Names:
    """Numbers for processes and threads, as the format wants them."""

    def __init__(self) -> None:
        self._processes: dict[str, int] = {}
        self._threads: dict[tuple[str, str], int] = {}
        self._names: dict[int, tuple[str, str]] = {}
        self._open: dict[int, list[int]] = {}  # thread -> ends of the spans that are open, the outermost first

    def place(self, process: str, thread: str) -> dict[str, int]:
        pid = self._processes.setdefault(process, len(self._processes) + 1)
        tid = self._threads.setdefault((process, thread), len(self._threads) + 1)
        self._names[tid] = (process, thread)
        return {"pid": pid, "tid": tid}

    def fit(self, event: dict[str, Any], start: int, end: int) -> tuple[int, int]:
        """The span's start and end on a thread where it nests; the event's thread is changed to one that has room.

        Clocks of two processes differ a little: a span that begins up to SLACK before the last one's end begins there.
        """
        thread = self._names[event["tid"]]
        for lane in itertools.count(1):
            name = thread if lane == 1 else (thread[0], f"{thread[1]} ({lane})")
            place = self.place(*name)
            ends = self._open.setdefault(place["tid"], [])
            while ends and ends[-1] <= start + SLACK_US and ends[-1] < end:
                start = max(start, ends.pop())
            if not ends or end <= ends[-1]:
                ends.append(end)
                event.update(place)
                return start, end
        raise AssertionError

    def metadata(self) -> Iterator[dict[str, Any]]:
        for process, pid in self._processes.items():
            yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": process}}
        for (process, thread), tid in self._threads.items():
            pid = self._processes[process]
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": thread}}


def _complete(name: str, category: str, start: float, end: float, place: dict[str, int], args: dict) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": category, "ts": start, "dur": end - start, **place, "args": args}


def _nodes(analysis: Analysis, names: _Names) -> Iterator[dict[str, Any]]:
    for hold in analysis.leases.holds:
        for node in hold.nodes:
            args = {"job": hold.job, "phase": hold.phase, "step": hold.step}
            yield _complete(f"{hold.job} {hold.phase}", "lease", hold.start, hold.end, names.place("nodes", node), args)
    for wait in analysis.leases.waits:
        place = names.place(_process(wait.job), "lease wait")
        yield _complete(f"wait for {wait.phase}", "wait", wait.start, wait.end, place, {"step": wait.step, **wait.behind})


def _process(job: str) -> str:
    return f"job {job}" if job else "run"


def _spans(analysis: Analysis, names: _Names) -> Iterator[dict[str, Any]]:
    rows = analysis.spans.filter(pl.col("seconds").is_not_null() & (pl.col("role") != "coordinator"))
    rows = rows.filter(pl.col("event") != events.LEASE_WAIT).sort("start", "end", descending=[False, True])
    for row in rows.iter_rows(named=True):
        place = names.place(_process(row["job"]), f"{row['role']} {row['worker']}: {APART.get(row['event'], 'parts')}")
        args = {key: row[key] for key in ("step", "phase", "tag", "node", "bytes", "version", "reward") if row[key] is not None}
        yield _complete(row["event"], row["role"], row["start"], row["end"], place, args)


def _requests(analysis: Analysis, names: _Names) -> Iterator[dict[str, Any]]:
    turns: dict[tuple, list[tuple[int, float, float]]] = defaultdict(list)
    for *request, turn, engine, end in analysis.turns.select(*REQUEST_KEY, "turn", "engine", "end").drop_nulls("end").iter_rows():
        turns[tuple(request)].append((turn, engine, end))
    for (job, worker), rows in analysis.requests.sort("start").group_by("job", "worker", maintain_order=True):
        slots = _Slots()
        for row in rows.iter_rows(named=True):
            slot = slots.take(row["start"], row["end"])
            place = names.place(_process(job), f"rollout {worker}: requests {slot:04d}")
            args = {key: row[key] for key in ("request_id", "step", "status", "turns", "tokens") if row[key] is not None}
            args |= {part: round(row[part], 6) for part in SHOWN if row[part]}
            yield _complete("request", "request", row["start"], row["end"], place, args)
            for turn, engine, end in turns.get((job, row["step"], worker, row["request_id"]), ()):
                start = max(end - engine, row["start"])
                yield _complete(f"turn {turn}", "turn", start, min(end, row["end"]), place, {"engine_sec": engine})


class _Slots:
    """Gives each interval the lowest number that no open one has."""

    def __init__(self) -> None:
        self._open: list[tuple[float, int]] = []
        self._free: list[int] = []
        self._made = 0

    def take(self, start: float, end: float) -> int:
        while self._open and self._open[0][0] <= start:
            heapq.heappush(self._free, heapq.heappop(self._open)[1])
        if self._free:
            slot = heapq.heappop(self._free)
        else:
            slot, self._made = self._made, self._made + 1
        heapq.heappush(self._open, (end, slot))
        return slot


def _counters(analysis: Analysis, names: _Names) -> Iterator[dict[str, Any]]:
    for row in analysis.spans.filter(pl.col("node_bytes").is_not_null()).iter_rows(named=True):
        place = names.place("nodes", row["node"] or "node")
        args = {"bytes": row["node_bytes"]}
        yield {"ph": "C", "name": f"bytes on {row['node']}", "ts": row["end"], "pid": place["pid"], "args": args}
    for row in analysis.engine_reports.filter(pl.col("end").is_not_null()).iter_rows(named=True):
        place = names.place(_process(row["job"]), f"server {row['worker']}")
        args = {key: row[key] for key in ("tokens_per_sec", "running", "queued") if row[key] is not None}
        yield {"ph": "C", "name": f"engine {row['worker']}", "ts": row["end"], "pid": place["pid"], "args": args}
