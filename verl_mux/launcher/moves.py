"""The moves of a run: who went where, what that took, and whether a step was lost or done twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from verl_mux.launcher.timeline import Timeline
from verl_mux.profiling.eventlog import events
from verl_mux.profiling.plain.lines import Line, read_directory

# Steps before and after a move whose mean reward is told.
_STEPS = 3


def read(directory: Path, timeline: Timeline) -> list[dict[str, Any]]:
    """One entry for each move that came to its end, in order of time. Times in seconds."""
    told = [line for line in read_directory(directory / "coordinator" / "events") if line.event in _EVENTS]
    expected = {line.extra["number"]: line.extra["expected_s"] for line in told if line.event == events.MOVE_ASKED}
    moved = sorted((line for line in told if line.event == events.JOB_MOVED), key=lambda line: line.end)
    return [_entry(line, expected.get(line.extra["number"]), directory, timeline) for line in moved]


_EVENTS = (events.MOVE_ASKED, events.JOB_MOVED)


def _entry(line: Line, expected_s: float | None, directory: Path, timeline: Timeline) -> dict[str, Any]:
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


def sentence(move: dict[str, Any]) -> str:
    """For people."""
    at = [", ".join([*move[where]["rollout"], *move[where]["train"]]) for where in ("from", "to")]
    rewards = [f"{move[when]:.2f}" if move[when] is not None else "-" for when in ("reward_before", "reward_after")]
    expected = f" ({move['expected_s']:.0f} expected)" if move["expected_s"] is not None else ""
    return (
        f"moved {move['job']} after step {move['after_step']} from {at[0]} to {at[1]} in {move['took_s']:.0f} s{expected};"
        f" steps lost {move['steps_lost']}, doubled {move['steps_doubled']}; reward {rewards[0]}->{rewards[1]}"
    )
