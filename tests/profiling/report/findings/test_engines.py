"""Findings on logs of our own layout: replicas and nodes are named, and modes of rollout are read as what they are."""

import json
import random
from datetime import datetime, timezone

import pytest

from tests.profiling.made_engines import Job, Made, make
from tests.profiling.made_logs import Lines, read_run
from verl_mux.profiling.report.measures.analysis import Analysis
from verl_mux.profiling.report.output.summary import find_all, summarise


def analysis(directory) -> Analysis:
    return Analysis(read_run(directory))


def found(directory):
    return find_all(analysis(directory))


# What was made -> the one finding: kind and place, and what else holds of it.
ONE = {
    "a slow replica is a straggler and no long tail": (
        {"slower": {2: 2.5}}, {"kind": "straggler", "replica": 2, "node": "r1", "worker": None},
        lambda it: it.evidence["steps"] == [1, 2, 3, 4] and it.cost_s > it.seconds > 5,
    ),
    "one of two replicas": (
        {"slower": {1: 2.5}, "replicas": 2, "nodes": 1, "requests": 48}, {"kind": "straggler", "replica": 1, "node": "r0"},
        lambda it: True,
    ),
    "a slow node is one finding of the node": (
        {"slower": {2: 2.0, 3: 2.1}}, {"kind": "straggler", "node": "r1"}, lambda it: it.evidence["replicas"] == [2, 3],
    ),
    "a stalled replica is blamed and not a worker": (
        {"stalled": (3, 0, 6.0, 150.0)}, {"kind": "silent_gap", "step": 3, "replica": 0, "node": "r0", "worker": None},
        lambda it: 147 <= it.seconds <= 153,
    ),
    "few requests are enough where the engine's counters stop": (
        {"stalled": (2, 1, 6.0, 20.0), "requests": 16, "replicas": 2}, {"kind": "silent_gap", "step": 2, "replica": 1},
        lambda it: True,
    ),
    "a stall counts from the last sign of life": (  # answers end in the second between the last counters and the stall
        {"stalled": (2, 1, 14.9, 6.0), "replicas": 2, "requests": 192}, {"kind": "silent_gap", "step": 2, "replica": 1},
        lambda it: 5.5 <= it.seconds <= 6.5,
    ),
    "a stall in a step with a validation": (  # the engines wait for longer while the trainer trains between the two
        {"stalled": (2, 1, 8.9, 7.0), "replicas": 2, "validates": 64}, {"kind": "silent_gap", "step": 2, "replica": 1},
        lambda it: 7 <= it.seconds < 8.1,
    ),
    "KV starvation comes from the engine's own counters": (
        {"starved": {(2, 3)}}, {"kind": "kv_starvation", "step": 2, "replica": 3, "node": "r1"}, lambda it: it.seconds > 5,
    ),
    "slow tools": ({"slow_tools": {2}, "turns": 2}, {"kind": "tool_wait", "step": 2}, lambda it: it.seconds > 1),
    "slow rewards": ({"slow_rewards": {2}}, {"kind": "reward_wait", "step": 2}, lambda it: it.seconds > 1),
    "turns that take long to prepare": ({"prepare": 6.0}, {"kind": "preprocessing"}, lambda it: it.seconds > 4),
    "steps whose tools were as ever are not among those that waited": (
        {"steps": 6, "turns": 2, "slow_tools": {4, 5}, "slower": dict.fromkeys(range(4), 0.05)}, {"kind": "tool_wait"},
        lambda it: it.step in (4, 5) and it.evidence["share"] >= 0.4 and it.evidence["steps"] == [4, 5],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ONE)
def test_a_fault_is_the_one_finding_with_its_place(tmp_path, name):
    made, place, holds = ONE[name]
    (it,) = found(make(tmp_path, **made))
    assert {key: getattr(it, key) for key in place} == place and holds(it)


def test_replicas_of_a_single_node_that_were_slow_in_turn_are_no_slow_node(tmp_path):
    slow = found(make(tmp_path, slower={(1, 0): 3.0, (3, 1): 3.0}, replicas=2, nodes=1, requests=48))
    assert {(it.kind, it.step, it.replica, it.node) for it in slow} == {("straggler", 1, 0, "r0"), ("straggler", 3, 1, "r0")}
    assert all("replicas" not in it.evidence and "its peers" in it.advice for it in slow)


def test_what_its_processes_were_doing_is_linked_from_a_stall(tmp_path):
    directory = make(tmp_path, stalled=(3, 0, 6.0, 150.0))
    (gap,) = found(directory)
    file = next(directory.rglob("server/step_3/worker_0.jsonl"))
    when = datetime.fromtimestamp(gap.start + 10.0, tz=timezone.utc).replace(tzinfo=None)
    line = {"timestamp": when.isoformat(), "event": "engine_stalled", "duration_sec": 10.0, "workid": 0, "step": 3}
    extra = {"replica": 0, "node": "r0", "running": 8, "path": "/logs/stalls/a_replica0_2.txt", "how": "py-spy"}
    with file.open("a") as lines:
        lines.write(json.dumps({**line, "role": "server", "job": "a", "run": "0a1b2c3d", "extra": extra}) + "\n")
    (gap,) = found(directory)
    assert gap.evidence["stacks"] == extra["path"] and gap.text.endswith(f"what its processes were doing: {extra['path']}")


def test_requests_that_wait_in_the_engines_queues(tmp_path):
    findings = found(make(tmp_path, slots=6))
    assert {(finding.kind, finding.replica) for finding in findings} == {("queueing", replica) for replica in range(4)}


def test_requests_that_wait_while_slots_are_free_wait_for_kv_cache(tmp_path):
    findings = found(make(tmp_path / "free", slots=6, seats=64))
    assert {(finding.kind, finding.replica) for finding in findings} == {("kv_starvation", replica) for replica in range(4)}
    findings = found(make(tmp_path / "taken", slots=6, seats=6))
    assert {finding.kind for finding in findings} == {"queueing"}


HEALTHY = {
    "plain": {},
    "validated": {"validates": 64},
    "multi-turn": {"turns": 3},
    "over-sampled": {"over": 0.5},
    "over-sampled, multi-turn": {"over": 0.25, "turns": 2},
    "segmented": {"segment": 128},
    "over-sampled in segments": {"segment": 128, "over": 0.5},
    "multiplexed": {"away": 60.0, "over": 0.5},
}


@pytest.mark.parametrize("mode", HEALTHY)
@pytest.mark.parametrize("seed", range(3))
def test_a_healthy_run_of_every_mode_has_no_findings(tmp_path, mode, seed):
    assert [(f.kind, f.text) for f in found(make(tmp_path, seed=seed, **HEALTHY[mode]))] == []


def test_turns_are_turns_and_parked_time_is_no_request_time(tmp_path):
    report = summarise(analysis(make(tmp_path, over=0.5, away=100.0)))
    assert report["turns"]["counts"].keys() == {"1"}
    assert report["completion"]["total"] < 30 and report["completion"]["p99"] < 30
    assert max(request["seconds"] for request in report["slowest_requests"]) < 50


def test_replicas_and_nodes_are_views(tmp_path):
    report = summarise(analysis(make(tmp_path, slower={2: 2.5})))
    assert [(row["replica"], row["nodes"]) for row in report["replicas"]] == [(0, ["r0"]), (1, ["r0"]), (2, ["r1"]), (3, ["r1"])]
    pace = [row["seconds_per_token"] for row in report["replicas"]]
    assert pace[2] > 2 * max(pace[:2])
    assert [row["node"] for row in report["nodes"]] == ["r0", "r1"]
    (finding,) = report["findings"]
    assert {"kind", "step", "replica", "node", "worker", "request_id", "seconds", "cost_s", "text"} <= finding.keys()


def test_two_runs_in_one_folder_are_told_apart(tmp_path):
    Made(tmp_path, Job(steps=3), run="11111111")
    Made(tmp_path, Job(steps=3, seed=1, slower={2: 2.5}), run="22222222", began=3600.0)
    report = summarise(analysis(tmp_path))
    assert report["steps"] == 6 and report["requests"] == 6 * 96
    assert [(f["kind"], f["job"]) for f in report["findings"]] == [("straggler", "a (run 2)")]
    assert {row["job"] for row in report["completion"]["per_step"]} == {"a (run 1)", "a (run 2)"}


@pytest.mark.parametrize("seed", range(4))
def test_the_fault_of_a_random_run_is_named(tmp_path, seed):
    rng = random.Random(seed)
    replica = rng.randrange(4)
    findings = found(make(tmp_path, seed=seed, over=rng.choice([0.0, 0.5]), slower={replica: rng.uniform(2.0, 3.0)}))
    assert [(f.kind, f.replica) for f in findings] == [("straggler", replica)]


def waiting(directory, waits: dict[str, list[float]]):
    """Jobs in turns whose steps take 100 s, so many of which they wait for the lease of their rollout."""
    for job, seconds in waits.items():
        for step, wait in enumerate(seconds, 1):
            lines = Lines(0, step)
            keys = {"role": "trainer", "job": job}
            lines.add(100 * step + wait, "lease_wait", wait, {"phase": "rollout", "nodes": ["r0"], "token": step}, **keys)
            lines.add(100 * step + 99, "phase", 99 - wait, {"phase": "rollout", "nodes": ["r0"], "token": step}, **keys)
            lines.add(100 * step + 100, "step", 100.0, {}, **keys)
            lines.write(directory / job / "events" / "trainer")
    return found(directory)


# Seconds waited in each step by job -> the findings: job, step, node, what it cost.
WAITS = {
    "far more than the other": ({"a": [80.0] * 4, "b": [5.0] * 4}, [("a", 1, "r0", 320.0)]),
    "once, for long": ({"a": [5.0, 6.0, 90.0, 5.0]}, [("a", 3, "r0", 90.0)]),
    "for one usual phase of another, which is its turn": ({"a": [5.0, 6.0, 60.0, 5.0], "b": [5.0] * 4}, []),
    "alike": ({"a": [55.0] * 4, "b": [55.0] * 4}, []),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_job_that_waits_for_leases_is_found_where_that_is_not_its_turn(tmp_path, name):
    waits, expected = WAITS[name]
    assert [(it.job, it.step, it.node, it.cost_s) for it in waiting(tmp_path, waits)] == expected


def test_a_wait_that_a_coordinator_logged_without_its_step_is_of_the_step_that_ended_next(tmp_path):
    coordinator, keys = Lines(0, 0), {"role": "coordinator", "job": "coordinator"}
    for step, wait in enumerate([5.0, 6.0, 90.0, 5.0], 1):
        lines = Lines(0, step)
        lines.add(100 * step + 100, "step", 100.0, {}, role="trainer", job="a")
        lines.write(tmp_path / "a" / "events" / "trainer")
        lease = {"job": "a", "phase": "rollout", "nodes": ["r0"], "token": step}
        coordinator.add(100 * step + wait, "lease_wait", wait, lease, **keys)
        coordinator.add(100 * step + 99, "lease_held", 99 - wait, lease, **keys)
    coordinator.write(tmp_path / "coordinator" / "events" / "coordinator")
    assert [(it.kind, it.job, it.step) for it in found(tmp_path)] == [("lease_wait", "a", 3)]


def streaming(directory, late: float):
    """A job whose log names no engine. Some requests go on after their step has ended, `late` seconds while the trainer has the
    device: one of each worker, and all of one worker's."""
    rng, keys = random.Random(5), {"role": "rollout", "job": "a"}
    for step in range(1, 7):
        began, trained = 100.0 * step, 100.0 * step + 60
        for worker in range(8):
            lines = Lines(worker, step)
            for number in range(24):
                seconds = rng.uniform(15, 30)
                goes_on = worker == 3 or number == 0
                end = trained + late + seconds if goes_on else began + seconds
                who = {"request_id": f"{step}{worker}{number:03}_0"}
                call = {"turn": 1, "stay": 1, "prompt_tokens": 90, "response_tokens": int(seconds * 20), "finish_reason": "stop"}
                lines.add(began, "request_start", None, who, **keys)
                lines.add(end, "turn_engine_call", end - began, who | call, **keys)
                findings = {"turns": 1, "stays": 1, "response_length": int(seconds * 20), "parked_sec": 0.0}
                lines.add(end + 0.1, "async_rollout_request_complete", end + 0.1 - began, who | findings, **keys)
            lines.write(directory / "rollout")
        trainer = Lines(0, step)
        trainer.add(trained, "step", 60.0, {}, role="trainer", job="a")
        trainer.write(directory / "trainer")
    return found(directory)


def test_steps_that_wait_for_no_request_blame_none(tmp_path):
    assert streaming(tmp_path, late=30.0) == []


def add_request(lines, name: str, began: float, generated: float, tool: float) -> None:
    """A request of one turn: `generated` seconds in the engine, then a tool call of `tool` seconds."""
    keys, tokens, end = {"role": "rollout", "job": "a"}, int(generated * 20), began + generated + tool
    who = {"request_id": name}
    call = {"turn": 1, "stay": 1, "response_tokens": tokens, "finish_reason": "stop"}
    lines.add(began, "request_start", None, who, **keys)
    lines.add(end - tool, "turn_engine_call", generated, who | call, **keys)
    lines.add(end, "tool_execution", tool, who | {"turn": 1, "tool": "search"}, **keys)
    findings = {"turns": 1, "stays": 1, "response_length": tokens, "parked_sec": 0.0}
    lines.add(end, "async_rollout_request_complete", end - began, who | findings, **keys)


def with_tools(directory, steps: int, requests: int, drawn) -> list:
    """Eight workers' requests with one tool call each. drawn(step, worker, number): when one began in its step of 100 s, and its
    seconds in the engine and in the tool."""
    for step in range(1, steps + 1):
        for worker in range(8):
            lines = Lines(worker, step)
            for number in range(requests):
                began, *seconds = drawn(step, worker, number)
                add_request(lines, f"{step}{worker}{number:03}_0", 100.0 * step + began, *seconds)
            lines.write(directory)
    return found(directory)


def test_a_slow_tool_among_several_is_told_where_no_step_waits_for_its_last_request(tmp_path):
    # From step 2 on a tool that a third of the requests call takes four seconds of their twenty, and their steps do not wait.
    rng = random.Random(5)
    for step in range(1, 7):
        trainer = Lines(0, step)
        trainer.add(100.0 * step + 20.0, "step", 20.0, {}, role="trainer", job="a")
        trainer.write(tmp_path / "trainer")

    def drawn(step, worker, number):
        slow = step > 1 and number % 3 == 0
        tool = rng.uniform(3.5, 4.5) if slow else rng.uniform(0.1, 0.3)
        return number, rng.uniform(14, 18), tool

    (findings,) = with_tools(tmp_path, 6, 9, drawn)
    assert (findings.kind, findings.evidence["steps"]) == ("tool_wait", [2, 3, 4, 5, 6])


@pytest.mark.parametrize(("longest", "findings"), [(14.0, []), (60.0, [("tool_wait", 4)])])
def test_a_call_that_is_long_as_such_calls_are_is_no_finding(tmp_path, longest, findings):
    rng = random.Random(7)

    def drawn(*place):
        generated, tool = rng.uniform(10, 30), rng.lognormvariate(0.0, 0.75)
        return (0.0, 29.0, longest) if place == (4, 2, 5) else (0.0, generated, tool)  # the last of its step

    assert [(it.kind, it.step) for it in with_tools(tmp_path, 8, 16, drawn)] == findings


def test_a_call_that_no_step_waited_for_is_no_finding(tmp_path):
    # The call made its request six seconds longer, and others of the step take twenty more.
    rng = random.Random(3)

    def drawn(*place):
        generated = 30.0 if place[2] == 0 else rng.uniform(8, 10)
        return 0.0, generated, 6.0 if place == (2, 1, 5) else rng.uniform(0.2, 0.4)

    assert "tool_wait" not in {it.kind for it in with_tools(tmp_path, 4, 16, drawn)}
