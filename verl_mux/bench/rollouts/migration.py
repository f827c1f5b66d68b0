"""What `verl-mux bench migration` runs, and its figures: a run file twice, with rollouts that leave nodes early or grow, and
without.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from verl_mux.errors import UserError
from verl_mux.profiling.eventlog import events
from verl_mux.profiling.plain.lines import read_directory

# What lets a rollout have other nodes in its course, and what switches it off.
_OFF = {
    "mux.rollout.migration.enable=true": "mux.rollout.migration.enable=false",
    "mux.rollout.growth.own=": "mux.rollout.growth.own=null",
}


def measure(file: Path, directory: Path) -> dict[str, Any]:
    """{"makespan_s": {"with", "without"}, "ratio", "freed", "grown", "migrated_requests", "responses", "equal_responses"}.

    makespan_s: from when every job has finished a step (start-up is over) to the last report of one. equal_responses: of those
    that both runs wrote, step by step and prompt by prompt; under greedy decoding all should be.
    """
    from verl_mux.launcher import run_file
    from verl_mux.launcher.command import run_jobs

    run = run_file.read(file, directory / "with")
    if not any(_off([*run.overrides, *job.overrides]) for job in run.jobs.values()):
        raise UserError(f"{file}: no job has {' or '.join(_OFF)}, so there is nothing to compare")
    without = run_file.read(file, directory / "without")
    off = {name: _off([*run.overrides, *job.overrides]) for name, job in without.jobs.items()}
    jobs = {name: msgspec.structs.replace(job, overrides=[*job.overrides, *off[name]]) for name, job in without.jobs.items()}
    run_jobs(msgspec.structs.replace(without, jobs=jobs))
    run_jobs(run)
    return compare(directory / "with", directory / "without", list(run.jobs))


def _off(overrides: list[str]) -> list[str]:
    return [off for on, off in _OFF.items() if any(on in key for key in overrides)]


def compare(with_: Path, without: Path, jobs: list[str]) -> dict[str, Any]:
    """The figures, from what two runs wrote."""
    spans = {"with": makespan(with_), "without": makespan(without)}
    told = Counter(line.event for job in jobs for line in read_directory(with_ / job / "events"))
    pairs = [pair for job in jobs for pair in _pairs(with_ / job / "responses", without / job / "responses")]
    return {
        "makespan_s": {name: round(seconds, 2) for name, seconds in spans.items()},
        "ratio": round(spans["with"] / spans["without"], 3),
        "freed": told[events.MIGRATION],
        "grown": told[events.GROWTH],
        "migrated_requests": told[events.REQUEST_MIGRATED],
        "responses": len(pairs),
        "equal_responses": sum(first == second for first, second in pairs),
    }


def makespan(directory: Path) -> float:
    """Seconds from when every job has finished a step to the last report of one, by the coordinator's event log."""
    ends: dict[str, list[float]] = {}
    for line in read_directory(directory / "coordinator" / "events"):
        if line.event == events.STEP_REPORT:
            ends.setdefault(line.extra["job"], []).append(line.end)
    return max(map(max, ends.values())) - max(map(min, ends.values()))


def _pairs(first: Path, second: Path) -> list[tuple[str, str]]:
    """The outputs that both runs dumped (trainer.rollout_data_dir), prompt by prompt of each step."""
    out = []
    for path in sorted(first.glob("*.jsonl")):
        if (second / path.name).exists():
            mine, others = _by_prompt(path), _by_prompt(second / path.name)
            out += [pair for prompt in mine for pair in zip(mine[prompt], others.get(prompt, []), strict=False)]
    return out


def _by_prompt(path: Path) -> dict[str, list[str]]:
    """In verl's dump the rows of a step are in the order in which they were trained, which is by length."""
    out: dict[str, list[str]] = {}
    for row in map(json.loads, path.read_text().splitlines()):
        out.setdefault(row["input"], []).append(row["output"])
    return {prompt: sorted(outputs) for prompt, outputs in out.items()}
