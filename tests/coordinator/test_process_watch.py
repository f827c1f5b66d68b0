"""Jobs that end without a word, as real processes: their nodes are given on when their processes are gone."""

import contextlib
import os
import resource
import signal
import socket
import time

import psutil
import pytest

from bench.coordinator_process import CoordinatorProcess
from tests.coordinator.conftest import HOLDERS_UID, POOLS
from verl_mux.coordinator.bus import members
from verl_mux.coordinator.bus import messages as m
from verl_mux.errors import UserError


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


def test_a_reported_process_without_the_jobs_mark_is_waited_for_and_left_alone(serve, join, hold, eventually):
    coordinator = serve(kill_grace=0.01)
    process, member = hold(coordinator, "reported")
    process.send_signal(signal.SIGKILL)
    eventually(lambda: job(coordinator)["waits_for"] == [f"pid {member}"])
    waited_since = job(coordinator)["in_state_s"]
    eventually(lambda: job(coordinator)["in_state_s"] > waited_since + 0.6)  # looked at again at least once
    assert not is_gone(member)


def test_a_job_that_exits_without_giving_back_is_noticed(serve, join, hold, pool):
    coordinator = serve()
    process, _ = hold(coordinator, "none")
    b = join(coordinator, "b")
    waiting = pool.submit(b.acquire, "rollout", step=1)
    process.communicate("\n")
    assert waiting.result(60).token == 2


def test_what_a_starter_says_frees_nothing_while_processes_live(serve, hold, say_over, eventually):
    coordinator = serve(kill=False)
    process, member = hold(coordinator, "reported")
    say_over(coordinator, "a", HOLDERS_UID)
    eventually(lambda: job(coordinator)["waits_for"] == [f"pid {process.pid}", f"pid {member}"])
    assert job(coordinator)["tokens"] == [1]
    assert process.poll() is None


def test_what_is_said_of_another_start_of_the_job_ends_nothing(serve, hold, say_over):
    coordinator = serve()
    hold(coordinator, "none")
    assert say_over(coordinator, "a", "a:before") == m.Unknown()
    assert job(coordinator)["state"] == "live"


def test_a_job_that_never_came_is_over_however_often_that_is_said(serve, say_over):
    coordinator = serve()
    answers = [say_over(coordinator, "a", "a:1") for _ in range(2)]
    assert answers == [m.JobEnded(reason="exited before it registered")] * 2


def test_processes_that_outlive_what_the_starter_says_are_killed_after_the_grace(serve, join, hold, say_over):
    coordinator = serve(kill_grace=0.1)
    process, member = hold(coordinator, "carried")
    say_over(coordinator, "a", HOLDERS_UID)
    assert join(coordinator, "b").acquire("rollout", step=1).token == 2
    assert is_gone(process.pid)
    assert is_gone(member)


def test_a_stopped_job_whose_node_no_job_wants_keeps_it_and_goes_on_when_it_is_continued(serve, hold, eventually):
    coordinator = serve(lease_timeout=1.5)
    process, _ = hold(coordinator, "none")
    process.send_signal(signal.SIGSTOP)
    eventually(lambda: job(coordinator)["waits_for"] == [f"pid {process.pid}"])
    assert job(coordinator)["state"] == "silent"
    process.send_signal(signal.SIGCONT)
    eventually(lambda: job(coordinator)["state"] == "live")
    assert job(coordinator)["tokens"] == [1]


def test_a_stopped_job_whose_node_another_waits_for_is_killed_before_the_node_is_given_on(serve, join, hold, pool, eventually):
    coordinator = serve(lease_timeout=1.5, kill_grace=0.1)
    process, member = hold(coordinator, "carried")
    b = join(coordinator, "b")
    waiting = pool.submit(b.acquire, "rollout", step=1)
    process.send_signal(signal.SIGSTOP)
    assert waiting.result(60).token == 2
    assert is_gone(process.pid) and is_gone(member)
    assert "silent beyond its lease" in job(coordinator)["reason"]


@pytest.fixture
def many_processes(monkeypatch):
    """As on a host on which it takes 0.3 s to read the environments of all processes. Gives the pids that were read."""
    read, seen = members.mark_of, []

    def slowly(pid):
        seen.append(pid)
        time.sleep(0.3 / len(psutil.pids()))
        return read(pid)

    monkeypatch.setattr(members, "mark_of", slowly)
    return seen


@pytest.fixture
def dies_unseen(stranger):
    """Registers jobs from a host that nothing looks at, which fail at once."""

    def die(coordinator, count):
        client = stranger(coordinator.address)
        driver = {"host": "unseen", "pid": 7, "started": 1, "nodes": {"rollout": ["r1"], "train": ["t0"]}}
        for number in range(count):
            who = {"job": f"x{number}", "uid": f"x{number}:1", "client": client.identity}
            client.say(m.Register(**who, **driver), m.Failing(**who, reason="failed"))

    return die


