"""The keeper on one host, from the launcher's machine."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import threading

import msgspec

from verl_mux.coordinator.bus.members import UID_VARIABLE
from verl_mux.errors import Failure
from verl_mux.launcher.cluster import messages as m
from verl_mux.launcher.cluster.layout import Part

# Also of the way there: a login, or a job step that waits for a free slot.
ANSWER_S = 90.0


class Lost:
    """A keeper that speaks no more: its host, the way to it, or it itself failed."""

    def __init__(self, host: str) -> None:
        self.host = host


class Connection:
    """`send`, then `answer`. What comes unasked goes to `news`: the driver's end, and that the keeper is lost."""

    def __init__(self, part: Part, news: queue.SimpleQueue) -> None:
        self.part = part
        self._news = news
        self._answers: queue.SimpleQueue[m.FromKeeper | None] = queue.SimpleQueue()
        self.lost = False
        # Of the job's processes on its host alone: this one only leads there.
        environment = {name: value for name, value in os.environ.items() if name != UID_VARIABLE}
        try:
            self._process = subprocess.Popen(part.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        except OSError as error:
            raise Failure(f"host {part.host}: cannot run {part.command[0]!r}: {error.strerror}") from None
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, message: m.ToKeeper) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # lost; the reader says so
            self._process.stdin.write(m.encode(message))
            self._process.stdin.flush()

    def answer(self, timeout_s: float = ANSWER_S) -> m.FromKeeper:
        """The next answer. Raises Failure where there is none, or it is Failed."""
        try:
            answer = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise Failure(f"host {self.part.host} does not answer ({' '.join(self.part.command[:2])} ...)") from None
        if answer is None:
            code = self._process.wait(5)
            words = " ".join(self.part.command[:2])
            raise Failure(f"host {self.part.host}: {words} ... ended with exit code {code} before it answered")
        if isinstance(answer, m.Failed):
            raise Failure(f"host {self.part.host}: {answer.reason}")
        return answer

    def close(self) -> None:
        """Its keeper ends, if it has not, and the way there."""
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                message = m.from_keeper(line)
            except msgspec.DecodeError:
                continue  # what a login shell over there says
            (self._news if isinstance(message, m.Driven) else self._answers).put(message)
        self.lost = True
        self._answers.put(None)
        self._news.put(Lost(self.part.host))
