"""`verl-mux evict` and `verl-mux release`: confirmed by a person, and only what cannot be seen is freed."""

import os
import subprocess

import pytest

from verl_mux.coordinator import commands
from verl_mux.coordinator.bus import members
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.bus.client import LeaseLost
from verl_mux.errors import UserError

UID = "a:by-hand"
ELSEWHERE = m.Member("another-host", 4711, 1, "b")


@pytest.fixture
def carrier():
    """A process of job a on this host."""
    process = subprocess.Popen(["sleep", "600"], env={**os.environ, members.UID_VARIABLE: UID})
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def held(serve, join):
    """Job a holds r0 with a process on another host."""
    coordinator = serve(kill_grace=0.1, kill=False)
    a = join(coordinator, "a", uid=UID)
    a.members([ELSEWHERE])
    a.acquire("rollout", step=1)
    return coordinator, a


def evict(coordinator, name):
    commands.evict(name, coordinator.address, yes=True)


def release(coordinator, name):
    commands.release(name, coordinator.address, yes=True)


def holders(coordinator):
    return [held["job"] for held in coordinator.snapshot()["pools"]["rollout"]["nodes"]["r0"]["holders"]]


def test_an_evicted_job_learns_it_and_its_processes_are_killed(serve, join, carrier, eventually):
    coordinator = serve(kill_grace=0.1)
    a = join(coordinator, "a", uid=UID)
    a.acquire("rollout", step=1)
    evict(coordinator, "a")
    eventually(lambda: carrier.poll() == -9)
    with pytest.raises(LeaseLost, match="evicted by hand"):
        a.acquire("train", step=1)


def test_evicting_twice_is_evicting_once(held, capsys):
    coordinator, _ = held
    evict(coordinator, "a")
    evict(coordinator, "a")
    first, second = capsys.readouterr().out.splitlines()
    assert first == "job 'a' ends; its nodes come free when its processes are gone"
    assert second == "job 'a' is dying already: evicted by hand"


def test_an_unknown_job_is_refused_with_those_that_there_are(held):
    with pytest.raises(UserError, match="no job 'b' is known here; jobs: a"):
        evict(held[0], "b")


@pytest.mark.parametrize("name", ["a", "r0"])
def test_what_a_living_job_holds_is_not_released(held, name):
    with pytest.raises(UserError, match="job 'a' is live: end it first, with `verl-mux evict a`"):
        release(held[0], name)


@pytest.mark.parametrize("name", ["a", "r0"])
def test_what_an_ending_job_holds_is_not_released_while_its_processes_are_seen(held, carrier, name):
    coordinator, _ = held
    evict(coordinator, "a")
    with pytest.raises(UserError, match="processes of job 'a' run on this host"):
        release(coordinator, name)
    assert holders(coordinator) == ["a"]


def test_what_cannot_be_seen_is_released_by_hand_alone(serve, eventually, capsys):
    coordinator = serve()
    who = {"job": "a", "uid": UID, "client": "c"}
    take = coordinator._take
    coordinator._call(lambda: take(m.Register(**who, host="another-host", pid=1, started=1, nodes={"rollout": ["r0"]})))
    coordinator._call(lambda: take(m.LeaseRequest(**who, key="k", phase="rollout", step=1, nodes=["r0"])))
    evict(coordinator, "a")
    eventually(lambda: coordinator.snapshot()["jobs"]["a"]["waits_for"])
    assert holders(coordinator) == ["a"]
    release(coordinator, "r0")
    assert holders(coordinator) == []
    release(coordinator, "a")
    assert coordinator.snapshot()["jobs"]["a"]["state"] == "ended"
    assert capsys.readouterr().out.splitlines()[1:] == ["node 'r0' is free", "what job 'a' held is free"]


def test_a_name_of_nothing_is_not_released(held):
    with pytest.raises(UserError, match=r"no job, node or host 'r9' is known here; jobs: a; .*rollout \(r0, r1\), train \(t0\)"):
        release(held[0], "r9")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (commands.evict, "no job 'r9' is known there; jobs: a$"),
        (commands.release, "no job or node or host 'r9'.*jobs: a; nodes: r0, r1, t0"),
    ],
)
def test_nothing_is_asked_about_a_name_that_there_is_not(held, monkeypatch, command, words):
    monkeypatch.setattr("typer.confirm", lambda question: pytest.fail(question))
    with pytest.raises(UserError, match=words):
        command("r9", held[0].address)


def test_without_a_terminal_nothing_is_asked_and_nothing_done(held, monkeypatch):
    monkeypatch.setattr("sys.stdin", open(os.devnull))  # noqa: SIM115
    with pytest.raises(UserError, match="it needs --yes"):
        commands.evict("a", held[0].address)
    assert holders(held[0]) == ["a"]
