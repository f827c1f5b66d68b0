"""A process tree that outlives its launcher, with a mark by which all of it can be found, and a note from which a later launcher
takes it up again. Runs in `verl-mux run`; called by run_processes.py and folders.py; starts and ends processes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from uuid import uuid4

import msgspec
import psutil

from verl_mux.coordinator.bus.members import UID_VARIABLE, carriers, end, mark_of

logger = logging.getLogger(__name__)

# In the place of an exit code where none was left: it was killed while no launcher watched.
NO_EXIT_CODE = -int(signal.SIGKILL)
_NOTE, _EXIT_CODE = "process.json", "exit_code"
_SWEEP_S = 10.0
# Of a log, which grows for weeks: what is searched for the reason of an end.
_LAST_BYTES = 1 << 20
# Begins what our commands say of a failure, and the last line of a traceback of one in an actor.
_OURS = re.compile(r"^(verl-mux|verl_mux\.[\w.]+): ")

# Begins what Hydra says of a key that is not there; its last line is how to see a traceback.
_HYDRAS = "Could not override "


class Note(msgspec.Struct, frozen=True):
    """`uid`: the mark; `pid` 0: not known yet; `log_from`: where this start's part of the log begins; `restarts`: how often the
    process was started again; `moves`: how often after it had left to move."""

    uid: str
    command: list[str]
    pid: int = 0
    log_from: int = 0
    restarts: int = 0
    moves: int = 0


class MarkedProcess:
    """made -> `start` or `take_up` -> runs -> ended by itself, or `stop`, which ends every process that carries the mark."""

    def __init__(self, name: str, directory: Path, log: str, command: list[str], environment: Mapping[str, str] = {}) -> None:
        self.name, self.directory = name, directory
        self.uid = ""  # of this start; every start has its own
        self.log_path = directory / log
        self._command, self._environment = command, environment
        self._before_exec: Callable[[], None] | None = None  # called in the child
        self._process: subprocess.Popen | None = None
        self._taken_up: int | None = None  # the pid of a process that another launcher started
        self._code: int | None = None
        self._log_from = self.restarts = self.moves = 0

    def start(self) -> None:
        """Start it; its output goes to the end of its log. Raises OSError."""
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / _EXIT_CODE).unlink(missing_ok=True)
        self._log_from = self.log_path.stat().st_size if self.log_path.exists() else 0
        self.uid, self._taken_up, self._code = uuid4().hex, None, None
        self._keep_note(pid=0)  # a launcher that dies in the next line leaves a process that can be found
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
                env={**os.environ, **self.environment()}, cwd=self.directory, preexec_fn=self._before_exec,
            )  # fmt: skip
        self._keep_note(self._process.pid)

    def environment(self) -> dict[str, str]:
        """Variables of this start, besides those of the launcher."""
        return {**self._environment, UID_VARIABLE: self.uid}

    def take_up(self) -> bool:
        """Take up what an earlier launcher started, whether it still runs or not. False if none did."""
        note = read_note(self.directory)
        pid = note and (note.pid or _leader(note.uid))
        if not note or not pid:
            return False
        self.uid, self._log_from, self._taken_up = note.uid, note.log_from, pid
        self.restarts, self.moves = note.restarts, note.moves
        return True

    def begin(self) -> None:
        """Start it, or take up the one that an earlier launcher started. Raises OSError."""
        if not (self.take_up() and self.returncode is None):
            self.start()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else self._taken_up

    @property
    def returncode(self) -> int | None:
        """None while it runs, and before it was started."""
        if self._process is not None:
            return self._process.poll()
        if self._code is None and self._taken_up is not None and not _carries(self._taken_up, self.uid):
            self._code = left_exit_code(self.directory)
        return self._code

    def processes(self) -> list[psutil.Process]:
        """Every living process with the mark, those whose parent has died too."""
        found = []
        for member in carriers(self.uid) if self.uid else ():
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(member.pid))
        return found

    def stop(self, patience: float = 10.0) -> None:
        """Ask it to end (SIGINT, then SIGTERM), then end what is left. Nothing happens to what was not started."""
        for number in (signal.SIGINT, signal.SIGTERM):
            self.ask_to_end(number, patience / 2)
        self.sweep()

    def ask_to_end(self, number: signal.Signals, seconds: float) -> None:
        """Send the signal, and wait for `seconds`."""
        if self.pid is not None and self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)
            self._wait(seconds)

    def sweep(self) -> None:
        """End every process that was left behind, and return when none is left."""
        deadline = time.monotonic() + _SWEEP_S
        while left := self.processes():
            if time.monotonic() > deadline:
                logger.error("%s: processes %s do not end, even by SIGKILL", self.name, sorted(p.pid for p in left))
                return
            for process in left:
                with contextlib.suppress(psutil.Error):
                    end(process)
            # A process that is ending has no environment any more, so it is waited for, not looked for. The exit code of our
            # own child belongs to Popen; psutil would take it away.
            psutil.wait_procs([p for p in left if self._process is None or p.pid != self._process.pid], timeout=1.0)
            self._wait(1.0)

    def last_error(self) -> str:
        """The line of this start's log that says most about why it ended."""
        if not self.log_path.exists():
            return "it wrote nothing"
        with self.log_path.open("rb") as log:
            log.seek(max(self._log_from, os.fstat(log.fileno()).st_size - _LAST_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        for line in reversed(lines[-400:]):
            if _OURS.match(line) or line.startswith(_HYDRAS) or ("Error" in line and not line.startswith(" ")):
                return line.strip()
        return lines[-1].strip() if lines else "it wrote nothing"

    def how_it_ended(self) -> str:
        """In words; of a process that was killed its log says nothing."""
        code = self.returncode
        if code is not None and code < 0:
            return f"ended with {signal.Signals(-code).name}"
        return f"ended with exit code {code}: {_OURS.sub('', self.last_error())}"

    def _wait(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired, psutil.Error):
            if self._process is not None:
                self._process.wait(seconds)
            elif self._taken_up is not None and self.returncode is None:
                psutil.Process(self._taken_up).wait(seconds)

    def _keep_note(self, pid: int) -> None:
        note = Note(self.uid, self._command, pid, self._log_from, self.restarts, self.moves)
        half = self.directory / f"{_NOTE}.half"
        half.write_bytes(msgspec.json.encode(note))
        half.replace(self.directory / _NOTE)


def read_note(directory: Path) -> Note | None:
    """What an earlier launcher noted of its process there; None where there is none, or none that can be read."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode((directory / _NOTE).read_bytes(), type=Note)
    return None


def left_exit_code(directory: Path) -> int:
    """The exit code that an ended process left there; NO_EXIT_CODE if it left none."""
    with contextlib.suppress(OSError, ValueError):
        return int((directory / _EXIT_CODE).read_text())
    return NO_EXIT_CODE


def runs(directory: Path) -> bool:
    """Whether the process that was noted there is alive."""
    process = MarkedProcess("", directory, "", [])
    return process.take_up() and process.returncode is None


def end_leftovers(directory: Path) -> None:
    """End whatever is alive of the processes that were noted in the folders there."""
    for note in directory.glob(f"*/{_NOTE}"):
        process = MarkedProcess(note.parent.name, note.parent, "", [])
        if process.take_up():
            process.sweep()


def _carries(pid: int, uid: str) -> bool:
    """Whether this is a living process with the mark; a pid alone may be another process's by now."""
    with contextlib.suppress(psutil.Error, OSError):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE and mark_of(pid) == uid
    return False


def _leader(uid: str) -> int | None:
    """The first process with the mark, which leads its session and started the others."""
    leaders = []
    for member in carriers(uid):
        with contextlib.suppress(ProcessLookupError):
            leaders += [member] if os.getsid(member.pid) == member.pid else []
    return min(leaders, key=lambda member: member.started).pid if leaders else None
