"""A coordinator that dies at every kind of message and each point on its way, again and again; jobs train, come and go.

Runs in the bench's process, called by chaos_bench.py; starts and kills processes.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import subprocess
import time
from collections import Counter, deque
from pathlib import Path

from bench.chaos import ledger
from bench.chaos.faults import POINTS, TYPES
from bench.chaos.ledger import Line
from bench.chaos.schedule import Schedule

_KIND = "coordinator killed at a message"
_NEVER = "message never came"
_VISITOR = "visitor"
# Seconds after which a message that has not come will not come.
_LONGEST_S = 30.0
_TICK_S = 0.02


def deaths(times: int, seed: int) -> list[str]:
    """TYPE:POINT:COUNT, each type and point `times` times, in random order; COUNT: it dies at the COUNTth of them."""
    rng = random.Random(seed)
    found = [f"{kind}:{point}:{rng.randint(1, 2)}" for kind, point in itertools.product(TYPES, POINTS) for _ in range(times)]
    rng.shuffle(found)
    return found


def run_kills(folder: Path, seed: int, points: list[str], jobs: list[str]) -> list[Line]:
    """What everybody saw, in order of time, of a coordinator that dies at one point after the other."""
    with contextlib.closing(_Kills(folder, seed, planted="")) as schedule:
        schedule.run_through(jobs, deque(points))
    return ledger.read(folder / "ledger")


def reached(lines: list[Line]) -> Counter[str]:
    """TYPE:POINT -> how often a coordinator died there."""
    died: Counter[str] = Counter()
    for line in (line for line in lines if line.what in (_KIND, _NEVER)):
        died[line.text.rpartition(":")[0]] += 1 if line.what == _KIND else -1
    return died


class _Kills(Schedule):
    def run_through(self, jobs: list[str], left: deque[str]) -> None:
        self._tend()
        for job in jobs:
            self._start_job(job)
        self._wait_for_first_steps(jobs)
        self._arm(left.popleft())
        while not self._has_died(left):
            self._tend()
            self._tend_visitor()
            time.sleep(_TICK_S)
        (self._folder / f"{_VISITOR}.enough").touch()
        self._end()

    def _arm(self, point: str) -> None:
        """The next coordinator dies there; one that was started meanwhile makes room for it."""
        assert self._coordinator is not None
        self._coordinator.kill()
        self._armed: subprocess.Popen | None = None
        self._die_at = self._point = point
        self._deadline = time.monotonic() + _LONGEST_S
        self._say_point(_KIND)

    def _has_died(self, left: deque[str]) -> bool:
        """Whether the last one has; each that has is followed by one that dies at the next point."""
        assert self._coordinator is not None
        if self._die_at:
            return False  # the one that is to die there has not been started
        self._note_up()
        self._armed = self._armed or self._coordinator
        if self._armed.poll() is None:
            if time.monotonic() < self._deadline:
                return False
            self._say_point(_NEVER)
        if not left:
            return True
        self._arm(left.popleft())
        return False

    def _say_point(self, what: str) -> None:
        self._ledger.write(what, text=self._point)

    def _tend_visitor(self) -> None:
        """A newcomer registers, does a step and leaves, again and again."""
        step, enough = self._folder / f"{_VISITOR}.step", self._folder / f"{_VISITOR}.enough"
        if _VISITOR not in self._jobs:
            enough.unlink(missing_ok=True)
            self._came_with = step.read_text() if step.exists() else ""
            self._start_job(_VISITOR)
        elif step.exists() and step.read_text() != self._came_with:
            enough.touch()
