"""What the server of any engine does alike: names stays, lets generations in under a lease, notices when the engine stands still.

Runs in engine servers, called by each engine's server.py; the names also in schedulers and agent loop workers. Touches nothing
but the processes whose stacks it reads.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

from verl_mux.coordinator.bus.fence import Fence

_Output = TypeVar("_Output")
# The stop reasons that our servers answer with, whatever their engine calls them.
STOPPED, LENGTH, ABORTED = "stop", "length", "abort"
# The key of a server's answer (`TokenOutput.extra_fields`) under which a stay's figures go back to the agent loop's log.
ANSWER = "mux_stay"
# An engine stalls when it answers nothing for LEAST_S, and for TIMES its median gap between answers.
LEAST_S, TIMES = 10.0, 8.0
_REMEMBERED = 200
_WITHIN_S = 20.0


class Refused(RuntimeError):
    """The engine has not moved the tags, and is as it was."""


class EngineFailed(RuntimeError):
    """The engine cannot be used any more."""


class Stay(NamedTuple):
    """One stay of a request in an engine. step: of the training. turn: of the agent loop. stay: of the request; both from 1."""

    request_id: str
    step: int
    turn: int
    stay: int

    def new_name(self) -> str:
        """<request_id>/<step>/<turn>/<stay>/<8 hex digits>. The digits differ for each stay, so that no name is the beginning of
        another one: an engine aborts by beginnings."""
        return f"{self.request_id}/{self.step}/{self.turn}/{self.stay}/{uuid4().hex[:8]}"


def stay_of(name: str) -> Stay | None:
    """The stay of that name; None where another client than our agent loops named the request."""
    request_id, *numbers = name.rsplit("/", 4)
    if len(numbers) != 4 or not all(number.isdigit() for number in numbers[:3]):
        return None
    return Stay(request_id, *map(int, numbers[:3]))


def keys_of(name: str) -> dict[str, Any]:
    """What the event log has in `extra` of a request that an engine knows by this name."""
    stay = stay_of(name)
    return {"request_id": name} if stay is None else {"request_id": stay.request_id, "turn": stay.turn, "stay": stay.stay}


class Passage:
    """Where every generation enters an engine: refused under no lease, held up while the job's lease may not be used.

        shut -> fence.enter(token) -> open -> pause() -> fence.reopen(token), passed() -> open -> ... -> shut

    When a pause ends, each request that it cut off begins again from its prompt: for the client it takes longer, no more.
    """

    def __init__(self) -> None:
        self.fence = Fence()
        self._may_pass = asyncio.Event()
        self._may_pass.set()
        self._pauses = 0

    def pause(self) -> None:
        """The lease may not be used: nothing enters any more. The caller stops what runs."""
        self.fence.shut()
        self._may_pass.clear()
        self._pauses += 1

    def passed(self) -> None:
        """The engine is ready again."""
        self._may_pass.set()

    async def through(self, generate: Callable[[], Awaitable[_Output]], was_cut: Callable[[_Output], bool]) -> _Output:
        """Generate, once more for each pause that cut it off. Raises Fenced where there is no lease."""
        while True:
            await self._may_pass.wait()
            self.fence.check()
            pauses = self._pauses
            output = await generate()
            if pauses == self._pauses or not was_cut(output):
                return output


class StallWatch:
    """Whether an engine stands still; times are seconds of one clock. The first stall of a run is only counted: it may be a first
    compilation, or a machine that was busy once."""

    def __init__(self) -> None:
        self._since: float | None = None  # the last sign of life, while it has requests
        self._gaps: deque[float] = deque(maxlen=_REMEMBERED)
        self._standing = False
        self.stalls = 0

    def sent(self, now: float) -> None:
        """The engine answered something."""
        if self._since is not None and not self._standing:
            self._gaps.append(now - self._since)
        self._since, self._standing = now, False

    def look(self, now: float, running: int) -> float | None:
        """About once a second: how many seconds the engine has stood still, once a stall, from the second stall on. Else None."""
        if not running:
            self._since, self._standing = None, False
            return None
        if self._since is None:
            self._since = now
        stood = now - self._since
        if self._standing or stood < max(LEAST_S, TIMES * (median(self._gaps) if self._gaps else 0.0)):
            return None
        self._standing = True
        self.stalls += 1
        return stood if self.stalls > 1 else None


def write_stacks(pids: Sequence[int], path: Path) -> str:
    """Of all threads of these processes: Python's by py-spy where it is installed and may look, else where the kernel has them.
    Returns which, "py-spy" or "kernel"."""
    spy = shutil.which("py-spy")
    stacks, by = [], "kernel"
    for pid in pids:
        text = _python_stacks(spy, pid) if spy else None
        by = "py-spy" if text else by
        stacks.append(f"process {pid}: {_command(pid)}\n{text or _kernel_states(pid)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(stacks) + "\n")
    return by


def _python_stacks(spy: str, pid: int) -> str | None:
    command = [spy, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_WITHIN_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 and done.stdout else None


def _kernel_states(pid: int) -> str:
    """A line a thread: its name, state and where in the kernel it sleeps."""
    lines = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*"), key=lambda task: int(task.name)):
        try:
            status = _read(task / "status").splitlines()
            state = next(line.split(":", 1)[1].strip() for line in status if line.startswith("State"))
            lines.append(f"  {task.name} {_read(task / 'comm')}: {state}, {_read(task / 'wchan')}")
        except (OSError, StopIteration):
            continue
    return "\n".join(lines) or "  gone"


def _command(pid: int) -> str:
    try:
        return " ".join(_read(Path(f"/proc/{pid}/cmdline")).replace("\0", " ").split()[:4])
    except OSError:
        return "gone"


def _read(path: Path) -> str:
    return path.read_text(errors="replace").strip()