def test_a_stopped_jobs_node_is_given_on_beside_jobs_that_died_where_nothing_looks(
    serve, join, hold, pool, many_processes, dies_unseen
):
    coordinator = serve(lease_timeout=1.5, kill_grace=0.1)
    dies_unseen(coordinator, 12)
    process, _ = hold(coordinator, "none")
    b = join(coordinator, "b")
    waiting = pool.submit(b.acquire, "rollout", step=1)
    process.send_signal(signal.SIGSTOP)
    assert waiting.result(20).token == 2


def test_all_dying_jobs_together_cost_one_look_at_the_processes(serve, many_processes, dies_unseen, eventually):
    coordinator = serve()
    dies_unseen(coordinator, 12)
    eventually(lambda: all(job["waits_for"] for job in coordinator.snapshot()["jobs"].values()))
    before, began = len(many_processes), time.monotonic()
    time.sleep(3)
    looks = (len(many_processes) - before) / len(psutil.pids())
    assert looks <= 2 * (time.monotonic() - began) / 1.5  # of each process two a look, of which one a second or less


def test_no_process_counts_as_gone_while_there_is_no_descriptor_to_look_with(hold, serve, eventually, monkeypatch, caplog):
    coordinator = serve(kill=False)
    process, member = hold(coordinator, "carried")
    read = members.Path.read_bytes

    def out_of_descriptors(path):
        if str(path).startswith(f"/proc/{member}/"):
            raise OSError(24, "Too many open files")
        return read(path)

    with monkeypatch.context() as patch:
        patch.setattr(members.Path, "read_bytes", out_of_descriptors)
        process.send_signal(signal.SIGKILL)
        process.wait()
        eventually(lambda: coordinator.snapshot()["refused"].get("all open files are taken", 0) >= 3)
        assert job(coordinator)["tokens"] == [1]
    eventually(lambda: job(coordinator)["waits_for"] == [f"pid {member}"])
    assert caplog.text.count("open files") == 1 and "Traceback" not in caplog.text


def test_a_job_that_comes_while_no_descriptor_is_left_is_taken_later(serve, join, pool, eventually, monkeypatch):
    coordinator = serve()

    def out_of_descriptors(member):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(members, "is_alive", out_of_descriptors)
        coming = pool.submit(join, coordinator, "a")
        eventually(lambda: coordinator.snapshot()["refused"].get("all open files are taken"))
    assert coming.result(30).acquire("rollout", step=1).token == 1


def test_strangers_who_take_all_open_files_go_first_and_leave_one_line(join, pool, eventually):
    with CoordinatorProcess({"pools": POOLS, "lease_timeout": 5}) as coordinator:
        a, b = join(coordinator.address, "a"), join(coordinator.address, "b")
        a.acquire("rollout", step=1)
        waiting = pool.submit(b.acquire, "rollout", step=1)
        hard = resource.prlimit(coordinator.pid, resource.RLIMIT_NOFILE)[1]
        resource.prlimit(coordinator.pid, resource.RLIMIT_NOFILE, (300, hard))
        host, port = coordinator.address.removeprefix("tcp://").split(":")
        with contextlib.ExitStack() as stack:
            for _ in range(600):
                stack.enter_context(socket.create_connection((host, int(port))))
            output = coordinator.folder / "stderr"
            eventually(lambda: "open files" in output.read_text())
            eventually(lambda: len(os.listdir(f"/proc/{coordinator.pid}/fd")) < 290)
            a.close()
            assert waiting.result(60).token == 2
        said = output.read_text()
        assert "Traceback" not in said and said.count("open files") == 1


def test_the_name_of_a_killed_job_is_free_for_its_restart(serve, join, hold):
    coordinator = serve()
    process, _ = hold(coordinator, "none")
    process.send_signal(signal.SIGKILL)
    process.wait()
    again = join(coordinator, "a")
    assert again.acquire("rollout", step=1).token == 2


def test_a_death_during_the_coordinators_absence_is_found_when_it_returns(serve, join, hold, tmp_path):
    coordinator = serve(tmp_path / "journal")
    process, member = hold(coordinator, "carried")
    coordinator.stop()
    process.send_signal(signal.SIGKILL)
    process.wait()
    again = serve(tmp_path / "journal", bind=coordinator.address)
    assert join(again, "b").acquire("rollout", step=1).token > 1
    assert is_gone(member)


def test_a_job_that_waits_too_long_for_its_name_learns_which_job_has_it(serve, join, hold, eventually):
    coordinator = serve(kill=False)
    process, _ = hold(coordinator, "carried")
    process.kill()
    eventually(lambda: job(coordinator)["state"] == "dying")
    with pytest.raises(UserError, match="a job named 'a' is ending, but its processes are not all gone"):
        join(coordinator, "a", timeout=0.3)
