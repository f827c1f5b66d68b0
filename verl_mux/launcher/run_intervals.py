"""A run as intervals of its event logs: which job ran which phase where, and where agents saw it.

A run of weeks has hundreds of millions of lines, so only what the summary uses is kept. Runs in the launcher and bench/; called
by run_summary.py and command.py; reads files only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from verl_mux.coordinator.bus.messages import SIDES
from verl_mux.launcher.run_file import COORDINATOR, JobSpec
from verl_mux.profiling.eventlog import events
from verl_mux.profiling.plain.lines import Line, read_directory


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
    """All spans of a run, in order of their ends. `parts`: sync, sleep and wake. `starts`: when each job came to the coordinator,
    several times if it was resumed; a step that it did again is there once, as it was done last. `times_done`: by job, how often
    each step was done."""

    phases: list[Span]
    waits: list[Span]
    parts: list[Span]
    steps: list[Span]
    starts: dict[str, list[float]] = field(default_factory=dict)
    times_done: dict[str, Counter[int]] = field(default_factory=dict)

    def unbroken(self, job: str, begin: float, end: float) -> bool:
        """Whether the job was not started again in between."""
        return not any(begin < start < end for start in self.starts.get(job, ()))

    def of(self, job: str, kind: str) -> list[Span]:
        return [span for span in getattr(self, kind) if span.job == job]


def read(directory: Path, jobs: list[str]) -> Timeline:
    """The timeline of the run in `directory` (`<directory>/<job>/events/<role>/step_*/worker_*.jsonl`)."""
    timeline = Timeline([], [], [], [])
    kinds = {events.PHASE: timeline.phases, events.LEASE_WAIT: timeline.waits, events.STEP: timeline.steps}
    kinds |= dict.fromkeys((events.SYNC, events.SLEEP, events.WAKE), timeline.parts)
    for job in jobs:
        for line in read_directory(directory / job / "events"):
            if line.extra.get("validate") or line.event not in kinds:
                continue
            name, nodes = line.extra.get("phase", line.event), tuple(line.extra.get("nodes", ()))
            extra = line.extra if line.event == events.STEP else {}
            kinds[line.event].append(Span(job, name, line.step, line.end - line.seconds, line.end, nodes, extra))
    for spans in (timeline.phases, timeline.waits, timeline.parts, timeline.steps):
        spans.sort(key=lambda span: span.end)
    timeline.times_done = {job: Counter(span.step for span in timeline.of(job, "steps")) for job in jobs}
    timeline.steps = list({(span.job, span.step): span for span in timeline.steps}.values())
    for line in coordinators_lines(directory):
        if line.event == events.JOB_REGISTERED:
            timeline.starts.setdefault(line.extra["job"], []).append(line.end)
    return timeline


def coordinators_lines(directory: Path, *kinds: str) -> list[Line]:
    """What the run's coordinator logged, in order of time; of these events only, where some are named."""
    found = (line for line in read_directory(directory / COORDINATOR / "events") if not kinds or line.event in kinds)
    return sorted(found, key=lambda line: line.end)


# Of memory that was held for a node of none of the job's sides.
ELSEWHERE = "elsewhere"


def hosts_by_side(lines: Iterable[Line], jobs: Mapping[str, JobSpec]) -> dict[str, dict[str, list[str]]]:
    """By job and side, the hosts on which memory was held for a node of that side, by these lines of agents, sorted."""
    found: dict[str, dict[str, set[str]]] = {name: {side: set() for side in SIDES} for name in jobs}
    for line in lines:
        job, node, host = (str(line.extra.get(key, "")) for key in ("job", "node", "host"))
        if line.event != events.DEVICE_MEMORY or job not in found or not line.extra.get("bytes"):
            continue
        nodes = jobs[job].nodes
        for side in [side for side in SIDES if isinstance(nodes, dict) and node in nodes[side]] or [ELSEWHERE]:
            found[job].setdefault(side, set()).add(host)
    return {job: {side: sorted(hosts) for side, hosts in sides.items()} for job, sides in found.items()}
