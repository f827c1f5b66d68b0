"""A command with everything that it starts: in a session of its own, and found by the mark that all of it carries."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from verl_mux.coordinator.bus import members
from verl_mux.coordinator.bus.members import UID_VARIABLE
from verl_mux.coordinator.bus.messages import Member
from verl_mux.errors import UserError

_LOOK_S = 0.01
_KILL_AGAIN_S = 0.2


class HeldProcess:
    """`start` -> runs -> `end`, which returns when nothing of it is left, and does nothing where nothing was started."""

    def __init__(
        self, command: list[str], environment: Mapping[str, str], uid: str, cpus: list[int] | None, niceness: int = 0
    ) -> None:
        """`environment` is added to this process's. `cpus`: on which it is to stay; None: anywhere. `niceness` is added to this
        process's, 0 to 19."""
        self._command, self._environment = command, {**os.environ, **environment, UID_VARIABLE: uid}
        self._uid, self._cpus, self._niceness = uid, cpus, niceness
        self._process: subprocess.Popen | None = None
        self._known: set[Member] = set()

    def start(self) -> None:
        """Raises UserError for a command that cannot be run."""
        try:
            with _staying_on(self._cpus):
                self._process = subprocess.Popen(self._command, env=self._environment, start_new_session=True)
            self._be_nice(self._process.pid)
        except OSError as error:
            raise UserError(f"{self._command[0]!r} cannot be run: {error.strerror}") from None

    def _be_nice(self, group: int) -> None:
        """The group, as it may have started others by now; one that ended at once needs nothing."""
        niceness = min(os.getpriority(os.PRIO_PROCESS, 0) + self._niceness, 19)
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PGRP, group, niceness)
        # Where the kernel shares processor time among sessions (sched(7), autogroup), it looks at the session's own.
        with contextlib.suppress(OSError):
            Path(f"/proc/{group}/autogroup").write_text(str(niceness))

    def code(self) -> int | None:
        """As a shell gives it, 128 + the number of the signal that ended it; None while it runs."""
        code = self._process.poll() if self._process is not None else None
        return 128 - code if code is not None and code < 0 else code

    def end(self, number: signal.Signals, grace: float) -> None:
        """The signal to all of its process group; after `grace` seconds SIGKILL to all that is left, of any group."""
        if self._process is None:
            return
        self._signal(number)
        deadline = time.monotonic() + grace
        while self._is_left() and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        while self._is_left() or self._escaped():
            self._kill()
            until = time.monotonic() + _KILL_AGAIN_S
            while self._is_left() and time.monotonic() < until:
                time.sleep(_LOOK_S)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)
        for member in [member for member in self._known if members.is_alive(member)]:
            with contextlib.suppress(psutil.Error, OSError):
                members.end(psutil.Process(member.pid))

    def _is_left(self) -> bool:
        """Anything of its group, or of what was found of it before. What is ending has no environment any more, but its group."""
        assert self._process is not None
        self._process.poll()
        self._known = {member for member in self._known if members.is_alive(member)}
        if not self._known:  # to look at all processes is dear, too
            self._known = {member for member in _group(self._process.pid) if members.is_alive(member)}
        return bool(self._known)

    def _escaped(self) -> bool:
        """Anything that carries the mark; to read all environments is dearest."""
        self._known.update(members.carriers(self._uid))
        return bool(self._known)


def _group(leader: int) -> list[Member]:
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.Error):
            if os.getpgid(pid) == leader:
                found.append(members.member_of(pid))
    return found


@contextlib.contextmanager
def _staying_on(cpus: list[int] | None) -> Iterator[None]:
    """This thread, for a moment, so that what it starts inherits it."""
    before = os.sched_getaffinity(0)
    if not cpus or not before.intersection(cpus):
        yield
        return
    os.sched_setaffinity(0, before.intersection(cpus))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
