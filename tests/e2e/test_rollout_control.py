"""One real job with over-sampling and segments: requests are cut off on the engine, go on under newer weights, are trained.

It is also a colocated job: rollout and training take turns on one GPU, with each other and with another job's, and LoRA is merged
for the rollout.
"""

from __future__ import annotations

import json
import re

import pytest

from tests.e2e import tiny
from tests.e2e.conftest import CONTROLLED_STEPS as STEPS
from tests.e2e.conftest import SEGMENT, VALIDATED
from verl_mux.profiling.eventlog import events

pytestmark = pytest.mark.e2e

WANTED = 4


def test_a_colocated_job_takes_turns_with_itself_and_validates_at_the_end(controlled):
    trainer = tiny.events(controlled, "job")
    assert [e["step"] for e in trainer if e["event"] == "step"] == list(range(1, STEPS + 1))
    phases = [e["extra"]["phase"] for e in trainer if e["event"] == "phase"]
    assert phases[-5:] == ["rollout", "train", "rollout", "train", "rollout"]


def _metrics(directory, step: int) -> dict[str, float]:
    line = next(x for x in (directory / "job" / "job.log").read_text().splitlines() if f"step:{step} - " in x)
    return {name: float(value) for name, value in re.findall(r"mux/rollout/(\w+):(?:np\.\w+\()?(-?[0-9.e-]+)", line)}


def _named(directory, role: str, name: str) -> list[dict]:
    return [event for event in tiny.events(directory, "job", role) if event["event"] == name]


def test_every_step_trains_whole_groups_and_some_were_cut_off(controlled):
    figures = [_metrics(controlled, step) for step in range(1, STEPS + 1)]
    assert all(it["trained_groups"] == WANTED for it in figures)
    assert _named(controlled, "rollout", events.REQUEST_ABORTED)
    assert any(it["requeued_groups"] > 0 for it in figures)


def test_old_tokens_are_counted_and_steps_are_logged(controlled):
    figures = [_metrics(controlled, step) for step in range(2, STEPS + 1)]
    assert any(it["off_policy_token_fraction"] > 0 and it["oldest_version_lag"] >= 1 for it in figures)
    assert any(it["reprefilled_tokens"] > 0 for it in figures)
    assert _named(controlled, "rollout", events.REQUEST_REQUEUED)
    steps = _named(controlled, "trainer", events.GENERATE_MONITORED)
    assert [event["step"] for event in steps] == list(range(1, STEPS + 1))
    assert all(event["extra"]["target_completion"] == WANTED * 4 for event in steps), "samples, four a prompt"


def test_a_resumed_prefix_in_the_same_step_comes_from_the_cache(controlled):
    asked = _named(controlled, "server", "engine_generate")
    assert any((event["extra"].get("cached_tokens") or 0) > SEGMENT for event in asked)
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
