"""Lines from any thread to files, through one bounded queue and one daemon thread per process.

    line: put() -> queue -> grouped by file -> one O_APPEND write    (queue full or disk error: counted, never raised)

Invariants (asserted by the tests)
- `put` does no I/O and never waits: it appends to a deque or counts a refusal.
- A file holds whole lines. Only a process that dies inside a write leaves a torn one, and it is the last of its run.
- A child made by fork starts with an empty queue and files of its own; the parent writes what the parent queued.
- What one worker keeps on disk is bounded: a file rotates at `max_bytes`, the oldest files go when the total passes
  `max_total_bytes`.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 0.2
MAX_LINES = 65_536
WAKE_LINES = MAX_LINES // 4
BATCH_LINES = 512  # between batches the thread lets go of the interpreter, so training never waits for a whole queue
MAX_OPEN_FILES = 16
# Set to 1, every process's log says now and then what it took itself (`log_cost`).
COST_VARIABLE = "VERL_MUX_LOG_COST"
COST_SECONDS = 1.0


@dataclass(eq=False)
class LineFiles:
    """Where one worker's lines go: `path(step)`, its rotated parts, and what they weigh.

    `max_bytes` bounds one file (then `worker_3.jsonl` becomes `worker_3.1.jsonl`, `.2`, ...); `max_total_bytes` bounds
    the sum of the files this process wrote, oldest removed first. Files of other processes are never removed.
    """

    directory: Path
    worker: int
    max_bytes: int
    max_total_bytes: int
    sizes: dict[Path, int] = field(default_factory=dict)  # in order of creation

    def path(self, step: int) -> Path:
        return self.directory / f"step_{step}" / f"worker_{self.worker}.jsonl"

    def rotated(self, path: Path) -> Path:
        """The first free name for a full file."""
        for part in itertools.count(1):
            name = path.with_name(f"{path.stem}.{part}.jsonl")
            if not name.exists():
                return name
        raise AssertionError

    def trim(self) -> int:
        """Removes the oldest files until the total fits; returns how many went. The file in use stays."""
        removed = 0
        while sum(self.sizes.values()) > self.max_total_bytes and len(self.sizes) > 1:
            oldest = next(iter(self.sizes))
            del self.sizes[oldest]
            with contextlib.suppress(OSError):
                oldest.unlink()
                removed += 1
        return removed


@dataclass(eq=False)
class _Order:
    """An item of the queue that is not a line: reached when all lines before it are written."""

    then: Callable[[], None] | None
    done: threading.Event

    def carry_out(self) -> None:
        if self.then is not None:
            self.then()
        self.done.set()


class LineWriter:
    """The process's one writer: made at import or fork -> thread starts with the first line -> ends with it.

    `caller_seconds`: what callers spent in the log, added up by them. An addition may get lost where threads cross.
    """

    def __init__(self, max_lines: int = MAX_LINES) -> None:
        self.max_lines = max_lines
        self.refused: collections.Counter = collections.Counter()  # owner -> lines that found the queue full
        self.failed = 0  # lines lost to disk errors
        self.caller_seconds = 0.0
        self._tells_cost = os.environ.get(COST_VARIABLE) == "1"
        self._cost_told = (time.monotonic(), 0.0, 0.0)  # when, and both sums then
        self._written = 0  # lines since then
        self._lines: collections.deque = collections.deque()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # guards the thread's start and the refusal counts, never held during I/O
        self._wake = threading.Event()
        self._handles: collections.OrderedDict[Path, int] = collections.OrderedDict()

    def put(self, owner, step: int, line: bytes) -> None:
        """Queues `line` (with its newline) for `owner.files.path(step)`. `owner` also has `refusal_line` and `cost_line`."""
        if len(self._lines) >= self.max_lines:
            with self._lock:
                self.refused[owner] += 1
            return
        self._lines.append((owner, step, line))
        if self._thread is None:
            self._start()
        elif len(self._lines) >= WAKE_LINES and not self._wake.is_set():
            self._wake.set()

    def flush(self, timeout: float, then: Callable[[], None] | None = None) -> bool:
        """Waits until all that was queued before this call is in the files; False if `timeout` seconds were not enough.

        `then` runs in the writing thread at that point.
        """
        done = threading.Event()
        self._lines.append((_Order(then, done), 0, b""))
        if self._thread is None:
            self._start()
        self._wake.set()
        return done.wait(timeout)

    def finish(self) -> None:
        """At the process's end: what is queued goes out, within 5 s."""
        if self._thread is not None:
            self.flush(5.0)

    def close_files(self, directory: Path, timeout: float) -> bool:
        """Flushes, then forgets open handles under `directory`; a later line opens them again."""
        return self.flush(timeout, lambda: self._close_under(directory))

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mux-event-log", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            self._wake.wait(FLUSH_SECONDS)
            self._wake.clear()
            self._drain()

    def _drain(self) -> None:
        last = None
        while self._lines:
            batch = self._take()
            last = next((item for item in reversed(batch) if not isinstance(item[0], _Order)), last)
            self._write_batch(batch)
        if self._tells_cost and last is not None and time.monotonic() - self._cost_told[0] >= COST_SECONDS:
            self._tell_cost(*last[:2])
        for owner, count in self._take_refused().items():
            self._append(owner.files, owner.step, [owner.refusal_line(count)])

    def _tell_cost(self, owner, step: int) -> None:
        """Log the process's cost among the lines of `owner`, which wrote last."""
        now = (time.monotonic(), self.caller_seconds, time.thread_time())
        caller, thread = now[1] - self._cost_told[1], now[2] - self._cost_told[2]
        self._append(owner.files, step, [owner.cost_line(step, self._written, caller, thread)])
        self._cost_told, self._written = now, 0

    def _take(self) -> list:
        return [self._lines.popleft() for _ in range(min(BATCH_LINES, len(self._lines)))]

    def _take_refused(self) -> collections.Counter:
        with self._lock:
            taken, self.refused = self.refused, collections.Counter()
        return taken

    def _write_batch(self, batch: list) -> None:
        for (owner, step), group in itertools.groupby(batch, key=lambda item: (item[0], item[1])):
            if isinstance(owner, _Order):
                owner.carry_out()
            else:
                lines = [line for _, _, line in group]
                self._written += len(lines)
                self._append(owner.files, step, lines)

    def _append(self, files: LineFiles, step: int, lines: list[bytes]) -> None:
        path, data = files.path(step), b"".join(lines)
        try:
            self._make_room(files, path, len(data))
            handle = self._handle(files, path)
            view = memoryview(data)
            while view:
                view = view[os.write(handle, view) :]
            files.sizes[path] += len(data)
        except OSError as error:
            self._close(path)
            self._report(len(lines), path, error)

    def _report(self, count: int, path: Path, error: OSError) -> None:
        if not self.failed:
            logger.warning("event log: cannot write %s (%s); training goes on, events are lost", path, error)
        self.failed += count

    def _make_room(self, files: LineFiles, path: Path, size: int) -> None:
        written = files.sizes.get(path, 0)
        if written and written + size > files.max_bytes:
            self._close(path)
            full = files.rotated(path)
            path.rename(full)
            files.sizes[full] = files.sizes.pop(path)
        if files.trim():
            for gone in [gone for gone in self._handles if not gone.exists()]:
                self._close(gone)

    def _handle(self, files: LineFiles, path: Path) -> int:
        if path in self._handles:
            self._handles.move_to_end(path)
            if path not in files.sizes:  # another log of this process opened it
                files.sizes[path] = os.fstat(self._handles[path]).st_size
            return self._handles[path]
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._handles[path] = handle
        size = os.fstat(handle).st_size
        if size and os.pread(handle, 1, size - 1) != b"\n":  # a run that died here left a torn line: start anew
            size += os.write(handle, b"\n")
        files.sizes.setdefault(path, size)
        while len(self._handles) > MAX_OPEN_FILES:
            self._close(next(iter(self._handles)))
        return handle

    def _close_under(self, directory: Path) -> None:
        for path in [path for path in self._handles if path.is_relative_to(directory)]:
            self._close(path)

    def _close(self, path: Path) -> None:
        handle = self._handles.pop(path, None)
        if handle is not None:
            with contextlib.suppress(OSError):
                os.close(handle)


_writer = LineWriter()


def writer() -> LineWriter:
    """This process's writer."""
    return _writer


def _restart_in_child() -> None:
    global _writer
    for handle in _writer._handles.values():
        with contextlib.suppress(OSError):
            os.close(handle)
    _writer = LineWriter(_writer.max_lines)


os.register_at_fork(after_in_child=_restart_in_child)
atexit.register(lambda: _writer.finish())
