"""Logs as another program writes them from docs/event_log.md, with and without `stay`: the right kind, place and step."""

import pytest

from tests.profiling.documented import Documented
from tests.profiling.made_logs import read_run
from verl_mux.profiling.report.findings.finding import Finding
from verl_mux.profiling.report.measures.analysis import Analysis
from verl_mux.profiling.report.output.summary import find_all

STEPS = range(1, 7)
SLOW_ALWAYS = {(2, step): 2.5 for step in STEPS}
# What was made -> kind, and what its one finding says.
ONE = {
    "a slow replica": ({"slow": SLOW_ALWAYS}, {"kind": "straggler", "replica": 2, "steps": [*STEPS]}),
    "a slow node": (
        {"slow": {(r, s): 2.0 for r in (2, 3) for s in STEPS}}, {"kind": "straggler", "node": "r1", "replicas": [2, 3]},
    ),
    "a replica that stood still": ({"stall": (4, (0,), 6.0, 150.0)}, {"kind": "silent_gap", "replica": 0, "step": 4}),
    "all replicas that stood still": (
        {"stall": (4, (0, 1, 2, 3), 6.0, 60.0)}, {"kind": "silent_gap", "step": 4, "replicas": [0, 1, 2, 3]},
    ),
    "all engines slow in one step": ({"slow": {(r, 3): 2.5 for r in range(4)}}, {"kind": "slow_engines", "step": 3}),
    "a tool that few requests call": (
        {"tool": {(3, 5): ("browser", 90.0)}}, {"kind": "tool_wait", "step": 3, "tool": "browser", "prompt": "030005ab"},
    ),
    "a call that hangs, of a tool that others call too": (
        {"tools": 0.5, "tool": {(3, 5): ("search", 90.0)}},
        {"kind": "tool_wait", "step": 3, "tool": "search", "prompt": "030005ab"},
    ),
    "a tool slow in two steps": (
        {"tools": 0.5, "slow_tool": {(s, "search"): 12 for s in (3, 4)}},
        {"kind": "tool_wait", "tool": "search", "steps": [3, 4]},
    ),
    "a reward that hangs": ({"rewards": {(4, 17): 80.0}}, {"kind": "reward_wait", "step": 4, "request_id": "040004ab_1"}),
    "rewards of one worker": ({"rewards": {("worker", 3): 15.0}}, {"kind": "reward_wait", "worker": 3}),
    "a queue": ({"queue": {(s, 1): 20.0 for s in STEPS}}, {"kind": "queueing", "replica": 1, "steps": [*STEPS]}),
    "a replica that is given more": ({"share": {2: 4.0}}, {"kind": "uneven_load", "replica": 2}),
    "one long answer": ({"long": {(4, 9): 200.0}}, {"kind": "long_tail", "step": 4, "request_id": "040002ab_1"}),
    "a prompt's long answers": ({"long": {(4, at): 150.0 + at for at in range(8, 12)}}, {"kind": "long_tail", "step": 4}),
    "a turn that sat in the engine": ({"engine": {(4, 9): 100.0}}, {"kind": "slow_turn", "step": 4, "replica": 1}),
    "preparing": ({"prepare": {4: 8.0, 5: 8.0}}, {"kind": "preprocessing", "steps": [4, 5]}),
    "what follows the answer": ({"finalize": {4: 10.0}}, {"kind": "slow_part", "step": 4}),
    "a worker that did nothing": ({"unexplained": {(4, "worker", 3): 40.0}}, {"kind": "slow_part", "step": 4, "worker": 3}),
    "a request that no event explains": ({"unexplained": {(4, 7): 90.0}}, {"kind": "slow_request", "step": 4}),
    "a slow sync": ({"trainer_at": {(4, "sync"): 25.0}}, {"kind": "slow_phase", "step": 4, "event": "sync"}),
    "an update that stays slow": (
        {"trainer_at": {(s, "update_actor"): 36.0 for s in (4, 5, 6)}},
        {"kind": "slow_phase", "event": "update_actor", "steps": [4, 5, 6]},
    ),
    "the way to a replica": ({"way": {2: 6.0}}, {"kind": "slow_part", "replica": 2, "part": "the way to an engine"}),
    "requests given up": ({"cancelled": {3: 0.4}}, {"kind": "failed_requests", "step": 3}),
    "requests thrown out, by their stays alone": ({"retracted": {(3, 1): 2}}, {"kind": "kv_starvation", "step": 3, "replica": 1}),
    "a slow rank": (
        {"ranks": 8, "rank_slower": {(5, "update_actor"): 2.0}}, {"kind": "slow_phase", "event": "update_actor", "worker": 5},
    ),
}  # fmt: skip
HEALTHY = {
    "plain": {},
    "cut off and carried over": {"carried": 0.25},
    "cut off, with tools": {"carried": 0.25, "tools": 0.3},
    "a wide spread": {"sigma": 0.6},
    "few requests and steps": {"prompts": 8, "steps": 2},
    "several ranks": {"ranks": 4},
}


def reported(folder) -> list[Finding]:
    return find_all(Analysis(read_run(folder)))


def said(finding: Finding, key: str):
    return getattr(finding, key) if hasattr(finding, key) else finding.evidence[key]


@pytest.mark.parametrize("name", ONE)
def test_a_fault_is_the_one_finding_with_its_place(tmp_path, name):
    made, expected = ONE[name]
    (finding,) = reported(Documented(**made).write(tmp_path))
    assert {key: said(finding, key) for key in expected} == expected


@pytest.mark.parametrize("name", ["a slow replica", "a replica that stood still", "a tool that few requests call"])
def test_a_log_with_stays_says_the_same(tmp_path, name):
    made, expected = ONE[name]
    (finding,) = reported(Documented(**made, stay=True).write(tmp_path))
    assert {key: said(finding, key) for key in expected} == expected


@pytest.mark.parametrize("stay", [False, True])
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_log_has_no_findings(tmp_path, name, stay):
    assert [(it.kind, it.text) for it in reported(Documented(**HEALTHY[name], stay=stay).write(tmp_path))] == []


def test_a_replica_that_is_slow_from_a_step_on_does_not_stand_still(tmp_path):
    (finding,) = reported(Documented(slow={(2, step): 2.0 for step in (4, 5, 6)}).write(tmp_path))
    assert (finding.kind, finding.replica, finding.evidence["steps"]) == ("straggler", 2, [4, 5, 6])


def test_workers_whose_requests_were_cut_off_are_no_stragglers(tmp_path):
    log = Documented(carried=0.25, tools=0.3, sigma=0.6, without=("replica", "node", "engine_generate"))
    assert [it.kind for it in reported(log.write(tmp_path))] == []


def test_a_long_answer_among_few_is_none(tmp_path):
    log = Documented(seed=247, stay=True, steps=1, workers=4, replicas=8, prompts=4, samples=8, sigma=0.5, reward=2.0)
    assert [it.kind for it in reported(log.write(tmp_path))] == []
