"""What an agent sees on its own host, without a coordinator."""

import os
import subprocess
import sys
import time

import pytest

from verl_mux.agent.agent import Agent, Ledger, MappedLog, Marked, open_devices
from verl_mux.coordinator.bus import members
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.bus.messages import Holder, NodeHere
from verl_mux.errors import UserError
from verl_mux.platform.host_memory import process_bytes
from verl_mux.profiling.eventlog.log import NULL_LOG
from verl_mux_cpu import device_ledger

UID = "uid-of-looking"


@pytest.fixture
def carrier():
    """A process of the job, started with its mark."""
    process = subprocess.Popen(["sleep", "600"], env={**os.environ, members.UID_VARIABLE: UID})
    yield process
    process.kill()
    process.wait()


def test_a_marked_process_is_found_until_it_is_gone(carrier):
    marked = Marked()
    member = members.member_of(carrier.pid)
    assert marked.find(fresh=False)[UID] == [member] == marked.find(fresh=False)[UID]
    carrier.kill()
    carrier.wait()
    assert UID not in marked.find(fresh=False)


def test_a_look_tells_of_the_marked_and_of_those_that_were_named(carrier):
    unmarked = members.this_process()
    found = {look.uid: look.alive for look in Marked().look({UID: [unmarked], "another's": []})}
    assert set(found[UID]) == {unmarked, members.member_of(carrier.pid)} and found["another's"] == []
    of_another_start = m.Member(unmarked.host, unmarked.pid, unmarked.started - 1, unmarked.boot, unmarked.space)
    assert Marked().look({"another's": [of_another_start]})[0].alive == []


@pytest.fixture
def ledger(tmp_path, monkeypatch):
    monkeypatch.setenv(device_ledger.DIRECTORY_VARIABLE, str(tmp_path))
    return tmp_path


def test_the_ledger_counts_for_the_only_node_of_the_host_unless_a_node_is_named(ledger, monkeypatch):
    device_ledger.hold({"weights": 5, "kv": 6})
    assert Ledger().held({"r0": NodeHere()}).by_pid == {os.getpid(): {"r0": 11}}
    assert Ledger().held({"r0": NodeHere(), "r1": NodeHere()}).by_pid == {os.getpid(): {"": 11}}
    monkeypatch.setenv(device_ledger.NODE_VARIABLE, "r1")
    device_ledger.hold({"weights": 5})
    assert Ledger().held({"r0": NodeHere(), "r1": NodeHere()}).by_pid == {os.getpid(): {"r1": 5}}


def test_the_account_of_a_dead_process_counts_no_more_and_is_removed(ledger):
    script = "from verl_mux_cpu import device_ledger; device_ledger.hold({'weights': 5})"
    subprocess.run([sys.executable, "-c", script], check=True)
    assert len(list(ledger.iterdir())) == 1
    assert Ledger().held({}).by_pid == {}
    assert list(ledger.iterdir()) == []


def test_an_unknown_source_of_device_memory_is_refused_with_those_allowed():
    with pytest.raises(UserError, match="--devices is 'x'; allowed: auto, nvml, ledger, none"):
        open_devices("x")


def test_every_change_of_what_a_process_holds_is_a_line():
    lines = []

    class Log:
        def log(self, event, extra, timestamp):
            lines.append((event, timestamp, extra["job"], extra["before"], extra["bytes"], extra["leased_to"]))

    log = MappedLog(Log())
    host = m.HostName("h", [], "b", "1")

    def seen(at, **held):
        holders = [Holder(UID, m.Member("h", 7, 1, "b"), held)] if held else []
        report = m.AgentReport(agent="g", number=at, host=host, source="ledger", holders=holders)
        answer = m.AgentAnswer(number=at, epoch="e", again_s=1, nodes={"r0": NodeHere(job="a", token=3)}, jobs={UID: "a"})
        log.log(report, answer, float(at))

    for at, held in enumerate([{"r0": 0}, {"r0": 5}, {"r0": 5}, {"r0": 2}, {}]):
        seen(at, **held)
    assert lines == [
        ("device_memory", 1.0, "a", 0, 5, "a"),
        ("device_memory", 3.0, "a", 5, 2, "a"),
        ("device_memory", 4.0, "a", 2, 0, "a"),
    ]


def test_a_report_tells_the_host_memory_of_marked_processes(carrier):
    agent = Agent("tcp://127.0.0.1:9", None, open_devices("none"), NULL_LOG)
    member, deadline = members.member_of(carrier.pid), time.monotonic() + 60

    def told():
        (holder,) = [holder for holder in agent.look().holders if holder.member == member]
        return holder.host

    while not told():  # a look does not wait for it
        assert time.monotonic() < deadline
    assert told() == process_bytes(carrier.pid) and told()["private"] > 0


def test_a_host_with_an_address_for_every_service_of_its_cluster_can_report(monkeypatch):
    """As kube-proxy in its IPVS mode makes them."""
    many = [f"10.96.{at // 250}.{at % 250}" for at in range(5000)]
    monkeypatch.setattr(members, "names_of_this_host", lambda: ["host", *many])
    report = Agent("tcp://127.0.0.1:1", None, Ledger(), NULL_LOG).look()
    assert m.decode(m.encode(report)) == report and len(report.host.addresses) > 1000
