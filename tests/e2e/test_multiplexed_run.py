"""Real verl trainers, SGLang engines, FSDP2, Ray and TransferQueue, interleaved by a real coordinator."""

from __future__ import annotations

import json

import pytest

from tests.e2e import tiny
from tests.e2e.conftest import FENCED, SAVED, Run, fenced
from verl_mux.profiling.eventlog import events

pytestmark = pytest.mark.e2e


def _steps(run: Run, job: str) -> dict[int, dict]:
    return {e["step"]: e["extra"] for e in tiny.events(run.directory, job) if e["event"] == "step"}


def test_the_other_job_goes_on_and_what_became_of_each_is_reported(run):
    steps = _steps(run, "stays")
    assert sorted(steps) == list(range(1, len(steps) + 1)) and len(steps) > SAVED, run.log
    assert "job rolls ended with SIGKILL (log:" in run.log
    summary = json.loads((run.directory / "summary.json").read_text())
    assert summary["jobs"]["stays"]["steps"] == len(steps)


def test_a_killed_job_goes_on_from_its_checkpoint_and_does_each_step_once(run):
    assert "job rolls ended with SIGKILL; it is started again from its newest checkpoint (1 of 1)" in run.log
    ends = [(tiny.ended(e), e["step"]) for e in tiny.events(run.directory, "rolls") if e["event"] == "step"]
    assert [step for _, step in sorted(ends)] == list(range(1, len(ends) + 1))
    killed, _ = run.killed["rollout"]
    assert ends[0][0] < killed < ends[-1][0]


def test_neither_a_killed_coordinator_nor_a_killed_launcher_ends_a_job(run):
    assert "the coordinator ended with SIGKILL" in run.log and "taking up the run" in run.log
    assert "job stays ended" not in run.log


def test_a_job_that_hears_nothing_for_most_of_a_lease_fences_itself_in_either_phase(run):
    assert fenced(run.directory, "stays").keys() >= FENCED.keys()


def test_interrupting_the_run_stops_everything_and_says_so_in_its_exit_code(run):
    assert run.returncode == 130, run.log


def test_jobs_in_one_ray_cluster_that_were_killed_or_stopped_leave_nothing_there(run):
    assert run.left == {"actors": [], "groups": []}


def test_no_two_jobs_hold_a_node_at_once(run):
    held: dict[str, list[tuple[float, float, str]]] = {}
    for job in ("stays", "rolls"):
        for event in tiny.events(run.directory, job):
            if event["event"] == "phase":
                for node in event["extra"]["nodes"]:
                    held.setdefault(node, []).append((tiny.ended(event) - event["duration_sec"], tiny.ended(event), job))
    for spans in held.values():
        spans.sort()
        assert all(a[1] <= b[0] + 0.001 or a[2] == b[2] for a, b in zip(spans, spans[1:], strict=False))


@pytest.mark.parametrize("phase", ["rollout", "train"])
def test_after_kill_9_the_others_go_on_within_ten_seconds(run, phase):
    killed, _ = run.killed[phase]
    waits = [e for e in tiny.events(run.directory, "stays") if e["event"] == "lease_wait" and tiny.ended(e) > killed]
    assert waits and tiny.ended(waits[0]) - max(killed, tiny.ended(waits[0]) - waits[0]["duration_sec"]) < 10.0


def _reclaimed(run: Run, job: str) -> set[str]:
    """Nodes that a dead job still held."""
    lines = [json.loads(line) for path in (run.directory / "coordinator").rglob("*.jsonl") for line in path.open()]
    reclaimed = [line["extra"] for line in lines if line["event"] == events.LEASE_RECLAIMED]
    return {node for extra in reclaimed if extra["job"] == job for node in extra["nodes"]}


@pytest.mark.parametrize(("phase", "node"), [("rollout", "r0"), ("train", "t0")])
def test_a_dead_jobs_node_is_given_on_only_when_its_processes_are_gone(run, phase, node):
    killed, last_seen = run.killed[phase]
    assert node in _reclaimed(run, "rolls"), "it was killed in another phase"
    grants = [
        tiny.ended(e) for e in tiny.events(run.directory, "stays")
        if e["event"] == "lease_wait" and node in e["extra"]["nodes"] and tiny.ended(e) > killed
    ]  # fmt: skip
    assert grants and min(grants) >= last_seen


def test_every_sync_filled_the_engine_with_the_trainers_weights_of_that_step(run):
    syncs = [e for e in tiny.events(run.directory, "stays") if e["event"] == "sync"]
    versions = [e["extra"]["version"] for e in syncs]  # one comes again where the job had fenced itself in its rollout
    assert versions == sorted(versions) and set(versions) == set(range(versions[-1] + 1))
    whole = [e["extra"]["bytes"] for e in syncs if "bytes" in e["extra"]]  # the last may have been stopped
    assert len(set(whole)) == 1 and len(whole) >= len(syncs) - 1


def test_a_job_without_lease_holds_nothing_on_its_nodes(run):
    assert tiny.held_without_lease(run.directory, "stays") == []
    woken = [e["extra"] for e in tiny.events(run.directory, "stays", "server") if e["event"] == "wake"]
    assert any(extra["tag"] == "kv_cache" and extra["bytes"] > 0 for extra in woken)


def test_requests_are_in_the_event_log_turn_by_turn(run):
    names = {e["event"] for e in tiny.events(run.directory, "stays", "rollout")}
    assert {"request_start", "turn_engine_call", "reward_calculation", "async_rollout_request_complete"} <= names


def _requests(run: Run, name: str) -> tuple[set[tuple[int, str]], set[tuple[int, str]]]:
    """Step and id of the requests of `rolls` of which such an event tells: before its first kill, and after."""
    told = [e for e in tiny.events(run.directory, "rolls", "rollout") if e["event"] == name]
    killed, _ = run.killed["rollout"]
    before, after = (
        {(e["step"], e["extra"]["request_id"]) for e in told if (tiny.ended(e) < killed) is first} for first in (True, False)
    )
    return before, after


@pytest.mark.parametrize("after", [False, True], ids=["before its first kill", "after it"])
def test_prompt_groups_beyond_the_batch_go_on_in_the_next_step(run, after):
    started, requeued = (_requests(run, name)[after] for name in (events.REQUEST_START, events.REQUEST_REQUEUED))
    assert requeued and not _requests(run, events.REQUEST_PADDED)[after]
    assert after or all(any(step < again and request == name for step, name in started) for again, request in requeued)
