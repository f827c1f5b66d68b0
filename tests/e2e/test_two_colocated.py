"""Two colocated jobs on one node, under one coordinator: four phases that take turns."""

from __future__ import annotations

import json

import pytest

from bench.rollouts.modes import read_run
from tests.e2e import tiny
from tests.e2e.conftest import CONTROLLED_STEPS as STEPS
from tests.gpu import scenes
from verl_mux.profiling.eventlog import events

pytestmark = pytest.mark.e2e
JOBS = ("plain", "job")


def test_each_does_its_steps_while_the_other_does(controlled):
    spans = []
    for job in JOBS:
        steps = [e for e in tiny.events(controlled, job) if e["event"] == events.STEP]
        assert [e["step"] for e in steps] == list(range(1, STEPS + 1))
        spans.append((tiny.ended(steps[0]), tiny.ended(steps[-1])))
    (one_began, one_ended), (other_began, other_ended) = spans
    assert max(one_began, other_began) < min(one_ended, other_ended), "they ran one after the other"


def test_the_node_is_one_phases_at_a_time(controlled):
    lines = [json.loads(line) for path in (controlled / "coordinator").rglob("*.jsonl") for line in path.open()]
    held = [line for line in lines if line["event"] == events.LEASE_HELD]
    # A line is stamped when it is written, some milliseconds after what it tells, on a busy machine more; a phase takes a second.
    grants = [(line["extra"]["job"], tiny.ended(line) - line["duration_sec"], tiny.ended(line) - 0.25) for line in held]
    assert scenes.in_turns(grants) == []


@pytest.mark.parametrize("job", JOBS)
def test_between_its_phases_a_job_holds_nothing(controlled, job):
    assert tiny.held_without_lease(controlled, job) == []


def test_its_engine_has_its_trainers_weights_in_every_step(controlled):
    metrics = read_run("mux_colocate", 7, controlled / "plain").metrics
    assert scenes.weights_agree([metrics[step] for step in sorted(metrics)], STEPS) == []
