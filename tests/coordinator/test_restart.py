"""Coordinators that end and come back, or lose their memory, the room for it, or the time of day, while jobs hold leases."""

import os
import resource
import signal
import socket
import subprocess
import sys
import time

import pytest
import yaml

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.commands import fetch_status
from verl_mux.coordinator.config import make_config
from verl_mux.coordinator.journal import make_empty
from verl_mux.coordinator.server import Coordinator

KEYS = {"pools": {"rollout": {"nodes": [{"name": "r0"}]}, "train": {"nodes": [{"name": "t0"}]}}, "lease_timeout": 1.5}


def node(coordinator):
    return coordinator.snapshot()["pools"]["rollout"]["nodes"]["r0"]


def holders(coordinator):
    return [held["job"] for held in node(coordinator)["holders"]]


@pytest.fixture
def serve_apart(tmp_path):
    """Starts `verl-mux coordinator` as a process of its own, at an address of its own; gives the process and the address."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{unused.getsockname()[1]}"
    started = []

    def start(*options, **keys):
        (tmp_path / "mux.yaml").write_text(yaml.safe_dump({**KEYS, **keys}))
        command = [sys.executable, "-m", "verl_mux", "coordinator", "--config", "mux.yaml", "--bind", address, *options]
        started.append(subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True))
        assert address in started[-1].stderr.readline()
        return started[-1], address

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("remembers", [True, False], ids=["with a journal", "with no memory of the jobs"])
def test_leases_and_queues_survive_a_restart(serve, join, pool, eventually, tmp_path, remembers):
    journal = tmp_path / "journal" if remembers else None
    coordinator = serve(journal, lease_timeout=2.5)
    a, b = join(coordinator, "a"), join(coordinator, "b")
    lease = a.acquire("rollout", step=1)
    waiting = pool.submit(b.acquire, "rollout", step=1)
    assert lease.wanted.wait(60)
    coordinator.stop()
    again = serve(journal, bind=coordinator.address, lease_timeout=2.5)
    eventually(lambda: holders(again) == ["a"] and again.snapshot()["jobs"].get("b", {}).get("waiting"))
    assert not waiting.done()
    a.release(lease)
    granted = waiting.result(60)
    assert granted.token > lease.token
    b.release(granted)
    assert again.snapshot()["jobs"]["a"]["state"] == "live"


def test_a_coordinator_that_was_killed_comes_back_with_its_leases(serve_apart, join, pool, tmp_path):
    first, address = serve_apart("--journal", "journal")
    a, b = join(address, "a"), join(address, "b")
    lease = a.acquire("rollout", step=1)
    waiting = pool.submit(b.acquire, "rollout", step=1)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    second, _ = serve_apart("--journal", "journal", "--log-dir", "log")
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


# --- lost memory, no room for it, or another time of day ---


def delete(path):
    path.unlink()


def lose_all(path):
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink()


def empty(path):
    path.write_bytes(b"")


@pytest.mark.parametrize("lose", [None, delete, lose_all, empty], ids=["none kept", "deleted", "all deleted", "emptied"])
def test_a_new_job_that_asks_first_does_not_get_a_node_that_is_used(serve, join, hold, pool, eventually, tmp_path, lose):
    """The holder cannot speak until the newcomer has asked."""
    journal = tmp_path / "journal" if lose else None
    coordinator = serve(journal, lease_timeout=3)
    holder, _ = hold(coordinator)
    holder.send_signal(signal.SIGSTOP)
    coordinator.stop()
    if lose:
        lose(journal)
    again = serve(journal, bind=coordinator.address, lease_timeout=3)
    b = join(again, "b")
    waiting = pool.submit(b.acquire, "rollout", step=1)
    eventually(lambda: waiting.done() or node(again)["queue"])
    assert not waiting.done() and node(again)["queue"][0]["held_back"] == "settling"
    holder.send_signal(signal.SIGCONT)
    eventually(lambda: holders(again) == ["a"])
    eventually(lambda: again.snapshot()["settling_s"] is None)
    assert holders(again) == ["a"] and not waiting.done()
    holder.kill()
    assert waiting.result(60).token > 1


def may_write(process, size):
    """So many bytes into each file, from now on."""
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def test_while_the_disk_is_full_jobs_keep_what_they_hold_and_grants_wait(serve_apart, join, pool, eventually, tmp_path):
    make_empty(tmp_path / "journal", make_config(KEYS))
    process, address = serve_apart("--journal", "journal")
    a, b = join(address, "a"), join(address, "b")
    lease = a.acquire("rollout", step=1)
    may_write(process, 10)
    waiting = pool.submit(b.acquire, "train", step=1)
    eventually(lambda: fetch_status(address, 60)["journal"]["blocked"] == "File too large")
    since = time.monotonic()
    eventually(lambda: time.monotonic() - since > 2 * KEYS["lease_timeout"])
    assert not waiting.done()
    a.wait_until_usable()  # and still its own
    a.progress(1, 2)
    assert fetch_status(address, 60)["jobs"]["a"]["state"] == "live"
    may_write(process, resource.RLIM_INFINITY)
    assert waiting.result(60).nodes == ["t0"]
    assert fetch_status(address, 60)["journal"]["blocked"] is None
    process.kill()
    process.wait()
    serve_apart("--journal", "journal")
    assert fetch_status(address, 60)["settling_s"] is None
    a.release(lease)
    assert a.acquire("rollout", step=2).token > lease.token


@pytest.mark.parametrize("step_s", [2, -2, 3600, -3600])
def test_setting_the_wall_clock_changes_nothing(serve, join, hold, pool, eventually, event_log, monkeypatch, step_s):
    coordinator = serve(lease_timeout=1.5)
    holder, _ = hold(coordinator)
    b = join(coordinator, "b")
    waiting = pool.submit(b.acquire, "rollout", step=1)
    eventually(lambda: node(coordinator)["queue"])
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + step_s)
    import psutil._pslinux as linux

    booted = linux.boot_time
    monkeypatch.setattr(linux, "boot_time", lambda: booted() + step_s)
    since = time.monotonic()
    eventually(lambda: time.monotonic() - since > 2)
    assert holder.poll() is None and not waiting.done() and holders(coordinator) == ["a"]
    assert not event_log.of("job_silent") and not event_log.of("job_exited")
    holder.communicate("\n")
    lease = waiting.result(60)
    assert abs(lease.granted_at - real() - step_s) < 60
    (held,) = event_log.of("lease_reclaimed")
    assert 0 <= held[1] < 60


def test_by_default_there_is_a_journal_and_a_start_without_one_says_so_and_answers_status(serve_apart, state_folder):
    process, address = serve_apart(lease_timeout=600)
    said = [process.stderr.readline() for _ in range(2)]
    assert fetch_status(address, 60)["settling_s"] is not None
    (journal,) = state_folder.rglob("journal")
    assert f"verl-mux journal: {journal}\n" in said
    assert said[-1].startswith(f"no journal was found at {journal}: jobs say what they hold, and grants begin in ")
