"""A run as intervals of its event logs: which job ran which phase where, its groups' predicted periods, its moves and its hosts.

A run of weeks has hundreds of millions of lines, so only what the summary uses is kept. Runs in the launcher; called by
command.py, run_summary.py and cores.py; reads files only.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec

from verl_mux.coordinator.bus.messages import SIDES
from verl_mux.launcher.run_file import AGENTS, JobSpec, RunFile
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


# A period from fewer gaps between steps says nothing.
_LEAST_GAPS = 2


class Prediction(msgspec.Struct, frozen=True):
    """A `group_predicted` line. at: seconds since the epoch. source: `estimated` before, `observed` after its first steps
    together. periods: seconds per step, by job."""

    at: float
    group: str
    source: str
    periods: dict[str, float]
    nodes: dict[str, list[str]]
    usd_per_hour: float


def read_predictions(directory: Path) -> list[Prediction]:
    """In order of time, from the coordinator's event log of a run."""
    lines = ("group", "source", "periods", "nodes", "usd_per_hour")
    found = [
        Prediction(at=line.end, **{name: line.extra[name] for name in lines})
        for line in read_directory(directory / "coordinator" / "events")
        if line.event == events.GROUP_PREDICTED
    ]
    return sorted(found, key=lambda prediction: prediction.at)


def group_periods(predictions: list[Prediction], timeline: Timeline) -> list[dict]:
    """One entry per group of jobs that ran together long enough: the period predicted once all of them had been seen for
    a few steps, and the median period of their steps from then on, as long as the group stayed as it was.
    """
    found = []
    for first, stay in _stays(predictions):
        observed = next((p for p in stay if p.source == "observed"), None)
        if observed is None:
            continue
        until = next((p.at for p in predictions if p.at > first.at and _regroups(p, first)), float("inf"))
        if measured := _measured(observed, until, timeline):
            found.append(_group_entry(first, observed, measured))
    return found


def _stays(predictions: list[Prediction]) -> Iterator[tuple[Prediction, list[Prediction]]]:
    """Predictions for one and the same set of jobs on the same nodes, until another takes one of them up."""
    stays: list[list[Prediction]] = []
    latest: dict[str, list[Prediction]] = {}
    for prediction in predictions:
        jobs = _jobs(prediction)
        stay = latest.get(next(iter(jobs)))
        if stay is None or not _is_same(stay[0], prediction) or any(latest.get(job) is not stay for job in jobs):
            stays.append(stay := [])
        stay.append(prediction)
        latest.update(dict.fromkeys(jobs, stay))
    yield from ((stay[0], stay) for stay in stays)


def _jobs(prediction: Prediction) -> frozenset[str]:
    return frozenset(prediction.periods)


def _regroups(later: Prediction, earlier: Prediction) -> bool:
    return not _is_same(later, earlier) and not _jobs(later).isdisjoint(_jobs(earlier))


def _is_same(one: Prediction, other: Prediction) -> bool:
    return _jobs(one) == _jobs(other) and one.nodes == other.nodes


def _measured(prediction: Prediction, until: float, timeline: Timeline) -> dict[str, tuple[float, int]] | None:
    """Median seconds from one step's end to the next, and how many, of each job; None if one of them has too few."""
    steps = {job: timeline.of(job, "steps") for job in prediction.periods}
    if not all(steps.values()):
        return None
    until = min(until, *(spans[-1].end for spans in steps.values()))
    measured = {}
    for job, spans in steps.items():
        ends = [span.end for span in spans if prediction.at <= span.end <= until]
        if len(ends) <= _LEAST_GAPS:
            return None
        measured[job] = (median(b - a for a, b in itertools.pairwise(ends)), len(ends) - 1)
    return measured


def _group_entry(first: Prediction, observed: Prediction, measured: Mapping[str, tuple[float, int]]) -> dict:
    predicted, seen = fmean(observed.periods.values()), fmean(seconds for seconds, _ in measured.values())
    jobs = {
        job: {"predicted_period_s": round(observed.periods[job], 4), "measured_period_s": round(seconds, 4), "steps": count}
        for job, (seconds, count) in measured.items()
    }
    return {
        "group": observed.group,
        "nodes": observed.nodes,
        "usd_per_hour": round(observed.usd_per_hour, 4),
        "predicted_period_s": round(predicted, 4),
        "measured_period_s": round(seen, 4),
        "difference": round(predicted / seen - 1, 4),
        "period_bound_s": round(fmean(first.periods.values()), 4),
        "jobs": jobs,
    }


