"""Deaths of drivers, told by the kernel or found by looking."""

import os
import signal
import subprocess
import sys

import pytest

from verl_mux.coordinator.bus import members
from verl_mux.coordinator.process_watch import Drivers


@pytest.fixture
def drivers():
    watch = Drivers()
    yield watch
    watch.close()


@pytest.fixture
def child():
    started = []

    def start():
        process = subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE)  # fmt: skip
        process.stdout.readline()
        started.append(process)
        return process, members.member_of(process.pid)

    yield start
    for process in started:
        process.kill()
        process.communicate()


def end(process):
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize("told", [True, False])
def test_of_several_the_one_that_died_is_found(drivers, child, told, monkeypatch):
    if not told:
        monkeypatch.setattr(os, "pidfd_open", lambda pid: os.open("/nowhere", 0))
    (one, first), (_, second) = child(), child()
    assert drivers.dead([first, second]) == []
    end(one)
    assert drivers.dead([first, second]) == [first] == drivers.dead([first, second])
    assert drivers.dead([second]) == []


def test_a_pid_that_is_another_process_now(drivers, child):
    _, member = child()
    before = members.Member(member.host, member.pid, member.started - 1, member.boot)
    assert drivers.dead([before, member]) == [before]


def test_who_is_well_is_not_looked_at_again(drivers, child, monkeypatch):
    _, member = child()
    drivers.dead([member])
    monkeypatch.setattr(members, "is_alive", None)
    assert drivers.dead([member]) == []


def test_no_descriptor_is_kept(child):
    before = len(os.listdir("/proc/self/fd"))
    watch, (_, member) = Drivers(), child()
    watch.dead([member])
    watch.close()
    assert len(os.listdir("/proc/self/fd")) <= before + 2  # the child's pipes


def test_too_many_open_files_kill_nobody(monkeypatch):
    def read(path):
        raise OSError(24, "Too many open files")

    me = members.this_process()
    monkeypatch.setattr(members.Path, "read_bytes", read)
    with pytest.raises(OSError, match="Too many"):
        members.is_alive(me)
