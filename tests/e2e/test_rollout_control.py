"""Two colocated jobs on one node, under one coordinator: four phases that take turns. Both train LoRA.

`plain`'s engine serves the adapter beside base weights of its own. `job` has over-sampling and segments: requests are cut off
on the engine, go on under newer weights, are trained. LoRA is merged for its rollout.
"""

from __future__ import annotations

import json

import pytest

from bench.rollouts.modes import read_run
from tests.e2e import tiny
from tests.e2e.conftest import CONTROLLED_STEPS as STEPS
from tests.e2e.conftest import SEGMENT, VALIDATED
from tests.gpu import scenes
from verl_mux.profiling.eventlog import events

pytestmark = pytest.mark.e2e

JOBS = ("plain", "job")
WANTED = 4


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
    # In the order in which it decided. When a line says that was, is some milliseconds late, and more on a busy machine.
    lines = sorted((it for it in lines if it["event"] in (events.LEASE_WAIT, events.LEASE_HELD)), key=lambda it: it["timestamp"])
    given, back = lines[::2], lines[1::2]
    assert {it["event"] for it in given} == {events.LEASE_WAIT} and {it["event"] for it in back} == {events.LEASE_HELD}
    assert [it["extra"]["token"] for it in given] == [it["extra"]["token"] for it in back]
    assert {it["extra"]["job"] for it in back} == {*JOBS} and len(back) >= 4 * STEPS


@pytest.mark.parametrize("job", JOBS)
def test_between_its_phases_a_job_holds_nothing(controlled, job):
    assert tiny.held_without_lease(controlled, job) == []


def test_its_engine_has_its_trainers_adapter_in_every_step(controlled):
    metrics = read_run("mux_colocate", 7, controlled / "plain").metrics
    assert scenes.weights_agree([metrics[step] for step in sorted(metrics)], STEPS) == []


def test_a_sync_brings_the_adapter_alone_where_the_engine_serves_it(controlled):
    adapter, whole = ({e["extra"]["bytes"] for e in tiny.events(controlled, job) if e["event"] == events.SYNC} for job in JOBS)
    assert len(whole) == len(adapter) == 1 and 0 < adapter.pop() < 0.1 * whole.pop()


def test_a_colocated_job_takes_turns_with_itself_and_validates_at_the_end(controlled):
    trainer = tiny.events(controlled, "job")
    assert [e["step"] for e in trainer if e["event"] == "step"] == list(range(1, STEPS + 1))
    phases = [e["extra"]["phase"] for e in trainer if e["event"] == "phase"]
    assert phases[-5:] == ["rollout", "train", "rollout", "train", "rollout"]


def _named(directory, role: str, name: str) -> list[dict]:
    return [event for event in tiny.events(directory, "job", role) if event["event"] == name]


def test_every_step_trains_whole_groups_and_some_were_cut_off(controlled):
    figures = [tiny.figures(controlled, "job", step) for step in range(1, STEPS + 1)]
    assert all(it["trained_groups"] == WANTED for it in figures)
    assert _named(controlled, "rollout", events.REQUEST_ABORTED)
    assert any(it["requeued_groups"] > 0 for it in figures)


def test_old_tokens_are_counted_and_steps_are_logged(controlled):
    figures = [tiny.figures(controlled, "job", step) for step in range(2, STEPS + 1)]
    assert any(it["off_policy_token_fraction"] > 0 and it["oldest_version_lag"] >= 1 for it in figures)
    assert any(it["reprefilled_tokens"] > 0 for it in figures)
    assert _named(controlled, "rollout", events.REQUEST_REQUEUED)
    steps = _named(controlled, "trainer", events.GENERATE_MONITORED)
    assert [event["step"] for event in steps] == list(range(1, STEPS + 1))
    assert all(event["extra"]["target_completion"] == WANTED * 4 for event in steps), "samples, four a prompt"


def test_a_resumed_prefix_in_the_same_step_comes_from_the_cache(controlled):
    asked = _named(controlled, "server", "engine_generate")
    assert any((event["extra"].get("cached_tokens") or 0) >= SEGMENT for event in asked)
    # Validation is neither over-sampled nor cut into segments.
    assert sum(event["extra"]["response_tokens"] > SEGMENT for event in asked) <= VALIDATED


def test_the_checkpoint_holds_every_group_that_waits(controlled):
    saved = json.loads((controlled / "job" / "checkpoints" / f"global_step_{STEPS}" / "mux_rollout.json").read_text())
    groups = saved["machine"]["groups"]
    assert set(saved["calls"]) == set(groups)
    for name, trajectories in groups.items():
        for sample, trajectory in enumerate(trajectories):
            calls = saved["calls"][name][str(sample)]
            tokens = sum(len(call["token_ids"]) for call in calls)
            assert tokens == sum(length for length, _ in trajectory["segments"])
            assert all(len(call["log_probs"]) == len(call["token_ids"]) for call in calls if call["token_ids"])
