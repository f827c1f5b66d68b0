"""When an engine stands still, and what its processes were doing: at a stall that comes again their stacks are written down.

The first stall of a run is only counted: it may be a first compilation, or a machine that was busy once.
"""

from __future__ import annotations

import shutil
import subprocess
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from statistics import median

# An engine stalls when it answers nothing for LEAST_S, and for TIMES its median gap between answers.
LEAST_S = 10.0
TIMES = 8.0
_REMEMBERED = 200
_WITHIN_S = 20.0


class StallWatch:
    """Pure; times are seconds of one clock. `sent`: something came out of the engine. `look`: about once a second."""

    def __init__(self, least_s: float = LEAST_S) -> None:
        self._least_s = least_s
        self._since: float | None = None  # the last sign of life, while it has requests
        self._gaps: deque[float] = deque(maxlen=_REMEMBERED)
        self._standing = False
        self.stalls = 0

    def sent(self, now: float) -> None:
        if self._since is not None and not self._standing:
            self._gaps.append(now - self._since)
        self._since, self._standing = now, False

    def look(self, now: float, running: int) -> float | None:
        """Seconds for which the engine has stood still: once a stall, from the second stall on. Else None."""
        if not running:
            self._since, self._standing = None, False
            return None
        if self._since is None:
            self._since = now
        stood = now - self._since
        if self._standing or stood < max(self._least_s, TIMES * (median(self._gaps) if self._gaps else 0.0)):
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
            state = next(
                line.split(":", 1)[1].strip() for line in _read(task / "status").splitlines() if line.startswith("State")
            )
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
