"""A host that the coordinator cannot see, since it takes itself to be on another one, and the agent of that host."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from verl_mux.coordinator import commands
from verl_mux.coordinator.bus import curve_keys as keys
from verl_mux.coordinator.bus import members
from verl_mux.errors import UserError
from verl_mux.profiling.eventlog import events

HERE = Path(__file__).parent
THERE = socket.gethostname()


@pytest.fixture
def make():
    from verl_mux.coordinator.config import make_config

    nodes = [{"name": "r0", "host": THERE, "gpu_ids": [0]}, {"name": "r1", "host": THERE, "gpu_ids": [1]}]
    return lambda **keys: make_config({"pools": {"rollout": {"nodes": nodes}}, "lease_timeout": 3, "kill_grace": 0.2, **keys})


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch):
    """The coordinator runs in this process, is told that its host has another name, and sees no process with a mark."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("VERL_MUX_DEVICE_LEDGER", str(tmp_path / "ledger"))
    monkeypatch.setattr(members, "HOST", "the-coordinators")
    monkeypatch.setattr(members, "carriers", lambda uid: [])
    monkeypatch.setattr(members.Marked, "find", lambda self, fresh: {})


@pytest.fixture
def start():
    started = []

    def one(*command, uid=None):
        environment = {**os.environ, **({members.UID_VARIABLE: uid} if uid else {})}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen([sys.executable, *command], env=environment, **pipes))
        return started[-1]

    yield one
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def host(start, tmp_path):
    """Processes of the other host."""

    class Host:
        @staticmethod
        def agent(coordinator, *options):
            command = ["-m", "verl_mux", "agent", "--coordinator", coordinator.address, "--devices", "ledger", *options]
            return start(*command, "--log-dir", str(tmp_path / "logs"))

        @staticmethod
        def driver(coordinator, job, *nodes):
            return start(str(HERE / "job.py"), "driver", coordinator.address, job, *nodes, uid=f"uid-of-{job}")

        @staticmethod
        def worker(job, on):
            return start(str(HERE / "job.py"), "worker", on, uid=f"uid-of-{job}")

    return Host


def holds(process):
    assert process.stdout.readline().startswith("holds ")
    return process


def node(coordinator, name="r1"):
    return coordinator.snapshot()["pools"]["rollout"]["nodes"][name]


def state(coordinator):
    return coordinator.snapshot()["hosts"].get(THERE, {}).get("agent")


def mapped(tmp_path):
    """Jobs in the order in which they began or ceased to hold something on r1, as agents logged it."""
    lines = [json.loads(line) for file in (tmp_path / "logs").rglob("*.jsonl") for line in file.read_text().splitlines()]
    lines.sort(key=lambda line: line["timestamp"])
    found = [line["extra"] for line in lines if line["event"] == events.DEVICE_MEMORY]
    return [(about["job"], about["bytes"]) for about in found if about["node"] == "r1"]


def test_what_a_killed_driver_leaves_is_ended_by_the_agent_and_its_node_goes_on(serve, host, eventually, tmp_path):
    coordinator = serve()
    host.agent(coordinator)
    eventually(lambda: state(coordinator) == "heard")
    driver = holds(host.driver(coordinator, "a", "r0", "r1"))
    left = holds(host.worker("a", "r1"))
    eventually(lambda: coordinator.snapshot()["hosts"][THERE]["device_bytes"] == 2000)
    waiting = host.driver(coordinator, "b", "r1")
    eventually(lambda: node(coordinator)["queue"])
    driver.kill()
    driver.wait()
    holds(waiting)
    assert left.wait(60) == -9
    eventually(lambda: mapped(tmp_path)[-1:] == [("b", 1000)])
    assert mapped(tmp_path) == [("a", 1000), ("a", 0), ("b", 1000)]


def test_a_host_whose_agent_is_gone_is_fenced_until_one_found_it_empty(serve, host, eventually, tmp_path):
    coordinator = serve()
    agent = host.agent(coordinator)
    eventually(lambda: state(coordinator) == "heard")
    holds(host.driver(coordinator, "a", "r1"))
    left = holds(host.worker("a", "r1"))
    agent.kill()
    eventually(lambda: node(coordinator)["fenced"] == f"the agent of host {THERE} is not heard")
    commands.evict("a", coordinator.address, yes=True)
    eventually(lambda: coordinator.snapshot()["jobs"]["a"]["state"] == "ended")
    waiting = host.driver(coordinator, "c", "r1")
    eventually(lambda: [request["held_back"] for request in node(coordinator)["queue"]] == ["fenced"])
    assert left.poll() is None
    host.agent(coordinator)
    holds(waiting)
    assert left.wait(60) == -9 and node(coordinator)["fenced"] is None


def test_a_lost_host_is_given_on_by_hand_alone_and_not_while_its_agent_is_heard(serve, host, eventually, capsys):
    coordinator = serve()
    agent = host.agent(coordinator)
    eventually(lambda: state(coordinator) == "heard")
    with pytest.raises(UserError, match="is looked at by its agent"):
        commands.release(THERE, coordinator.address, yes=True)
    agent.kill()
    eventually(lambda: state(coordinator) == "gone")
    commands.release(THERE, coordinator.address, yes=True)
    assert node(coordinator)["fenced"] is None and coordinator.snapshot()["hosts"] == {}


def test_a_lost_host_is_still_fenced_after_a_restart_of_the_coordinator(serve, host, eventually, tmp_path):
    coordinator = serve(tmp_path / "journal")
    agent = host.agent(coordinator)
    eventually(lambda: state(coordinator) == "heard")
    agent.kill()
    eventually(lambda: state(coordinator) == "gone")
    coordinator.stop()
    again = serve(tmp_path / "journal", bind=coordinator.address)
    assert node(again)["fenced"] and state(again) == "gone"
    host.agent(again)
    eventually(lambda: state(again) == "heard")
    assert node(again)["fenced"] is None


def test_an_agent_with_the_key_of_another_role_ends_with_one_line(serve, host, tmp_path):
    folder = tmp_path / "keys"
    keys.make(folder)
    coordinator = serve(key_directory=folder)
    (folder / "agent.key_secret").unlink()
    agent = host.agent(coordinator, "--keys", str(folder))
    assert agent.wait(60) == 2


def test_an_agent_that_a_job_started_takes_the_jobs_mark_off(serve, start, eventually):
    coordinator = serve()
    command = ["-m", "verl_mux", "agent", "--coordinator", coordinator.address, "--devices", "none"]
    agent = start(*command, uid="uid-of-a")
    eventually(lambda: state(coordinator) == "heard")
    assert members.mark_of(agent.pid) == ""
