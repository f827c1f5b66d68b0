"""Every refusal, in the words that the user reads."""

import pytest

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core.records import DriverDied, Input
from verl_mux.coordinator.core.state import Machine
from verl_mux.places.place import Place

SIDES = {"rollout": ["r0"], "train": ["t0"]}
HERE = {"host": "here", "pid": 7, "started": 1}
THERE_ARE = "pools and their nodes: rollout (r0, r1), train (t0)"


def register(machine, job="a", uid=None, **keys):
    who = {"job": job, "uid": uid or f"{job}:1", "client": f"{job}{uid}"}
    out = machine.handle(Input(1.0, m.Register(**who, **HERE, **{"nodes": SIDES, **keys})))
    return next(step.message for step in out if hasattr(step, "message"))


@pytest.fixture
def machine(make):
    return Machine(make())


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (
            {"nodes": {"rollout": ["gpu9"]}},
            f"job 'a' asks for rollout on 'gpu9', which is no pool or node here; {THERE_ARE}",
        ),
        ({"nodes": {"rollout": []}}, f"job 'a' names no node for rollout; {THERE_ARE}"),
        ({"nodes": {"reward": ["r0"]}}, "job 'a' names nodes for ['reward']; allowed sides: rollout, train"),
        ({"nodes": {}}, "job 'a' names nodes for []; allowed sides: rollout, train"),
        (
            {"gpus": {"rollout": 16}},
            "job 'a' asks for 16 GPUs on node 'r0', which has 8 (pool 'rollout' has 16 on 2 nodes)",
        ),
        ({"gpus": {"t0": 5}}, "job 'a' asks for 5 GPUs on node 't0', which has 4 (pool 'train' has 4 on 1 nodes)"),
        ({"gpus": {"r1": 1}}, "job 'a' asks for 1 GPUs on 'r1'; allowed there: r0, rollout, t0, train"),
    ],
)
def test_a_registration_is_refused_with_what_was_given_and_what_there_is(machine, asked, words):
    assert register(machine, **asked) == m.Refused(about="register", reason=words)
    assert machine.state.jobs == {}


def test_a_pool_stands_for_all_its_nodes_and_both_sides_may_share_nodes(machine):
    answer = register(machine, nodes={"rollout": ["rollout"], "train": ["r0", "r0"]}, gpus={"rollout": 8})
    assert answer.nodes == {"rollout": ["r0", "r1"], "train": ["r0"]}
    assert answer.places == {"r0": Place(cpus=[0]), "r1": Place()}


def test_a_second_live_job_of_one_name_is_refused(machine):
    register(machine)
    answer = register(machine, uid="a:2")
    assert answer.reason == "a job named 'a' is running (pid 7 on here); job names are unique"
    assert not answer.retry


def test_the_name_of_a_dying_job_is_refused_for_now(machine):
    register(machine)
    machine.handle(Input(2.0, DriverDied(job="a", uid="a:1")))
    answer = register(machine, uid="a:2")
    assert "is ending, but its processes are not all gone" in answer.reason
    assert answer.retry


def test_a_job_that_was_given_up_cannot_come_back(machine):
    register(machine)
    machine.handle(Input(2.0, DriverDied(job="a", uid="a:1")))
    assert register(machine, again=True).reason == "job 'a' was given up: its driver process died"


def test_a_name_that_names_folders_is_refused(machine):
    assert register(machine, job="a/b").reason.startswith("job 'a/b' has a slash in its name")
    assert machine.state.jobs == {}


def test_one_uid_cannot_stand_for_two_jobs(machine):
    register(machine, uid="same")
    refused = register(machine, job="b", uid="same")
    assert refused.reason == "job 'b' carries another job's uid; every start needs its own VERL_MUX_JOB_UID"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"phase": "sync"}, "phase 'sync' is not known; allowed: init, rollout, train"),
        ({"step": -1}, "phase 'rollout' with step -1; steps count from 1, and 0 is init and what comes before"),
        ({"phase": "init"}, "phase 'init' with step 1; steps count from 1, and 0 is init and what comes before"),
        ({"nodes": ["r1"]}, "job 'a' asks for nodes ['r1']; it registered ['r0', 't0']"),
        ({"nodes": []}, "job 'a' asks for nodes []; it registered ['r0', 't0']"),
        (
            {"nodes": ["t0", "r0"]},
            "job 'a' asks for rollout on 't0', which it holds under token 1 (train, step 1): release that first",
        ),
    ],
)
def test_a_request_that_can_never_be_granted_is_refused(machine, asked, words):
    who = {"job": "a", "uid": "a:1", "client": "aNone"}
    register(machine)
    machine.handle(Input(2.0, m.LeaseRequest(**who, key="held", phase="train", step=1, nodes=["t0"])))
    asked = {"phase": "rollout", "step": 1, "nodes": ["r0"], **asked}
    out = machine.handle(Input(3.0, m.LeaseRequest(**who, key="k", **asked)))
    assert out[0].message == m.Refused(about="k", reason=words)
    assert machine.state.requests == []
