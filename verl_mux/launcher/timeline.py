"""A run as intervals: who ran which phase on which nodes, from the trainers' event logs."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import msgspec

from verl_mux.profiling.events import REQUEST_COMPLETE

# Phases, waits and steps; the ends of requests; the engines' sleep and wake.
_ROLES = ("trainer", "rollout", "server")


class _Line(msgspec.Struct):
    timestamp: datetime
    event: str
    duration_sec: float = 0.0
    extra: dict = {}
    step: int = 0


@dataclass(frozen=True)
class Span:
    """One event with a length. Times in seconds since the epoch; `name`: the phase for a phase, else the event."""

    job: str
    name: str
    step: int
    start: float
    end: float
    nodes: tuple[str, ...] = ()
    extra: dict = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass
class Timeline:
    """All spans of a run, in order of their ends. `requests`: the end of each training request."""

    phases: list[Span]
    waits: list[Span]
    parts: list[Span]
    steps: list[Span]
    requests: list[Span] = field(default_factory=list)

    def of(self, job: str, kind: str) -> list[Span]:
        return [span for span in getattr(self, kind) if span.job == job]


def read(directory: Path, jobs: list[str]) -> Timeline:
    """The timeline of the run in `directory` (`<directory>/<job>/events/<role>/step_*/worker_*.jsonl`)."""
    timeline = Timeline([], [], [], [])
    for job in jobs:
        for role in _ROLES:
            for path in sorted((directory / job / "events" / role).glob("step_*/worker_*.jsonl")):
                for raw in path.read_bytes().splitlines():
                    _add(timeline, job, raw)
    for spans in (timeline.phases, timeline.waits, timeline.parts, timeline.steps, timeline.requests):
        spans.sort(key=lambda span: span.end)
    return timeline


def _add(timeline: Timeline, job: str, raw: bytes) -> None:
    try:
        line = msgspec.json.decode(raw, type=_Line)
    except msgspec.DecodeError:
        return  # a job that was killed may leave one torn line
    end = line.timestamp.timestamp()
    name = line.extra.get("phase", line.event)
    nodes = tuple(line.extra.get("nodes", ()))
    span = Span(job, name, line.step, end - line.duration_sec, end, nodes, line.extra)
    if line.extra.get("validate"):
        return
    kinds = {
        "phase": timeline.phases,
        "lease_wait": timeline.waits,
        "step": timeline.steps,
        REQUEST_COMPLETE: timeline.requests,
    }
    kinds.get(line.event, timeline.parts).append(span)


def union_seconds(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reach = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return total
