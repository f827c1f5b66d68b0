"""What `verl-mux bench migration` runs, and its figures: a run file twice, with long-tail migration and without."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from verl_mux.errors import UserError
from verl_mux.profiling import events

_OFF = "mux.rollout.migration.enable=false"


def measure(file: Path, directory: Path) -> dict[str, Any]:
    """{"makespan_s": {"with", "without"}, "ratio", "freed", "migrated_requests", "responses", "equal_responses"}.

    makespan_s: from the first rollout lease of a step to the last step's report, of all jobs. equal_responses: of those that
    both runs wrote, step by step and prompt by prompt; under greedy decoding all should be.
    """
    from verl_mux.launcher import run_file
    from verl_mux.launcher.command import run_jobs

    run = run_file.read(file, directory / "with")
    if not any("migration.enable=true" in key for job in run.jobs.values() for key in (*run.overrides, *job.overrides)):
        raise UserError(f"{file}: no job has mux.rollout.migration.enable=true, so there is nothing to compare")
    without = run_file.read(file, directory / "without")
    jobs = {name: msgspec.structs.replace(job, overrides=[*job.overrides, *_off(job)]) for name, job in without.jobs.items()}
    run_jobs(msgspec.structs.replace(without, jobs=jobs))
    run_jobs(run)
    return compare(directory / "with", directory / "without", list(run.jobs))


def _off(job: Any) -> list[str]:
    return [_OFF] if any("migration.enable=true" in key for key in job.overrides) else []


def compare(with_: Path, without: Path, jobs: list[str]) -> dict[str, Any]:
    """The figures, from what two runs wrote."""
    spans = {"with": makespan(with_), "without": makespan(without)}
    moved = [e for job in jobs for e in _events(with_ / job / "events") if e["event"] == events.MIGRATION]
    requests = [e for job in jobs for e in _events(with_ / job / "events") if e["event"] == events.REQUEST_MIGRATED]
    pairs = [pair for job in jobs for pair in _pairs(with_ / job / "responses", without / job / "responses")]
    return {
        "makespan_s": {name: round(seconds, 2) for name, seconds in spans.items()},
        "ratio": round(spans["with"] / spans["without"], 3),
        "freed": len(moved),
        "migrated_requests": len(requests),
        "responses": len(pairs),
        "equal_responses": sum(first == second for first, second in pairs),
    }


def makespan(directory: Path) -> float:
    """Seconds from the first rollout of a step to the last report of one, by the coordinator's event log."""
    lines = _events(directory / "coordinator" / "events")
    begins = [_ended(e) for e in lines if e["event"] == events.LEASE_WAIT and e["extra"]["phase"] == "rollout" and e.get("step")]
    ends = [_ended(e) for e in lines if e["event"] == events.STEP_REPORT]
    return max(ends) - min(begins)


def _events(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(directory.rglob("*.jsonl")) for line in path.open()]


def _ended(event: dict[str, Any]) -> float:
    return datetime.fromisoformat(event["timestamp"]).timestamp()


def _pairs(first: Path, second: Path) -> list[tuple[str, str]]:
    """The outputs that both runs dumped (trainer.rollout_data_dir), row by row of each step."""
    out = []
    for path in sorted(first.glob("*.jsonl")):
        other = second / path.name
        if other.exists():
            rows = [[json.loads(line) for line in file.read_text().splitlines()] for file in (path, other)]
            out += [(a["output"], b["output"]) for a, b in zip(*rows, strict=True) if a["input"] == b["input"]]
    return out
