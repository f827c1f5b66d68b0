"""Only a job's own processes are ended: those that carry its mark, run as this user, and are who they were said to be."""

import os
import subprocess
import uuid

import msgspec
import pytest

from verl_mux.coordinator import process_watch as signalling
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
        process.stdout.read(1)  # it answers, so its environment is the new program's; for an instant it is nobody's
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_process_with_the_mark_is_ended(child):
    process = child(MARK)
    assert signalling.kill(members.member_of(process.pid), MARK)
    assert process.wait(60) == -9


@pytest.mark.parametrize(
    ("mark", "uid"), [(f"another-{MARK}", MARK), (MARK + "2", MARK), ("", "")], ids=["another", "longer", "none"]
)
def test_a_process_with_another_mark_or_none_is_left_alone(child, mark, uid):
    process = child(mark)
    assert not signalling.kill(members.member_of(process.pid), uid)
    assert process.poll() is None


def test_a_process_that_wrote_over_the_mark_that_was_read_is_ended_but_not_one_with_another(child):
    another = child(f"another-{MARK}")
    assert not signalling.kill(members.member_of(another.pid), MARK, was_marked=True)
    process = child("")
    assert signalling.kill(members.member_of(process.pid), MARK, was_marked=True)
    assert process.wait(60) == -9 and another.poll() is None


def test_a_process_with_a_reused_pid_is_left_alone(child):
    process = child(MARK)
    member = members.member_of(process.pid)
    assert not signalling.kill(msgspec.structs.replace(member, started=member.started - 6000), MARK)
    assert process.poll() is None


def test_neither_a_process_of_another_host_nor_this_one_is_ended(child, monkeypatch):
    process = child(MARK)
    member = members.member_of(process.pid)
    assert not signalling.kill(msgspec.structs.replace(member, host="elsewhere"), MARK)
    me = members.this_process()
    monkeypatch.setattr("psutil.Process.environ", lambda self: {members.UID_VARIABLE: MARK})
    assert not signalling.kill(me, MARK)
    assert process.poll() is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root starts processes of other users")
def test_a_process_of_another_user_is_left_alone_even_with_the_mark(child):
    process = child(MARK, user=65534)
    assert not signalling.kill(members.member_of(process.pid), MARK)
    assert process.poll() is None
