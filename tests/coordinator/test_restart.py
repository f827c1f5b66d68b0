"""The coordinator ends and comes back while jobs hold leases and wait; the jobs notice nothing but the time."""

import concurrent.futures
import os
import signal
import socket
import subprocess
import sys

import pytest

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.server import Coordinator

NODES = {"rollout": ["r0"], "train": ["t0"]}


@pytest.fixture
def pool():
    with concurrent.futures.ThreadPoolExecutor() as executor:
        yield executor


def holders(coordinator):
    return [held["job"] for held in coordinator.snapshot()["pools"]["rollout"]["nodes"]["r0"]["holders"]]


@pytest.mark.parametrize("remembers", [True, False], ids=["with a journal", "with no memory of the jobs"])
def test_leases_and_queues_survive_a_restart(serve, join, pool, eventually, tmp_path, remembers):
    journal = tmp_path / "journal" if remembers else None
    coordinator = serve(journal, lease_timeout=2.5)
    a, b = join(coordinator, "a"), join(coordinator, "b")
    lease = a.acquire("rollout", step=1)
    waiting = pool.submit(b.acquire, "rollout", step=1)
    eventually(lambda: a.contended("rollout"))
    coordinator.stop()
    again = serve(journal, bind=coordinator.address, lease_timeout=2.5)
    eventually(lambda: holders(again) == ["a"] and again.snapshot()["jobs"].get("b", {}).get("waiting"))
    assert not waiting.done()
    a.release(lease)
    granted = waiting.result(60)
    assert granted.token > lease.token
    b.release(granted)
    assert again.snapshot()["jobs"]["a"]["state"] == "live"


def test_a_release_that_fell_between_two_coordinators_is_repeated(serve, join, pool, eventually, tmp_path):
    coordinator = serve(tmp_path / "journal")
    a, b = join(coordinator, "a"), join(coordinator, "b")
    lease = a.acquire("rollout", step=1)
    coordinator.stop()
    releasing = pool.submit(a.release, lease)
    waiting = pool.submit(b.acquire, "rollout", step=1)
    serve(tmp_path / "journal", bind=coordinator.address)
    releasing.result(60)
    assert waiting.result(60).token > lease.token


def test_a_name_is_still_taken_after_a_restart(serve, join, tmp_path):
    coordinator = serve(tmp_path / "journal")
    a = join(coordinator, "a")
    with a.phase("rollout", step=1):
        coordinator.stop()
        again = serve(tmp_path / "journal", bind=coordinator.address)
        with pytest.raises(ValueError, match="a job named 'a' is running"):
            join(again, "a")


@pytest.fixture
def command(tmp_path):
    """Runs `verl-mux coordinator` as a process of its own, on a port of its own; restarted on the same."""
    (tmp_path / "mux.yaml").write_text("pools: {rollout: {nodes: [{name: r0}]}, train: {nodes: [{name: t0}]}}\n")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{unused.getsockname()[1]}"
    arguments = ["--config", "mux.yaml", "--bind", address, "--journal", "j.sqlite", "--log-dir", "log"]
    processes = []

    def start():
        command = [sys.executable, "-m", "verl_mux", "coordinator", *arguments]
        processes.append(subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True))
        assert address in processes[-1].stderr.readline()
        return processes[-1]

    yield start, address
    for process in processes:
        process.kill()
        process.wait()
        process.stderr.close()


def test_a_coordinator_that_was_killed_comes_back_with_its_leases(command, join, pool, tmp_path):
    start, address = command
    first = start()
    a, b = join(address, "a"), join(address, "b")
    lease = a.acquire("rollout", step=1)
    waiting = pool.submit(b.acquire, "rollout", step=1)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    second = start()
    a.release(lease)
    assert waiting.result(60).token > lease.token
    second.send_signal(signal.SIGINT)
    assert second.wait(60) == 0
    assert list((tmp_path / "log").rglob("*.jsonl"))


def test_a_client_says_each_thing_once_after_an_outage(serve, join, eventually, tmp_path):
    """Hundreds of reports were made while nobody was there."""
    coordinator = serve(tmp_path / "journal")
    mux = join(coordinator, "a")
    coordinator.stop()
    for number in range(300):
        mux.report_step(1, {"reward": float(number)})
        mux.note(str(number))
    heard = []
    again = Coordinator(coordinator.config, tmp_path / "journal", coordinator.address)
    answer = again._answer
    again._answer = lambda identity, role, message: heard.append(message) or answer(identity, role, message)
    try:
        again.start()
        eventually(lambda: again.snapshot()["jobs"]["a"]["metrics"] == {"reward": 299.0})
        assert len(heard) < 20 and sum(isinstance(message, m.StepReport) for message in heard) == 1
        mux.close()
    finally:
        again.stop()
