"""When a host counts as lost; connections are stand-ins. tests/hosts/test_host_watch.py pulls a cable."""

from __future__ import annotations

import errno
import itertools
import socket
import threading

import pytest

pytest.importorskip("ray")
from verl_mux.places.ray_nodes import RayNode
from verl_mux.trainer import host_watch
from verl_mux.trainer.host_watch import HostLost, HostWatch, hosts_of

NOBODY_COMES = 60.0
ALPHA, BETA = ("10.0.0.1", 7001), ("10.0.0.2", 7002)
HOSTS = {"the host of t0 (10.0.0.1)": ALPHA, "the host of t1 (10.0.0.2)": BETA}


def test_each_other_host_of_the_jobs_nodes_is_looked_after_once():
    cluster = [
        RayNode("10.0.0.1", 8, {"mux_t0": 1}, 7001), RayNode("10.0.0.2", 8, {"mux_t1": 1, "mux_r1": 1}, 7002),
        RayNode("10.0.0.3", 8, {"mux_r0": 1}, 7003), RayNode("10.0.0.4", 8, {"mux_somebody_elses": 1}, 7004),
    ]  # fmt: skip
    found = hosts_of(["r0", "r1", "t0", "t1"], cluster, here="10.0.0.3")
    assert found == {"the host of t0 (10.0.0.1)": ALPHA, "the host of r1 and t1 (10.0.0.2)": BETA}


def test_without_bound_nodes_nobody_is_looked_after():
    before = threading.active_count()
    HostWatch(hosts_of(["r0"], [RayNode("10.0.0.1", 8)], here="10.0.0.3"), 1.0, end=print).close()
    assert threading.active_count() == before


class Network:
    """Answers to one host's connections in turn, the last one for ever; the other host always answers. A look takes a second."""

    def __init__(self, monkeypatch, *answers: Exception | None, host=BETA):
        self.asked, self.now = 0, 0.0
        self._answers = itertools.chain(answers, itertools.repeat(answers[-1]))
        self._host, self.enough = host, threading.Event()
        monkeypatch.setattr(host_watch.socket, "create_connection", self.connect)
        monkeypatch.setattr(host_watch.time, "monotonic", lambda: self.now)

    def connect(self, address, timeout):
        if address == self._host:
            self.asked, self.now = self.asked + 1, self.now + 1.0
            if self.asked == 50:
                self.enough.set()
            if (answer := next(self._answers)) is not None:
                raise answer
        return socket.socket()


def lost(network: Network, limit_s: float) -> list[str]:
    """What the process was ended for, at once or within fifty looks."""
    ended: list[str] = []

    def end(error: HostLost) -> None:
        ended.append(str(error))
        network.enough.set()

    watch = HostWatch(HOSTS, limit_s, end, every_s=0.0)
    assert network.enough.wait(NOBODY_COMES)
    watch.close()
    return ended


@pytest.mark.parametrize("why", [TimeoutError(), OSError(errno.EHOSTUNREACH, ""), OSError(errno.ENETUNREACH, "")])
def test_a_host_that_is_cut_off_for_longer_than_a_lease_ends_the_process(monkeypatch, why):
    network = Network(monkeypatch, None, why)
    assert lost(network, 10.0) == ["the host of t1 (10.0.0.2) could not be reached for 10 s"]
    assert network.asked == 12


def test_a_shorter_cut_ends_nothing(monkeypatch):
    assert lost(Network(monkeypatch, None, *[TimeoutError()] * 9, None), 10.0) == []


@pytest.mark.parametrize("answer", [ConnectionRefusedError(errno.ECONNREFUSED, ""), OSError(errno.EMFILE, "")])
def test_a_host_that_refuses_is_there_and_what_lacks_here_says_nothing_of_it(monkeypatch, answer):
    assert lost(Network(monkeypatch, None, answer), 10.0) == []


def test_one_that_never_answered_is_not_held_against_the_job(monkeypatch):
    assert lost(Network(monkeypatch, TimeoutError()), 10.0) == []


def test_a_pause_of_the_process_itself_is_no_silence_of_others(monkeypatch):
    network = Network(monkeypatch, None, TimeoutError(), None)
    connect = network.connect

    def stopped(address, timeout):
        if network.asked == 1 and address == BETA:
            network.now += 1000.0
        return connect(address, timeout)

    monkeypatch.setattr(host_watch.socket, "create_connection", stopped)
    assert lost(network, 10.0) == []


def test_nobody_is_ended_after_the_watch_was_closed(monkeypatch):
    network, ended = Network(monkeypatch, None, TimeoutError()), []
    watch = HostWatch(HOSTS, 1000.0, ended.append, every_s=0.0)
    assert network.enough.wait(NOBODY_COMES)
    watch.close()
    assert ended == []