# Steps before and after a move whose mean reward is lines.
_STEPS = 3


def read_moves(directory: Path, timeline: Timeline) -> list[dict[str, Any]]:
    """One entry for each move that came to its end, in order of time. Times in seconds."""
    lines = [line for line in read_directory(directory / "coordinator" / "events") if line.event in _MOVE_EVENTS]
    expected = {line.extra["number"]: line.extra["expected_s"] for line in lines if line.event == events.MOVE_ASKED}
    moved = sorted((line for line in lines if line.event == events.JOB_MOVED), key=lambda line: line.end)
    return [_move_entry(line, expected.get(line.extra["number"]), directory, timeline) for line in moved]


_MOVE_EVENTS = (events.MOVE_ASKED, events.JOB_MOVED)


def _move_entry(line: Line, expected_s: float | None, directory: Path, timeline: Timeline) -> dict[str, Any]:
    job, done = line.extra["job"], line.extra["done"]
    steps = Counter(each.step for each in read_directory(directory / job / "events") if each.event == events.STEP)
    rewards = {span.step: span.extra.get("reward") for span in timeline.of(job, "steps")}
    return {
        "job": job,
        "from": line.extra["before"],
        "to": line.extra["nodes"],
        "after_step": done,
        "took_s": round(line.seconds, 3),
        "expected_s": expected_s,
        "steps_lost": len(set(range(1, max(steps, default=0) + 1)) - set(steps)),
        "steps_doubled": sum(count - 1 for count in steps.values()),
        "reward_before": _mean([rewards.get(step) for step in range(done - _STEPS + 1, done + 1)]),
        "reward_after": _mean([rewards.get(step) for step in range(done + 1, done + _STEPS + 1)]),
    }


def _mean(rewards: Sequence[Any]) -> float | None:
    numbers = [reward for reward in rewards if isinstance(reward, (int, float))]
    return round(fmean(numbers), 4) if numbers else None


def move_sentence(move: dict[str, Any]) -> str:
    """For people."""
    at = [", ".join([*move[where]["rollout"], *move[where]["train"]]) for where in ("from", "to")]
    rewards = [f"{move[when]:.2f}" if move[when] is not None else "-" for when in ("reward_before", "reward_after")]
    expected = f" ({move['expected_s']:.0f} expected)" if move["expected_s"] is not None else ""
    return (
        f"moved {move['job']} after step {move['after_step']} from {at[0]} to {at[1]} in {move['took_s']:.0f} s{expected};"
        f" steps lost {move['steps_lost']}, doubled {move['steps_doubled']}; reward {rewards[0]}->{rewards[1]}"
    )


# Of memory that was held for a node of none of the job's sides.
ELSEWHERE = "elsewhere"


def read_hosts(run: RunFile, since: float) -> dict[str, dict[str, list[str]]]:
    """By job and side, the hosts on which memory was held for a node of that side after `since` (epoch seconds), in order of
    name. Agents log in the run's folder where they were started with `--log-dir DIR/agents`."""
    return by_side((line for line in read_directory(run.directory / AGENTS) if line.end >= since), run.jobs)


def by_side(lines: Iterable[Line], jobs: Mapping[str, JobSpec]) -> dict[str, dict[str, list[str]]]:
    """As `read_hosts`, of these events."""
    found: dict[str, dict[str, set[str]]] = {name: {side: set() for side in SIDES} for name in jobs}
    for line in lines:
        job, node, host = (str(line.extra.get(key, "")) for key in ("job", "node", "host"))
        if line.event != events.DEVICE_MEMORY or job not in found or not line.extra.get("bytes"):
            continue
        nodes = jobs[job].nodes
        sides = [side for side in SIDES if isinstance(nodes, dict) and node in nodes[side]]
        for side in sides or [ELSEWHERE]:
            found[job].setdefault(side, set()).add(host)
    return {job: {side: sorted(hosts) for side, hosts in sides.items()} for job, sides in found.items()}
