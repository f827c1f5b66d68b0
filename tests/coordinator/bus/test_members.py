"""Real processes: alive, gone, carrying a uid, not mistaken for one another; and which of them are ended."""

import os
import subprocess
import sys
import uuid

import msgspec
import psutil
import pytest

from verl_mux.coordinator.bus import members

# Of this run alone: tests beside it end what carries the marks of their dead jobs.
MARK = f"a:{uuid.uuid4().hex}"


@pytest.fixture
def child():
    """Starts processes that sit there, with this mark."""
    started = []

    def start(mark, **keys):
        environment = {**os.environ, members.UID_VARIABLE: mark}
        process = subprocess.Popen(["cat"], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **keys)
        started.append(process)
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.read(1)  # it answers, so its environment is the new program's; for an instant it has no mark
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_this_process_is_alive_and_another_with_its_pid_is_not():
    me = members.this_process()
    assert members.is_alive(me)
    assert not members.is_alive(msgspec.structs.replace(me, started=me.started - 6000))
    assert not members.is_alive(msgspec.structs.replace(me, boot="the one before"))


def test_a_killed_child_counts_as_gone_even_before_its_parent_looked(child):
    child = child(MARK)
    member = members.member_of(child.pid)
    assert members.is_alive(member)
    members.end(psutil.Process(child.pid))
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE
    assert not members.is_alive(member)


def test_a_process_may_end_on_any_core(child):
    child = child(MARK)
    os.sched_setaffinity(child.pid, {0})
    members.end(psutil.Process(child.pid))
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert os.sched_getaffinity(child.pid) == os.sched_getaffinity(0)


def test_carriers_of_a_uid_are_found(child):
    child = child(MARK)
    assert [member.pid for member in members.carriers(MARK)] == [child.pid]
    assert members.carriers("test:nobody") == []


def test_survivors_are_each_named_once_and_only_those_here(child):
    child = child(MARK)
    member = members.member_of(child.pid)
    gone = msgspec.structs.replace(member, started=member.started - 6000)
    away = msgspec.structs.replace(member, host="elsewhere")
    assert members.survivors(MARK, [member, member, away]) == [member]
    assert members.survivors(None, [gone, away]) == []


def test_a_process_is_found_with_its_children(child):
    child = child(MARK)
    assert {members.this_process(), members.member_of(child.pid)} <= set(members.this_process_and_children())


def test_too_many_open_files_make_no_process_count_as_dead(monkeypatch):
    def read(path):
        raise OSError(24, "Too many open files")

    me = members.this_process()
    monkeypatch.setattr(members.Path, "read_bytes", read)
    with pytest.raises(OSError, match="Too many"):
        members.is_alive(me)


@pytest.mark.parametrize("step_s", [2, -2, 3600, -3600])
def test_setting_the_wall_clock_makes_no_process_another(child, step_s):
    """The kernel's idea of when it booted moves with the wall clock, and psutil's creation times with that."""
    child = child(MARK)
    known = members.member_of(child.pid)
    stepped = f"""
import psutil, psutil._pslinux as linux
boot_time = linux.boot_time
linux.boot_time = lambda: boot_time() + {step_s}
from verl_mux.coordinator.bus import members, messages
assert members.member_of({child.pid}) == (known := messages.Member{msgspec.structs.astuple(known)!r})
assert members.is_alive(known)
assert members.kill(known, {MARK!r})
"""
    subprocess.run([sys.executable, "-c", stepped], check=True)
    assert child.wait(60) == -9


def test_a_process_with_the_mark_is_ended(child):
    process = child(MARK)
    assert members.kill(members.member_of(process.pid), MARK)
    assert process.wait(60) == -9


@pytest.mark.parametrize(
    ("mark", "uid"), [(f"another-{MARK}", MARK), (MARK + "2", MARK), ("", "")], ids=["another", "longer", "none"]
)
def test_a_process_with_another_mark_or_none_is_left_alone(child, mark, uid):
    process = child(mark)
    assert not members.kill(members.member_of(process.pid), uid)
    assert process.poll() is None


def test_a_process_that_wrote_over_the_mark_that_was_read_is_ended_but_not_one_with_another(child):
    another = child(f"another-{MARK}")
    assert not members.kill(members.member_of(another.pid), MARK, was_marked=True)
    process = child("")
    assert members.kill(members.member_of(process.pid), MARK, was_marked=True)
    assert process.wait(60) == -9 and another.poll() is None


def test_neither_a_process_of_another_host_nor_one_with_a_reused_pid_nor_this_one_is_ended(child, monkeypatch):
    process = child(MARK)
    member = members.member_of(process.pid)
    assert not members.kill(msgspec.structs.replace(member, host="elsewhere"), MARK)
    assert not members.kill(msgspec.structs.replace(member, started=member.started - 6000), MARK)
    me = members.this_process()
    monkeypatch.setattr("psutil.Process.environ", lambda self: {members.UID_VARIABLE: MARK})
    assert not members.kill(me, MARK)
    assert process.poll() is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root starts processes of other users")
def test_a_process_of_another_user_is_left_alone_even_with_the_mark(child):
    process = child(MARK, user=65534)
    assert not members.kill(members.member_of(process.pid), MARK)
    assert process.poll() is None
