"""A job's phases against a real coordinator."""

from __future__ import annotations

import concurrent.futures
import json
import threading
import time

import pytest

from tests.trainer.fencing import NODES, Fencing
from verl_mux.coordinator.bus.client import LeaseLost
from verl_mux.coordinator.bus.connect import connect
from verl_mux.coordinator.config import make_config
from verl_mux.coordinator.server import Coordinator
from verl_mux.profiling.eventlog.log import NULL_LOG, EventLog
from verl_mux.trainer.phases import Phases


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


@pytest.fixture
def pool():
    with concurrent.futures.ThreadPoolExecutor() as executor:
        yield executor


def holders(coordinator) -> list[str]:
    pools = coordinator.snapshot()["pools"].values()
    return [h["job"] for pool in pools for node in pool["nodes"].values() for h in node["holders"]]


def test_a_phase_is_in_the_log_before_its_nodes_are_anybody_elses(phases, monkeypatch):
    order = []
    release, log = phases.mux.release, phases.log.log
    monkeypatch.setattr(phases.mux, "release", lambda lease: (order.append("release"), release(lease)))
    monkeypatch.setattr(phases.log, "log", lambda event, *a, **k: (order.append(event), log(event, *a, **k)))
    phases.begin("rollout", step=1)
    phases.end()
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
    phases.begin("train", step=1)
    phases.end()
    phases.fail("its driver ended with ValueError")
    job = coordinator.snapshot()["jobs"]["a"]
    assert (holders(coordinator), job["state"], job["reason"]) == ([], "ended", "its driver ended with ValueError")


@pytest.fixture
def fencing():
    made = Phases(Fencing(), NULL_LOG)
    made.begin("train", step=1)
    return made


def test_a_fenced_lease_is_put_to_sleep_between_two_uses_and_taken_up_before_the_next(fencing, pool):
    order, using, may_end = [], threading.Event(), threading.Event()
    fencing.guard(lambda lease: order.append("sleep") or asleep.set() or (lambda: order.append("wake")))
    asleep = threading.Event()

    def use(name, wait=False):
        with fencing.part(name, 1):
            order.append(name)
            using.set()
            assert not wait or may_end.wait(60)

    first = pool.submit(use, "first", wait=True)
    assert using.wait(60)
    fencing.mux.usable.clear()
    fence = pool.submit(fencing.mux.fence)
    assert order == ["first"]
    may_end.set()
    first.result(60)
    assert asleep.wait(60)
    second = pool.submit(use, "second")
    ending = pool.submit(fencing.end)
    fencing.mux.usable.set()
    for done in (fence, second, ending):
        done.result(60)
    assert order == ["first", "sleep", "wake", "second"]


def test_a_lease_that_does_not_come_back_is_not_taken_up(fencing):
    order = []
    fencing.guard(lambda lease: order.append("sleep") or (lambda: order.append("wake")))
    fencing.mux.failed = "evicted"
    fencing.mux.fence()
    assert order == ["sleep"]
    with pytest.raises(LeaseLost), fencing.part("update_actor", 1):
        pass


def test_a_job_that_cannot_take_its_memory_up_again_fails(fencing):
    def go_on():
        raise ValueError("no memory")

    fencing.guard(lambda lease: go_on)
    fencing.mux.fence()
    assert fencing.mux.failed == "it could not take its memory up again"


def test_without_a_lease_there_is_nothing_to_put_to_sleep(fencing):
    fencing.end()
    fencing.guard(pytest.fail)
    fencing.mux.fence()


def test_a_use_within_a_use_does_not_wait(fencing):
    with fencing.using():
        fencing.mux.usable.clear()
        with fencing.using():
            pass
    fencing.mux.usable.set()
