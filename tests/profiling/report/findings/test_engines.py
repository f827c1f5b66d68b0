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


def test_a_slow_replica_is_a_straggler_and_no_long_tail(tmp_path):
    (slow,) = found(make(tmp_path, slower={2: 2.5}))
    assert (slow.kind, slow.replica, slow.node, slow.worker) == ("straggler", 2, "r1", None)
    assert slow.evidence["steps"] == [1, 2, 3, 4] and slow.cost_s > slow.seconds > 5


def test_one_of_two_replicas_is_found_too(tmp_path):
    (slow,) = found(make(tmp_path, slower={1: 2.5}, replicas=2, nodes=1, requests=48))
    assert (slow.kind, slow.replica, slow.node) == ("straggler", 1, "r0")


def test_a_slow_node_is_one_finding_of_the_node(tmp_path):
    (slow,) = found(make(tmp_path, slower={2: 2.0, 3: 2.1}))
    assert (slow.kind, slow.node, slow.evidence["replicas"]) == ("straggler", "r1", [2, 3])


def test_replicas_of_a_single_node_that_were_slow_in_turn_are_no_slow_node(tmp_path):
    slow = found(make(tmp_path, slower={(1, 0): 3.0, (3, 1): 3.0}, replicas=2, nodes=1, requests=48))
    assert {(it.kind, it.step, it.replica, it.node) for it in slow} == {("straggler", 1, 0, "r0"), ("straggler", 3, 1, "r0")}
    assert all("replicas" not in it.evidence and "its peers" in it.advice for it in slow)


def test_a_stalled_replica_is_blamed_and_not_a_worker(tmp_path):
    (gap,) = found(make(tmp_path, stalled=(3, 0, 6.0, 150.0)))
    assert (gap.kind, gap.step, gap.replica, gap.node, gap.worker) == ("silent_gap", 3, 0, "r0", None)
    assert gap.seconds == pytest.approx(150, abs=3)


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


def test_few_requests_are_enough_where_the_engines_counters_stop(tmp_path):
    (gap,) = found(make(tmp_path, stalled=(2, 1, 6.0, 20.0), requests=16, replicas=2))
    assert (gap.kind, gap.step, gap.replica) == ("silent_gap", 2, 1)


def test_a_stall_counts_from_the_last_sign_of_life(tmp_path):
    # Answers end in the second between the last counters and the stall.
    (gap,) = found(make(tmp_path, stalled=(2, 1, 14.9, 6.0), replicas=2, requests=192))
    assert (gap.kind, gap.step, gap.replica) == ("silent_gap", 2, 1)
    assert gap.seconds == pytest.approx(6.0, abs=0.5)


def test_a_stall_in_a_step_with_a_validation_is_found(tmp_path):
    # The engines wait for longer while the trainer trains between the two.
    (gap,) = found(make(tmp_path, stalled=(2, 1, 8.9, 7.0), replicas=2, validates=64))
    assert (gap.kind, gap.step, gap.replica) == ("silent_gap", 2, 1)
    assert 7 <= gap.seconds < 8.1


def test_kv_starvation_comes_from_the_engines_own_counters(tmp_path):
    (starved,) = found(make(tmp_path, starved={(2, 3)}))
    assert (starved.kind, starved.step, starved.replica, starved.node) == ("kv_starvation", 2, 3, "r1")
    assert starved.seconds > 5


@pytest.mark.parametrize(("part", "keys"), [("tool", {"slow_tools": {2}, "turns": 2}), ("reward", {"slow_rewards": {2}})])
def test_slow_tools_and_rewards_are_found_in_their_step(tmp_path, part, keys):
    (slow,) = found(make(tmp_path, **keys))
    assert (slow.kind, slow.step) == (f"{part}_wait", 2)
    assert slow.seconds > 1


def test_requests_that_wait_in_the_engines_queues(tmp_path):
    told = found(make(tmp_path, slots=6))
    assert {(finding.kind, finding.replica) for finding in told} == {("queueing", replica) for replica in range(4)}


def test_requests_that_wait_while_slots_are_free_wait_for_kv_cache(tmp_path):
    told = found(make(tmp_path / "free", slots=6, seats=64))
    assert {(finding.kind, finding.replica) for finding in told} == {("kv_starvation", replica) for replica in range(4)}
    told = found(make(tmp_path / "taken", slots=6, seats=6))
    assert {finding.kind for finding in told} == {"queueing"}


def test_turns_that_take_long_to_prepare(tmp_path):
    (slow,) = found(make(tmp_path, prepare=6.0))
    assert slow.kind == "preprocessing" and slow.seconds > 4


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
    told = found(make(tmp_path, seed=seed, over=rng.choice([0.0, 0.5]), slower={replica: rng.uniform(2.0, 3.0)}))
    assert [(f.kind, f.replica) for f in told] == [("straggler", replica)]


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


