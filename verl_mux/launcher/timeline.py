"""A run as intervals: who ran which phase on which nodes, from its event logs.

Of a run of weeks these are hundreds of millions of lines: what nobody asks for is not kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from verl_mux.profiling.eventlog import events
from verl_mux.profiling.plain.lines import Line, read_directory

# Parts of phases that are kept.
PARTS = (events.SYNC, events.SLEEP, events.WAKE)


@dataclass(frozen=True, slots=True)
class Span:
    """One event with a length. Times in seconds since the epoch; `name`: the phase for a phase, else the event; `extra`: only of
    steps."""

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
    """All spans of a run, in order of their ends. `requests`: the last training request of each step. `starts`: when each job
    came to the coordinator, several times if it was resumed; a step that it did again is there once, as it was done last."""

    phases: list[Span]
    waits: list[Span]
    parts: list[Span]
    steps: list[Span]
    requests: list[Span] = field(default_factory=list)
    starts: dict[str, list[float]] = field(default_factory=dict)

    def unbroken(self, job: str, begin: float, end: float) -> bool:
        """Whether the job was not started again in between."""
        return not any(begin < start < end for start in self.starts.get(job, ()))

    def of(self, job: str, kind: str) -> list[Span]:
        return [span for span in getattr(self, kind) if span.job == job]


def read(directory: Path, jobs: list[str]) -> Timeline:
    """The timeline of the run in `directory` (`<directory>/<job>/events/<role>/step_*/worker_*.jsonl`)."""
    timeline, last = Timeline([], [], [], []), dict[tuple[str, int], Span]()
    for job in jobs:
        for line in read_directory(directory / job / "events"):
            _add(timeline, last, job, line)
    timeline.requests = list(last.values())
    for spans in (timeline.phases, timeline.waits, timeline.parts, timeline.steps, timeline.requests):
        spans.sort(key=lambda span: span.end)
    timeline.steps = list({(span.job, span.step): span for span in timeline.steps}.values())
    for line in read_directory(directory / "coordinator" / "events"):
        if line.event == events.JOB_REGISTERED:
            timeline.starts.setdefault(line.extra["job"], []).append(line.end)
    return timeline


def _add(timeline: Timeline, last: dict[tuple[str, int], Span], job: str, line: Line) -> None:
    if line.extra.get("validate"):
        return
    kinds = {events.PHASE: timeline.phases, events.LEASE_WAIT: timeline.waits, events.STEP: timeline.steps}
    kinds |= dict.fromkeys(PARTS, timeline.parts)
    kept, end = kinds.get(line.event), line.end
    if kept is None and line.event != events.REQUEST_COMPLETE:
        return
    name, nodes = line.extra.get("phase", line.event), tuple(line.extra.get("nodes", ()))
    span = Span(job, name, line.step, end - line.seconds, end, nodes, line.extra if line.event == events.STEP else {})
    if kept is not None:
        kept.append(span)
    elif (before := last.get((job, line.step))) is None or before.end < end:
        last[job, line.step] = span
