"""The figures of `verl-mux bench migration`, from what two runs wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.rollouts.migration import compare, measure


def _run(directory: Path, ends: dict[str, list[float]], responses: list[tuple[str, str]], migrated: int) -> Path:
    log = directory / "coordinator" / "events" / "step_1"
    log.mkdir(parents=True)
    lines = [
        {"event": "step_report", "timestamp": f"2026-01-01T00:00:{second:06.3f}", "extra": {"job": job}}
        for job, seconds in ends.items()
        for second in seconds
    ]
    (log / "worker_0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (directory / "wide" / "responses").mkdir(parents=True)
    for at, (prompt, text) in enumerate(responses):
        row = {"input": prompt, "output": text}
        (directory / "wide" / "responses" / f"{9 + at}.jsonl").write_text(json.dumps(row) + "\n")
    events = directory / "wide" / "events"
    events.mkdir()
    moved = {"event": "request_migrated", "timestamp": "2026-01-01T00:00:12", "extra": {}}
    (events / "worker_0.jsonl").write_text(json.dumps(moved) + "\n" if migrated else "")
    return directory


def test_responses_are_paired_by_prompt_whatever_the_steps_that_trained_them(tmp_path):
    ends = {"wide": [10.0, 20.0], "narrow": [5.0, 30.0]}
    first = _run(tmp_path / "with", ends, [("p", "a"), ("q", "b"), ("q", "c")], migrated=1)
    slower = {"wide": [10.0, 20.0], "narrow": [5.0, 35.0]}
    second = _run(tmp_path / "without", slower, [("q", "c"), ("p", "a"), ("q", "x")], migrated=0)
    found = compare(first, second, ["wide", "narrow"])
    assert found["makespan_s"] == {"with": 20.0, "without": 25.0}
    assert (found["ratio"], found["migrated_requests"]) == (0.8, 1)
    assert (found["responses"], found["equal_responses"]) == (3, 1)


RUN = """
coordinator: {pools: {rollout: {nodes: [{name: r0}]}, train: {nodes: [{name: t0}]}}}
overrides: [SHARED]
jobs:
  wide: {nodes: {rollout: [r0], train: [t0]}}
"""


@pytest.mark.parametrize(
    ("on", "off"),
    [
        ("mux.rollout.migration=true", "mux.rollout.migration=false"),
        ('"mux.rollout.growth.own=[r0]"', "mux.rollout.growth.own=null"),
        ("mux.rollout.tail=defer", "mux.rollout.tail=none"),
    ],
)
def test_what_all_jobs_share_is_switched_off_in_the_other_run(tmp_path, monkeypatch, on, off):
    (tmp_path / "run.yaml").write_text(RUN.replace("SHARED", on))
    runs = []
    monkeypatch.setattr("bench.rollouts.migration.run_jobs", runs.append)
    monkeypatch.setattr("bench.rollouts.migration.compare", lambda *_: {})
    measure(tmp_path / "run.yaml", tmp_path / "out")
    last = [[*run.overrides, *run.jobs["wide"].overrides][-1] for run in runs]
    assert last == [off, on.strip('"')]
