"""Real processes: alive, gone, zombie, carrying a uid, and not mistaken for one another."""

import os
import subprocess
import sys

import psutil
import pytest

from verl_mux.coordinator import members
from verl_mux.coordinator.messages import Member


@pytest.fixture
def child():
    """A process that sits there, carrying a uid."""
    environment = {**os.environ, members.UID_VARIABLE: "test:4711"}
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environment)
    yield process
    process.kill()
    process.wait()


def test_this_process_is_alive_and_another_with_its_pid_is_not():
    me = members.this_process()
    assert members.is_alive(me)
    assert not members.is_alive(Member(me.host, me.pid, me.started - 60))


def test_a_killed_child_counts_as_gone_even_before_its_parent_looked(child):
    member = members.member_of(child.pid)
    assert members.is_alive(member)
    members.kill(member)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE
    assert not members.is_alive(member)


def test_a_process_may_end_on_any_core(child):
    os.sched_setaffinity(child.pid, {0})
    members.kill(members.member_of(child.pid))
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert os.sched_getaffinity(child.pid) == os.sched_getaffinity(0)


def test_a_process_with_a_reused_pid_is_not_killed(child):
    members.kill(Member(members.HOST, child.pid, members.member_of(child.pid).started - 60))
    assert child.poll() is None


def test_carriers_of_a_uid_are_found(child):
    assert [member.pid for member in members.carriers("test:4711")] == [child.pid]
    assert members.carriers("test:nobody") == []


def test_survivors_are_each_named_once_and_only_those_here(child):
    member = members.member_of(child.pid)
    gone = Member(members.HOST, child.pid, member.started - 60)
    away = Member("elsewhere", child.pid, member.started)
    assert members.survivors("test:4711", [member, member, away]) == [member]
    assert members.survivors(None, [gone, away]) == []
