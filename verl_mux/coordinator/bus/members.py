"""Which processes of a job are alive on this host, and ending those that outlive it.

Runs in the coordinator, in agents, in launchers and their ends on hosts, and in every process of a job that names itself; touches
/proc and signals.

A process is known by pid, boot and when it started after that boot, in the kernel's clock ticks: a reused pid is never taken for
it, and a wall clock that is set changes nothing. A process of a job is its driver, a member that the job reported, or any process
whose start environment carries the job's uid in VERL_MUX_JOB_UID, where this user may read it. Any client may send a message that
names processes, so `kill` ends only a process that carries the uid, a secret of the job, and runs as this user.

Only what has process ids of this PID namespace can be looked at: a container with process ids of its own is another host in this
sense, also where it has this host's name. What cannot be seen is never taken for dead: an agent there looks.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import socket
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from verl_mux.coordinator.bus.messages import Look, Member


def boot_id() -> str:
    """Names this boot; empty where the kernel does not."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def pid_space() -> str:
    """Names the PID namespace of this process; empty where the kernel does not."""
    try:
        return os.readlink("/proc/self/ns/pid").removeprefix("pid:").strip("[]")
    except OSError:
        return ""


def seconds_since_boot() -> float:
    """Goes on while the machine sleeps, is the same in all processes, and does not change with the wall clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


UID_VARIABLE = "VERL_MUX_JOB_UID"
# A process may go on as another program with another environment.
_READ_AGAIN_S = 10.0
_PR_SET_PDEATHSIG = 1
HOST = socket.gethostname()
_INTERNET = (socket.AF_INET, socket.AF_INET6)
BOOT, SPACE = boot_id(), pid_space()


def names_of_this_host() -> list[str]:
    """Its name and the addresses by which others reach it."""
    found = {address.address for card in psutil.net_if_addrs().values() for address in card if address.family in _INTERNET}
    return [HOST, *sorted(address for address in found if not address.startswith(("127.", "::1", "fe80:", "169.254.")))]


def this_process() -> Member:
    return member_of(os.getpid())


def this_process_and_children() -> list[Member]:
    """This process and all that descend from it."""
    family = [this_process()]
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            family.append(member_of(child.pid))
    return family


def member_of(pid: int) -> Member:
    """Raises psutil.NoSuchProcess."""
    return Member(HOST, pid, _stat(pid)[2], BOOT, SPACE)


def is_here(member: Member) -> bool:
    """Whether it can be looked at from here; one that does not name its PID namespace is taken to be of ours."""
    return member.host == HOST and member.space in ("", SPACE)


def is_alive(member: Member) -> bool:
    """Whether the process on this host still holds anything: a zombie does not, unless threads of it still run."""
    try:
        state, threads, started = _stat(member.pid)
    except psutil.NoSuchProcess:
        return False
    return member.boot == BOOT and member.started == started and (state != b"Z" or threads > 1)


def carriers(uid: str) -> list[Member]:
    """Living processes started with this uid in their environment, this one and its ancestors left out."""
    family = own_family()
    found = []
    for process in psutil.process_iter():
        with _if_it_can_be_read():
            if process.pid not in family and mark_of(process.pid) == uid:
                found.append(member_of(process.pid))
    return found


@contextlib.contextmanager
def _if_it_can_be_read() -> Iterator[None]:
    """Passes over a process that is gone, or another user's. Raises OSError where this process has no descriptor left to look
    with, for then the process may well be alive."""
    try:
        yield
    except psutil.Error:
        pass
    except OSError as error:
        if is_out_of_files(error):
            raise


def is_out_of_files(error: BaseException | None) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def own_family() -> set[int]:
    """Pids of this process and its ancestors, which are no survivors of anything."""
    return {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}


def mark_of(pid: int) -> str:
    """The uid that the process was started with; empty: none. Raises psutil.Error, OSError, also where this user may not look."""
    return str(psutil.Process(pid).environ().get(UID_VARIABLE, ""))


class Marked:
    """`find` -> uid -> processes. It remembers those found: one that is ending has no environment any more, but holds memory."""

    def __init__(self) -> None:
        self._known: dict[Member, str] = {}  # with its uid; empty: none
        self._read_at = float("-inf")

    def find(self, fresh: bool) -> dict[str, list[Member]]:
        fresh = fresh or time.monotonic() - self._read_at > _READ_AGAIN_S
        if fresh:
            self._read_at = time.monotonic()
        family = own_family()
        known: dict[Member, str] = {}
        for pid in psutil.pids():
            if pid in family:
                continue
            with _if_it_can_be_read():
                member = member_of(pid)
                known[member] = self._known.get(member, "")
                if fresh or member not in self._known:
                    known[member] = mark_of(pid) or known[member]
        self._known = known
        marked: defaultdict[str, list[Member]] = defaultdict(list)
        for member, uid in known.items():
            if uid and is_alive(member):
                marked[uid].append(member)
        return dict(marked)

    def look(self, asked: Mapping[str, Sequence[Member]]) -> list[Look]:
        """For each uid: which of these processes, and which with the mark of the uid, live. Where none is found there is a second
        look: the first may miss what a dying process starts while it goes on."""
        first = self._look(asked)
        unsure = {look.uid: asked[look.uid] for look in first if not look.alive}
        again = {look.uid: look for look in self._look(unsure)} if unsure else {}
        return [again.get(look.uid, look) for look in first]

    def _look(self, asked: Mapping[str, Sequence[Member]]) -> list[Look]:
        marked = self.find(fresh=True)
        alive = {uid: [*filter(is_alive, known), *marked.get(uid, ())] for uid, known in asked.items()}
        return [Look(uid, list(dict.fromkeys(processes))) for uid, processes in alive.items()]


def survivors(uid: str | None, known: list[Member]) -> list[Member]:
    """The known processes that are alive on this host, and those that carry the uid unless it is None; each once."""
    alive = {member.pid: member for member in known if is_here(member) and is_alive(member)}
    for member in carriers(uid) if uid else []:
        alive.setdefault(member.pid, member)
    return [alive[pid] for pid in sorted(alive)]


def kill(member: Member, uid: str, was_marked: bool = False) -> bool:
    """SIGKILL for exactly this process, if it is one of the job with that uid. False: it is not, or it is gone.

    `was_marked`: the caller has read that uid from it before; it may have written a title over its environment since.
    """
    with contextlib.suppress(psutil.Error, OSError):
        process = psutil.Process(member.pid)  # from here on psutil notices when the pid becomes another process's
        if uid and is_here(member) and is_alive(member) and process.pid not in own_family():
            mark = process.environ().get(UID_VARIABLE) or (uid if was_marked else "")
            if set(process.uids()) == {os.getuid()} and mark == uid:
                end(process)
                return True
    return False


def end(process: psutil.Process) -> None:
    """SIGKILL, and leave to end on any core: giving gigabytes back takes processor time, and the cores of its node may all be
    busy with the next job. Raises psutil.Error; psutil compares the creation time once more."""
    process.kill()
    with contextlib.suppress(OSError):  # it is gone
        for thread in os.listdir(f"/proc/{process.pid}/task"):
            with contextlib.suppress(OSError):  # so is the thread, or it is another user's
                os.sched_setaffinity(int(thread), range(os.cpu_count() or 1))


def end_with_parent() -> None:
    """Linux sends this process SIGTERM when the process that started it dies, however that dies."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _stat(pid: int) -> tuple[bytes, int, int]:
    """State, threads, and start in ticks, all of one moment (psutil gives wall clock time, by today's idea of the boot's).

    Raises psutil.NoSuchProcess.
    """
    try:
        line = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):  # other errors, as of too many open files, say nothing about it
        raise psutil.NoSuchProcess(pid) from None
    fields = line.rpartition(b")")[2].split()  # from field 3 on; the second, in brackets, may hold anything
    return fields[0], int(fields[17]), int(fields[19])
