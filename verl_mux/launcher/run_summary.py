"""The figures of a run, from its intervals: steps alone and multiplexed, where the time went, its groups' periods as predicted
and as measured, and its moves.

Runs in the launcher and bench/; called by command.py; reads the coordinator's log.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, mean, median
from typing import Any

from verl_mux.coordinator.core.settings import Config, Segment
from verl_mux.launcher import cores
from verl_mux.launcher.cores import Interval
from verl_mux.launcher.run_intervals import Span, Timeline, coordinators_lines
from verl_mux.profiling.eventlog import events
from verl_mux.profiling.plain.lines import Line, clip, length, throughput_ratio

PHASES = ("rollout", "train", "sync", "sleep", "wake", "wait_rollout", "wait_train")
_REWARD_STEPS = 3


def segment_steps(schedule: list[Segment]) -> list[tuple[str, int, int]]:
    """(mode, first step, last step) of every segment; the last one is open."""
    segments: list[tuple[str, int, int]] = []
    first = 1
    for segment in schedule:
        last = first + segment.steps - 1 if segment.steps else 10**9
        segments.append((segment.mode, first, last))
        first = last + 1
    return segments


class Figures:
    """The figures of those of the jobs that finished a step. Seconds."""

    def __init__(self, timeline: Timeline, schedule: list[Segment], jobs: list[str]) -> None:
        self.timeline, self.segments = timeline, segment_steps(schedule)
        steps = {job: {span.step: span for span in timeline.of(job, "steps")} for job in jobs}
        self.steps = {job: spans for job, spans in steps.items() if spans}
        self._all_alive_until = min((max(span.end for span in spans.values()) for spans in self.steps.values()), default=0.0)

    def _gaps(self, job: str, mode: str) -> list[tuple[Span, float]]:
        """Each step of segments of this mode and the seconds since the end of the step before, while all jobs were alive.

        A segment's first step is left out: it may have begun behind the barrier. So is the first after the job was resumed.
        """
        steps, until = self.steps[job], math.inf if mode == "sequential" else self._all_alive_until
        pairs = [(steps[number - 1], steps[number]) for number in sorted(steps) if number - 1 in steps]
        return [
            (step, step.end - before.end)
            for segment_mode, first, last in self.segments
            for before, step in pairs
            if segment_mode == mode and first < step.step <= last and step.end <= until
            and self.timeline.unbroken(job, before.end, step.end)
        ]  # fmt: skip

    def periods(self, mode: str) -> dict[str, float | None]:
        """Each job's median step period in the segments of `mode`."""
        gaps = {job: [seconds for _, seconds in self._gaps(job, mode)] for job in self.steps}
        return {job: round(median(found), 4) if found else None for job, found in gaps.items()}

    def token_throughput_ratio(self) -> float | None:
        """As throughput_ratio, in tokens per second: steps grow and shrink with the responses while a job learns."""
        alone, both = ([self._tokens_and_seconds(job, mode) for job in self.steps] for mode in ("sequential", "interleaved"))
        if not self.steps or not all(tokens and seconds for tokens, seconds in (*alone, *both)):
            return None
        one_after_the_other = sum(tokens for tokens, _ in alone) / sum(seconds for _, seconds in alone)
        return round(sum(tokens / seconds for tokens, seconds in both) / one_after_the_other, 4)

    def _tokens_and_seconds(self, job: str, mode: str) -> tuple[float, float]:
        gaps = self._gaps(job, mode)
        return sum(step.extra.get("tokens", 0) for step, _ in gaps), sum(seconds for _, seconds in gaps)

    def alone_windows(self) -> list[tuple[float, float]]:
        """From the end of each job's first step alone to that of its last one alone."""
        found = []
        for mode, first, last in self.segments:
            for steps in self.steps.values() if mode == "sequential" else ():
                ends = [span.end for span in steps.values() if first <= span.step <= last]
                found += [(min(ends), max(ends))] if len(ends) > 1 else []
        return found

    def shared_window(self) -> tuple[float, float] | None:
        """From when every job has begun to interleave, for the last time if they were resumed, until the first of them ends."""
        firsts = [first for mode, first, _ in self.segments if mode == "interleaved"]
        if not firsts or not self.steps:
            return None
        came = max((start for job in self.steps for start in self.timeline.starts.get(job, ())), default=0.0)
        ends = [[s.end for s in steps.values() if s.step >= firsts[0] and s.end > came] for steps in self.steps.values()]
        if not all(ends) or self._all_alive_until <= (begun := max(map(min, ends))):
            return None
        return begun, self._all_alive_until

    def bubble(self, nodes: list[str]) -> float | None:
        """Share of these nodes' seconds without a phase, while all jobs interleave."""
        if (window := self.shared_window()) is None:
            return None
        held = ([(span.start, span.end) for span in self.timeline.phases if node in span.nodes] for node in nodes)
        return round(1 - sum(length(clip(spans, window)) for spans in held) / (len(nodes) * (window[1] - window[0])), 4)

    def phase_seconds(self, job: str, name: str) -> float:
        """Median over interleaved steps of the seconds in a phase, a part or a wait of a step; what overlaps counts once."""
        first = max((first for mode, first, _ in self.segments if mode == "interleaved"), default=1)
        kind = "waits" if name.startswith("wait_") else "phases" if name in ("rollout", "train") else "parts"
        by_step: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
        for span in self.timeline.of(job, kind):
            if span.name == name.removeprefix("wait_") and span.step > first:
                by_step[span.step].append((span.start, span.end))
        return round(median(map(length, by_step.values())), 4) if by_step else 0.0


def summarise(
    timeline: Timeline, config: Config, jobs: list[str], peak_rss_bytes: int, startup_s: float, intervals: Sequence[Interval] = ()
) -> dict:
    """The content of `summary.json`. Jobs that never finished a step are left out. intervals: the run's processor time."""
    figures = Figures(timeline, config.schedule, jobs)
    alone, both = figures.periods("sequential"), figures.periods("interleaved")
    about = {}
    for job, steps in figures.steps.items():
        rewards = _numbers(span.extra.get("reward") for span in steps.values()) or [0.0]
        about[job] = {
            "steps": len(steps),
            "reward_first": round(mean(rewards[:_REWARD_STEPS]), 4),
            "reward_last": round(mean(rewards[-_REWARD_STEPS:]), 4),
            "period_alone_s": alone[job],
            "period_mux_s": both[job],
            "phase_s": {name: figures.phase_seconds(job, name) for name in PHASES},
        }
    return {
        "jobs": about,
        "mux": {
            "throughput_ratio": throughput_ratio(alone, both),
            **cores.figures(intervals, config, figures.alone_windows(), figures.shared_window()),
            "token_throughput_ratio": figures.token_throughput_ratio(),
            "bubble": {name: figures.bubble([node.name for node in pool.nodes]) for name, pool in config.pools.items()},
            "peak_rss_bytes": peak_rss_bytes,
            "startup_s": round(startup_s, 3),
        },
    }


def startup(timeline: Timeline, since: float) -> float:
    """Seconds until the first job asked for its first step; 0 if none did. `since`: the run's start, epoch seconds."""
    return min((wait.start - since for wait in timeline.waits if wait.step > 0 and wait.start >= since), default=0.0)


def _numbers(rewards: Iterable[Any]) -> list[float]:
    """Null in a log: the reward was no number."""
    return [reward for reward in rewards if isinstance(reward, (int, float))]


# A period from fewer gaps between steps says nothing.
_LEAST_GAPS = 2


@dataclass
class _Stay:
    """Predictions (`group_predicted`) for the same jobs on the same nodes, until another takes one of the jobs up."""

    predictions: list[Line]
    until: float = math.inf


def group_periods(predictions: list[Line], timeline: Timeline) -> list[dict]:
    """One entry per group of jobs that ran together long enough: the period predicted once all of them had been seen for
    a few steps, and the median period of their steps from then on, as long as the group stayed as it was.
    """
    found = []
    for stay in _stays(predictions):
        observed = next((line for line in stay.predictions if line.extra["source"] == "observed"), None)
        if observed is not None and (measured := _measured(observed, stay.until, timeline)):
            found.append(_group_entry(stay.predictions[0].extra, observed.extra, measured))
    return found


