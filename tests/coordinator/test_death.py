"""Jobs that end without a word, as real processes: their nodes are given on when their processes are gone."""

import concurrent.futures
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

HOLDER = Path(__file__).with_name("holder.py")


@pytest.fixture
def pool():
    with concurrent.futures.ThreadPoolExecutor() as executor:
        yield executor


@pytest.fixture
def hold():
    """Starts a job that holds r0; gives its process and its member's pid. Ends both after the test."""
    started = []

    def start(coordinator, membership):
        command = [sys.executable, str(HOLDER), coordinator.address, membership]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        member = int(process.stdout.readline())
        started.append((process, psutil.Process(member) if member else None))
        return process, member

    yield start
    for process, member in started:
        process.kill()
        process.communicate()
        if member is not None and member.is_running():
            member.kill()


def job(coordinator):
    return coordinator.snapshot()["jobs"]["a"]


def is_gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("membership", ["reported", "carried"])
def test_a_killed_jobs_node_waits_for_its_member(serve, join, hold, pool, eventually, event_log, membership):
    coordinator = serve(kill=False)
    process, member = hold(coordinator, membership)
    b = join(coordinator, "b")
    waiting = pool.submit(b.acquire, "rollout", step=1)
    process.send_signal(signal.SIGKILL)
    eventually(lambda: job(coordinator)["waits_for"] == [f"pid {member}"])
    assert job(coordinator)["state"] == "dying"
    node = coordinator.snapshot()["pools"]["rollout"]["nodes"]["r0"]
    assert [(held["job"], held["state"]) for held in node["holders"]] == [("a", "reclaiming")]
    assert not waiting.done()
    assert not is_gone(member)
    os.kill(member, signal.SIGKILL)
    assert waiting.result(60).token == 2
    assert is_gone(member)
    assert event_log.of("lease_reclaimed")[0][2]["job"] == "a"


def test_members_that_outlive_a_dead_driver_are_killed_after_the_grace(serve, join, hold, pool):
    coordinator = serve(kill_grace=0.5)
    process, member = hold(coordinator, "reported")
    b = join(coordinator, "b")
    waiting = pool.submit(b.acquire, "rollout", step=1)
    process.send_signal(signal.SIGKILL)
    assert waiting.result(60).token == 2
    assert is_gone(member)


def test_a_job_that_exits_without_giving_back_is_noticed(serve, join, hold, pool):
    coordinator = serve()
    process, _ = hold(coordinator, "none")
    b = join(coordinator, "b")
    waiting = pool.submit(b.acquire, "rollout", step=1)
    process.communicate("\n")
    assert waiting.result(60).token == 2


def test_what_a_starter_says_frees_nothing_while_processes_live(serve, join, hold, eventually):
    coordinator = serve(kill=False)
    process, member = hold(coordinator, "reported")
    coordinator.job_exited("a")
    eventually(lambda: job(coordinator)["waits_for"] == [f"pid {process.pid}", f"pid {member}"])
    assert job(coordinator)["tokens"] == [1]
    assert process.poll() is None


def test_processes_that_outlive_what_the_starter_says_are_killed_after_the_grace(serve, join, hold):
    coordinator = serve(kill_grace=0.1)
    process, member = hold(coordinator, "reported")
    coordinator.job_exited("a")
    assert join(coordinator, "b").acquire("rollout", step=1).token == 2
    assert is_gone(process.pid)
    assert is_gone(member)


def test_a_stopped_job_keeps_its_node_and_goes_on_when_it_is_continued(serve, join, hold, pool, eventually):
    coordinator = serve(lease_timeout=1.5)
    process, _ = hold(coordinator, "none")
    b = join(coordinator, "b")
    waiting = pool.submit(b.acquire, "rollout", step=1)
    process.send_signal(signal.SIGSTOP)
    eventually(lambda: job(coordinator)["waits_for"] == [f"pid {process.pid}"])
    assert job(coordinator)["state"] == "silent"
    assert not waiting.done()
    process.send_signal(signal.SIGCONT)
    eventually(lambda: job(coordinator)["state"] == "live")
    assert job(coordinator)["tokens"] == [1]
    process.communicate("\n")
    assert waiting.result(60).token == 2


def test_the_name_of_a_killed_job_is_free_for_its_restart(serve, join, hold):
    coordinator = serve()
    process, _ = hold(coordinator, "none")
    process.send_signal(signal.SIGKILL)
    process.wait()
    again = join(coordinator, "a")
    assert again.acquire("rollout", step=1).token == 2


def test_a_death_during_the_coordinators_absence_is_found_when_it_returns(serve, join, hold, tmp_path):
    coordinator = serve(tmp_path / "journal.sqlite")
    process, member = hold(coordinator, "carried")
    coordinator.stop()
    process.send_signal(signal.SIGKILL)
    process.wait()
    again = serve(tmp_path / "journal.sqlite", bind=coordinator.address)
    assert join(again, "b").acquire("rollout", step=1).token == 2
    assert is_gone(member)
