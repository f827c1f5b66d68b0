"""Which processes of a job are alive on this host, and ending those that outlive it.

A process is known by pid and creation time, so a reused pid is never taken for it and never killed. A process of a job
is its driver, a member that the job reported, or any process whose start environment carries the job's uid in
VERL_MUX_JOB_UID, where this user may read it.

Limit: only this host can be looked at. Members on other hosts count as alive for as long as the configuration's
`remote_grace` says, and with its default for ever; Ray ends a dead job's workers by itself, but nothing here sees it.
Containers with process ids of their own are other hosts in this sense, and need host names of their own.
"""

from __future__ import annotations

import contextlib
import os
import socket

import psutil

from verl_mux.coordinator.messages import Member

UID_VARIABLE = "VERL_MUX_JOB_UID"
HOST = socket.gethostname()

# Two processes may compute the same creation time from boot times read a clock adjustment apart; a pid is not reused
# within two seconds.
_SAME_START_S = 2.0


def this_process() -> Member:
    return member_of(os.getpid())


def member_of(pid: int) -> Member:
    """Raises psutil.NoSuchProcess."""
    return Member(HOST, pid, psutil.Process(pid).create_time())


def is_here(member: Member) -> bool:
    return member.host == HOST


def is_alive(member: Member) -> bool:
    """Whether the process on this host still holds anything: a zombie does not, unless threads of it still run."""
    try:
        process = psutil.Process(member.pid)
        if abs(process.create_time() - member.started) > _SAME_START_S:
            return False
        return process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1
    except psutil.NoSuchProcess:
        return False


def carriers(uid: str) -> list[Member]:
    """Living processes started with this uid in their environment, this one and its ancestors left out."""
    family = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid not in family and process.environ().get(UID_VARIABLE) == uid:
                found.append(Member(HOST, process.pid, process.create_time()))
    return found


def survivors(uid: str | None, known: list[Member]) -> list[Member]:
    """The known processes that are alive on this host, and those that carry the uid unless it is None; each once."""
    alive = {member.pid: member for member in known if is_here(member) and is_alive(member)}
    for member in carriers(uid) if uid else []:
        alive.setdefault(member.pid, member)
    return [alive[pid] for pid in sorted(alive)]


def kill(member: Member) -> None:
    """`end` for exactly this process; nothing happens when it is gone or another now has its pid."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(member.pid)
        if member.pid != os.getpid() and abs(process.create_time() - member.started) <= _SAME_START_S:
            end(process)


def end(process: psutil.Process) -> None:
    """SIGKILL, and leave to end on any core: giving gigabytes back takes processor time, and the cores of its node may
    all be busy with whoever comes next. Raises psutil.Error; psutil compares the creation time once more."""
    process.kill()
    for thread in _threads(process.pid):
        with contextlib.suppress(OSError):  # it is gone, or another user's
            os.sched_setaffinity(thread, range(os.cpu_count() or 1))


def _threads(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []
