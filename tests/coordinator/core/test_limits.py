"""What one job, or all together, may put into the coordinator's memory."""

import pytest

from tests.coordinator.driver import SIDES, Driver, config
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core.state import Machine


@pytest.fixture
def driver():
    return Driver(Machine(config()))


def test_requests_of_a_job(driver, monkeypatch):
    monkeypatch.setattr(m, "REQUESTS_OF_A_JOB", 2)
    driver.register("other")
    driver.ask("other", "rollout", 1, ["r0"])
    driver.register("a")
    for number in range(2):
        assert not any(isinstance(sent, m.Refused) for sent in driver.ask("a", "rollout", 1, ["r0"], key=str(number)))
    assert "has 2 requests that wait" in driver.ask("a", "rollout", 1, ["r0"], key="2")[0].reason


def test_jobs_and_their_clients(driver, monkeypatch):
    monkeypatch.setattr(m, "JOBS", 1)
    monkeypatch.setattr(m, "CLIENTS_OF_A_JOB", 1)
    driver.register("a")
    assert "1 jobs are on record; at most 1" in driver.register("b")[0].reason
    where = {"host": "here", "pid": 7, "started": 1, "nodes": SIDES}
    (refused,) = driver.do(m.Register(job="a", uid="a:1", client="another", **where))
    assert "has 1 clients; at most 1" in refused.reason


def test_ended_jobs_are_forgotten_oldest_first(driver, monkeypatch):
    monkeypatch.setattr(m, "ENDED_JOBS_REMEMBERED", 2)
    for job in "abcde":
        driver.register(job)
        driver.ask(job, "rollout", 1, ["r0"])
        driver.do(m.Deregister(**driver.who(job)))
    assert len(driver.machine.state.jobs) <= 3 and "e" in driver.machine.state.jobs
    assert driver.machine.heard.keys() <= driver.machine.state.jobs.keys()


def test_memory_on_made_up_nodes_and_under_ever_new_tags(driver, monkeypatch):
    monkeypatch.setattr(m, "TAGS_ON_A_NODE", 2)
    driver.register("a")
    (refused,) = driver.do(m.MemoryReport(**driver.who("a"), node="nowhere", tags={"x": 1}))
    assert refused.reason == "job 'a' reports memory on 'nowhere'; allowed: its nodes r0, r1, t0"
    driver.do(m.MemoryReport(**driver.who("a"), node="r0", tags={"x": 1, "y": 1}))
    (refused,) = driver.do(m.MemoryReport(**driver.who("a"), node="r0", tags={"z": 1}))
    assert "at most 2" in refused.reason
    assert driver.machine.state.peaks == {"r0": {"init": 2}}
