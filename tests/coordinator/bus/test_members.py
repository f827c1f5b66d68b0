"""Real processes: alive, gone, zombie, carrying a uid, and not mistaken for one another."""

import os
import subprocess
import sys

import msgspec
import psutil
import pytest

from verl_mux.coordinator.bus import members

# Of this process alone: tests beside it end what carries the marks of their dead jobs.
MARK = f"test:{os.getpid()}"


@pytest.fixture
def child():
    """A process that sits there, carrying a uid."""
    environment = {**os.environ, members.UID_VARIABLE: MARK}
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environment)
    yield process
    process.kill()
    process.wait()


def test_this_process_is_alive_and_another_with_its_pid_is_not():
    me = members.this_process()
    assert members.is_alive(me)
    assert not members.is_alive(msgspec.structs.replace(me, started=me.started - 6000))


def test_a_killed_child_counts_as_gone_even_before_its_parent_looked(child):
    member = members.member_of(child.pid)
    assert members.is_alive(member)
    members.end(psutil.Process(child.pid))
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE
    assert not members.is_alive(member)


def test_a_process_may_end_on_any_core(child):
    os.sched_setaffinity(child.pid, {0})
    members.end(psutil.Process(child.pid))
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert os.sched_getaffinity(child.pid) == os.sched_getaffinity(0)


def test_carriers_of_a_uid_are_found(child):
    assert [member.pid for member in members.carriers(MARK)] == [child.pid]
    assert members.carriers("test:nobody") == []


def test_survivors_are_each_named_once_and_only_those_here(child):
    member = members.member_of(child.pid)
    gone = msgspec.structs.replace(member, started=member.started - 6000)
    away = msgspec.structs.replace(member, host="elsewhere")
    assert members.survivors(MARK, [member, member, away]) == [member]
    assert members.survivors(None, [gone, away]) == []


def test_a_process_is_found_with_its_children(child):
    assert {members.this_process(), members.member_of(child.pid)} <= set(members.this_process_and_children())


def test_a_process_of_another_boot_is_gone(child):
    assert not members.is_alive(msgspec.structs.replace(members.member_of(child.pid), boot="the one before"))


@pytest.mark.parametrize("step_s", [2, -2, 3600, -3600])
def test_setting_the_wall_clock_makes_no_process_another(child, step_s):
    """The kernel's idea of when it booted moves with the wall clock, and psutil's creation times with that."""
    known = members.member_of(child.pid)
    stepped = f"""
import psutil, psutil._pslinux as linux
boot_time = linux.boot_time
linux.boot_time = lambda: boot_time() + {step_s}
from verl_mux.coordinator import process_watch as signalling
from verl_mux.coordinator.bus import members, messages
assert members.member_of({child.pid}) == (known := messages.Member{msgspec.structs.astuple(known)!r})
assert members.is_alive(known)
assert signalling.kill(known, {MARK!r})
"""
    subprocess.run([sys.executable, "-c", stepped], check=True)
    assert child.wait(60) == -9
