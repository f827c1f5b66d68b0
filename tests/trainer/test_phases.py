"""A job's phases against a real coordinator."""

from __future__ import annotations

import json
import time

import pytest

from verl_mux.coordinator.client import connect
from verl_mux.coordinator.config import make_config
from verl_mux.coordinator.server import Coordinator
from verl_mux.profiling.event_log import EventLog
from verl_mux.trainer.phases import Phases

NODES = {"rollout": ["r0"], "train": ["t0"]}


@pytest.fixture
def coordinator():
    pools = {"rollout": {"nodes": [{"name": "r0"}]}, "train": {"nodes": [{"name": "t0"}]}}
    with Coordinator(make_config({"pools": pools})) as running:
        yield running


@pytest.fixture
def phases(coordinator, tmp_path):
    log = EventLog(tmp_path, worker=0, role="trainer", job="a")
    made = Phases(connect(coordinator.address, "a", NODES, uid="a:1"), log)
    yield made
    made.mux.close()
    log.close()


def holders(coordinator) -> list[str]:
    pools = coordinator.snapshot()["pools"].values()
    return [h["job"] for pool in pools for node in pool["nodes"].values() for h in node["holders"]]


def test_a_phase_is_in_the_log_before_its_nodes_are_anybody_elses(phases, monkeypatch):
    order = []
    release, log = phases.mux.release, phases.log.log
    monkeypatch.setattr(phases.mux, "release", lambda lease: (order.append("release"), release(lease)))
    monkeypatch.setattr(phases.log, "log", lambda event, *a, **k: (order.append(event), log(event, *a, **k)))
    with phases.during("rollout", step=1):
        pass
    assert order[-2:] == ["phase", "release"]


def test_a_job_that_fails_with_a_lease_keeps_it_while_its_processes_live(phases, coordinator):
    phases.begin("train", step=1)
    phases.fail("its driver ended with ValueError")
    deadline = time.monotonic() + 60
    while coordinator.snapshot()["jobs"]["a"]["state"] == "live" and time.monotonic() < deadline:
        time.sleep(0.01)
    # This process is the job's driver, and it lives.
    job = coordinator.snapshot()["jobs"]["a"]
    assert (holders(coordinator), job["state"]) == (["a"], "dying")
    assert "ValueError" in json.dumps(job)


def test_a_job_that_fails_with_nothing_held_leaves_as_any_other(phases, coordinator):
    with phases.during("train", step=1):
        pass
    phases.fail("its driver ended with ValueError")
    assert (holders(coordinator), coordinator.snapshot()["jobs"]["a"]["state"]) == ([], "ended")