def test_a_job_that_waits_far_more_than_the_other_is_told(tmp_path):
    (wait,) = waiting(tmp_path, {"a": [80.0] * 4, "b": [5.0] * 4})
    assert (wait.kind, wait.job, wait.cost_s, wait.node) == ("lease_wait", "a", 320.0, "r0")


def test_one_long_wait_is_told_with_its_step(tmp_path):
    (wait,) = waiting(tmp_path, {"a": [5.0, 6.0, 90.0, 5.0]})
    assert (wait.kind, wait.step, wait.seconds) == ("lease_wait", 3, 90.0)


def test_a_wait_for_one_usual_phase_of_another_job_is_its_turn(tmp_path):
    assert waiting(tmp_path, {"a": [5.0, 6.0, 60.0, 5.0], "b": [5.0] * 4}) == []


def test_equal_jobs_in_turns_wait_alike(tmp_path):
    assert waiting(tmp_path, {"a": [55.0] * 4, "b": [55.0] * 4}) == []


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
                told = {"turns": 1, "stays": 1, "response_length": int(seconds * 20), "parked_sec": 0.0}
                lines.add(end + 0.1, "async_rollout_request_complete", end + 0.1 - began, who | told, **keys)
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
    told = {"turns": 1, "stays": 1, "response_length": tokens, "parked_sec": 0.0}
    lines.add(end, "async_rollout_request_complete", end - began, who | told, **keys)


def with_tools(directory, longest: float):
    """Requests with one tool call each, most of them of a second or two; in step 4 one takes `longest` and is the last."""
    rng = random.Random(7)
    for step in range(1, 9):
        for worker in range(8):
            lines = Lines(worker, step)
            for number in range(16):
                began, generated, tool = 100.0 * step, rng.uniform(10, 30), rng.lognormvariate(0.0, 0.75)
                if (step, worker, number) == (4, 2, 5):
                    generated, tool = 29.0, longest
                add_request(lines, f"{step}{worker}{number:03}_0", began, generated, tool)
            lines.write(directory)
    return [(f.kind, f.step) for f in found(directory)]


def test_a_slow_tool_among_several_is_told_where_no_step_waits_for_its_last_request(tmp_path):
    # From step 2 on a tool that a third of the requests call takes four seconds of their twenty, and their steps do not wait.
    rng = random.Random(5)
    for step in range(1, 7):
        for worker in range(8):
            lines = Lines(worker, step)
            for number in range(9):
                slow = step > 1 and number % 3 == 0
                tool = rng.uniform(3.5, 4.5) if slow else rng.uniform(0.1, 0.3)
                add_request(lines, f"{step}{worker}{number:03}_0", 30.0 * step + number, rng.uniform(14, 18), tool)
            lines.write(tmp_path)
        trainer = Lines(0, step)
        trainer.add(30.0 * step + 20.0, "step", 20.0, {}, role="trainer", job="a")
        trainer.write(tmp_path / "trainer")
    (told,) = found(tmp_path)
    assert (told.kind, told.evidence["steps"]) == ("tool_wait", [2, 3, 4, 5, 6])


def test_a_call_that_is_long_as_such_calls_are_is_no_finding(tmp_path):
    assert with_tools(tmp_path / "ordinary", 14.0) == []
    assert with_tools(tmp_path / "odd", 60.0) == [("tool_wait", 4)]


def test_a_call_that_no_step_waited_for_is_no_finding(tmp_path):
    # The call made its request six seconds longer, and others of the step take twenty more.
    rng = random.Random(3)
    for step in range(1, 5):
        for worker in range(8):
            lines = Lines(worker, step)
            for number in range(16):
                began, generated = 100.0 * step, 30.0 if number == 0 else rng.uniform(8, 10)
                tool = 6.0 if (step, worker, number) == (2, 1, 5) else rng.uniform(0.2, 0.4)
                add_request(lines, f"{step}{worker}{number:03}_0", began, generated, tool)
            lines.write(tmp_path)
    assert [f.kind for f in found(tmp_path) if f.kind == "tool_wait"] == []


def test_steps_whose_tools_were_as_ever_are_not_among_those_that_waited(tmp_path):
    (slow,) = found(make(tmp_path, steps=6, turns=2, slow_tools={4, 5}, slower=dict.fromkeys(range(4), 0.05)))
    assert (slow.kind, slow.step in (4, 5)) == ("tool_wait", True)
    assert slow.evidence["share"] >= 0.4 and slow.evidence["steps"] == [4, 5]
