"""`verl-mux bench migration`: a run file twice, with rollouts that leave nodes early or grow, and without.

Runs on the command line; starts the two runs and reads what they wrote.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from bench.measuring import AsJson, show
from verl_mux.errors import UserError
from verl_mux.launcher import run_file
from verl_mux.launcher.command import run_jobs
from verl_mux.profiling.eventlog import events
from verl_mux.profiling.plain.lines import read_directory

# What lets a rollout have other nodes in its course, and what switches it off.
_OFF = {
    "mux.rollout.migration=true": "mux.rollout.migration=false",
    "mux.rollout.growth.own=": "mux.rollout.growth.own=null",
    "mux.rollout.tail=defer": "mux.rollout.tail=none",
}


def bench_migration(
    file: Annotated[Path, typer.Option(help="A run file in which a job migrates its tail, or grows.")] = Path(
        "examples/migration.yaml"
    ),
    directory: Annotated[Path, typer.Option("--dir", help="Where the two runs go.")] = Path("runs/bench_migration"),
    json: AsJson = False,
) -> None:
    """Two jobs with long-tail migration, or with tail rounds and growth (--file examples/growth.yaml), and without: makespan,
    and whether the responses are equal.

    About twelve minutes.
    """
    show(measure(file, directory), json, _in_words)


def _in_words(result: dict[str, Any]) -> str:
    return (
        "makespan {makespan_s[with]} s with it, {makespan_s[without]} s without: {ratio}x; nodes went back early {freed} times"
        " and were lent {grown} times, {migrated_requests} requests moved; {equal_responses} of {responses} responses are equal"
    ).format(**result)


def measure(file: Path, directory: Path) -> dict[str, Any]:
    """{"makespan_s", "ratio", "freed", "grown", "migrated_requests",
    "responses", "equal_responses"}.

    makespan_s: from when every job has finished a step (start-up is over) to the last report of one. equal_responses: of those
    that both runs wrote, prompt by prompt, the first response to it with the first, and so on; under greedy decoding on the same
    weights all should be.
    """
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
    spans = {"with": _makespan_s(with_), "without": _makespan_s(without)}
    events_seen = Counter(line.event for job in jobs for line in read_directory(with_ / job / "events"))
    pairs = [pair for job in jobs for pair in _pairs(with_ / job / "responses", without / job / "responses")]
    return {
        "makespan_s": {name: round(seconds, 2) for name, seconds in spans.items()},
        "ratio": round(spans["with"] / spans["without"], 3),
        "freed": events_seen[events.MIGRATION],
        "grown": events_seen[events.GROWTH],
        "migrated_requests": events_seen[events.REQUEST_MIGRATED],
        "responses": len(pairs),
        "equal_responses": sum(first == second for first, second in pairs),
    }


def _makespan_s(directory: Path) -> float:
    """Of the coordinator's log."""
    ends: dict[str, list[float]] = {}
    for line in read_directory(directory / "coordinator" / "events"):
        if line.event == events.STEP_REPORT:
            ends.setdefault(line.extra["job"], []).append(line.end)
    return max(map(max, ends.values())) - max(map(min, ends.values()))


def _pairs(first: Path, second: Path) -> list[tuple[str, str]]:
    """The outputs that both runs dumped (trainer.rollout_data_dir), prompt by prompt: tail rounds have them in other steps."""
    mine, others = _by_prompt(first), _by_prompt(second)
    return [pair for prompt in mine for pair in zip(mine[prompt], others.get(prompt, []), strict=False)]


def _by_prompt(dumps: Path) -> dict[str, list[str]]:
    """Step by step. In verl's dump the rows of a step are in the order in which they were trained, which is by length."""
    out: dict[str, list[str]] = {}
    for path in sorted(dumps.glob("*.jsonl"), key=lambda path: int(path.stem)):
        rows = sorted((row["input"], row["output"]) for row in map(json.loads, path.read_text().splitlines()))
        for prompt, output in rows:
            out.setdefault(prompt, []).append(output)
    return out
