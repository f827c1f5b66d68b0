"""Two hosts on one machine: each a namespace of its own for process ids, host name and mounts, with an agent. That takes root."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.agent.test_another_host import holds, mapped, node
from verl_mux.coordinator.bus import members
from verl_mux.coordinator.bus.members import UID_VARIABLE
from verl_mux.coordinator.config import make_config

UNSHARE = ["unshare", "--pid", "--uts", "--mount", "--fork", "--kill-child", "--mount-proc"]
PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
JOB = str(Path(__file__).with_name("job.py"))


@pytest.fixture
def make():
    nodes = [{"name": "r0", "host": "hosta"}, {"name": "r1", "host": "hostb"}]
    return lambda **keys: make_config({"pools": {"rollout": {"nodes": nodes}}, "lease_timeout": 3, "kill_grace": 0.2, **keys})


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts a Python on a host; gives the process that enters, whose child is the one on the host."""
    if os.geteuid() != 0 or subprocess.run([*UNSHARE, "true"], capture_output=True).returncode != 0:
        pytest.skip("hosts on one machine are namespaces; making these takes root, and a machine that lets it")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "ledger").mkdir()
    monkeypatch.setenv("VERL_MUX_DEVICE_LEDGER", str(tmp_path / "ledger"))
    # The coordinator runs in this process, from which all namespaces can be seen into: that of another machine cannot.
    monkeypatch.setattr(members, "carriers", lambda uid: [])
    monkeypatch.setattr(members.Marked, "find", lambda self, fresh: {})
    hosts = {}
    for name in ("hosta", "hostb"):
        script = f"hostname {name} && echo up && exec sleep 86400"
        hosts[name] = subprocess.Popen([*UNSHARE, "sh", "-c", script], stdout=subprocess.PIPE, text=True)
        assert hosts[name].stdout.readline() == "up\n"
    started = list(hosts.values())

    def on(host, *command, uid=None):
        first = psutil.Process(hosts[host].pid).children()[0].pid
        environment = {**os.environ, **({UID_VARIABLE: uid} if uid else {})}
        enter = ["nsenter", "-t", str(first), "--pid", "--uts", "--mount", "--", sys.executable]
        started.append(subprocess.Popen([*enter, *command], env=environment, **PIPES))
        return started[-1]

    yield on
    for host in hosts.values():
        host.kill()  # and with it everything inside
    for process in started:
        process.wait()


def test_what_a_killed_driver_leaves_on_another_host_is_ended_and_its_node_goes_on(serve, start, eventually, tmp_path):
    coordinator = serve()
    agent = ["-m", "verl_mux", "agent", "--coordinator", coordinator.address, "--devices", "ledger"]
    for host in ("hosta", "hostb"):
        start(host, *agent, "--log-dir", str(tmp_path / "logs"))
    eventually(lambda: [host["agent"] for host in coordinator.snapshot()["hosts"].values()] == ["heard", "heard"])
    driver = holds(start("hosta", JOB, "driver", coordinator.address, "a", "r1", uid="uid-across-a"))
    left = holds(start("hostb", JOB, "worker", "r1", uid="uid-across-a"))
    eventually(lambda: coordinator.snapshot()["hosts"]["hostb"]["device_bytes"] == 1000)
    waiting = start("hostb", JOB, "driver", coordinator.address, "b", "r1", uid="uid-across-b")
    eventually(lambda: node(coordinator)["queue"])
    for process in psutil.Process(driver.pid).children(recursive=True):
        process.kill()
    holds(waiting)
    assert left.wait(60) != 0
    assert [held["job"] for held in node(coordinator)["holders"]] == ["b"]
    eventually(lambda: mapped(tmp_path)[-1:] == [("b", 1000)])
    # Its driver's and its worker's; all of it is gone before b's comes.
    assert mapped(tmp_path) == [("a", 1000), ("a", 1000), ("a", 0), ("a", 0), ("b", 1000)]