def _stays(predictions: list[Line]) -> list[_Stay]:
    stays: list[_Stay] = []
    latest: dict[str, _Stay] = {}
    for line in predictions:
        before = [latest[job] for job in line.extra["periods"] if job in latest]
        stay = before[0] if before else _Stay([])
        same = before and _jobs_and_nodes(stay.predictions[0]) == _jobs_and_nodes(line)
        if not same or any(it is not stay for it in before):
            for it in before:
                it.until = min(it.until, line.end)
            stays.append(stay := _Stay([]))
            latest.update(dict.fromkeys(line.extra["periods"], stay))
        stay.predictions.append(line)
    return stays


def _jobs_and_nodes(prediction: Line) -> tuple[set[str], dict[str, list[str]]]:
    return set(prediction.extra["periods"]), prediction.extra["nodes"]


def _measured(prediction: Line, until: float, timeline: Timeline) -> dict[str, tuple[float, int]] | None:
    """Median seconds from one step's end to the next, and how many, of each job; None if one of them has too few."""
    steps = {job: timeline.of(job, "steps") for job in prediction.extra["periods"]}
    if not all(steps.values()):
        return None
    until = min(until, *(spans[-1].end for spans in steps.values()))
    measured = {}
    for job, spans in steps.items():
        ends = [span.end for span in spans if prediction.end <= span.end <= until]
        if len(ends) <= _LEAST_GAPS:
            return None
        measured[job] = (median(b - a for a, b in itertools.pairwise(ends)), len(ends) - 1)
    return measured


def _group_entry(first: dict[str, Any], observed: dict[str, Any], measured: Mapping[str, tuple[float, int]]) -> dict:
    predicted, seen = fmean(observed["periods"].values()), fmean(seconds for seconds, _ in measured.values())
    jobs = {
        job: {"predicted_period_s": round(observed["periods"][job], 4), "measured_period_s": round(seconds, 4), "steps": count}
        for job, (seconds, count) in measured.items()
    }
    return {
        "group": observed["group"],
        "nodes": observed["nodes"],
        "usd_per_hour": round(observed["usd_per_hour"], 4),
        "predicted_period_s": round(predicted, 4),
        "measured_period_s": round(seen, 4),
        "difference": round(predicted / seen - 1, 4),
        "period_bound_s": round(fmean(first["periods"].values()), 4),
        "jobs": jobs,
    }


def read_moves(directory: Path, timeline: Timeline) -> list[dict[str, Any]]:
    """One entry for each move that came to its end, in order of time. Times in seconds."""
    lines = coordinators_lines(directory, events.MOVE_ASKED, events.JOB_MOVED)
    expected = {line.extra["number"]: line.extra["expected_s"] for line in lines if line.event == events.MOVE_ASKED}
    moved = [line for line in lines if line.event == events.JOB_MOVED]
    return [_move_entry(line, expected.get(line.extra["number"]), timeline) for line in moved]


def _move_entry(line: Line, expected_s: float | None, timeline: Timeline) -> dict[str, Any]:
    job, done = line.extra["job"], line.extra["done"]
    steps = timeline.times_done[job]
    rewards = {span.step: span.extra.get("reward") for span in timeline.of(job, "steps")}

    def mean_reward(first: int) -> float | None:
        numbers = _numbers(rewards.get(step) for step in range(first, first + _REWARD_STEPS))
        return round(fmean(numbers), 4) if numbers else None

    return {
        "job": job,
        "from": line.extra["before"],
        "to": line.extra["nodes"],
        "after_step": done,
        "took_s": round(line.seconds, 3),
        "expected_s": expected_s,
        "steps_lost": len(set(range(1, max(steps, default=0) + 1)) - set(steps)),
        "steps_doubled": sum(count - 1 for count in steps.values()),
        "reward_before": mean_reward(done - _REWARD_STEPS + 1),
        "reward_after": mean_reward(done + 1),
    }


def move_sentence(move: dict[str, Any]) -> str:
    """For people."""
    at = [", ".join([*move[where]["rollout"], *move[where]["train"]]) for where in ("from", "to")]
    rewards = [f"{move[when]:.2f}" if move[when] is not None else "-" for when in ("reward_before", "reward_after")]
    expected = f" ({move['expected_s']:.0f} expected)" if move["expected_s"] is not None else ""
    return (
        f"moved {move['job']} after step {move['after_step']} from {at[0]} to {at[1]} in {move['took_s']:.0f} s{expected};"
        f" steps lost {move['steps_lost']}, doubled {move['steps_doubled']}; reward {rewards[0]}->{rewards[1]}"
    )
