"""The event log: one JSON object a line in `<directory>/<role>/step_<N>/worker_<worker>.jsonl`.

    log = EventLog("runs/demo/a/events", worker=0, role="trainer", job="a")
    log.step = 3
    with log.span(events.SYNC, extra={"version": 7}) as span:
        span.extra["bytes"] = send()

`timestamp` is the END of the event in local time, `duration_sec` reaches back from it. A call encodes its line (a few
microseconds), queues it, and neither waits nor raises; one daemon thread a process writes. Runs in every process that logs;
writes files only. Invariants (asserted by the tests):
- A full queue, a disk error or what cannot be JSON costs lines, which are counted, and the log says so as soon as it can.
- A file holds whole lines. Only a process that dies inside a write leaves a torn one, and that is the last of its run.
- A child made by fork starts with an empty queue and files of its own; the parent writes what the parent queued.
- A file rotates at `max_bytes` (`worker_3.jsonl` becomes `worker_3.1.jsonl`); of the files that this process wrote, the oldest go
  when their total passes `max_total_bytes`.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from verl_mux.profiling.eventlog import events

logger = logging.getLogger(__name__)

MAX_LINE_BYTES = 65_536
MAX_BYTES = 256 * 2**20
MAX_TOTAL_BYTES = 8 * 2**30
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
    """Where one worker's lines go, and the sizes of the files that this process wrote, oldest first."""

    directory: Path
    worker: int
    max_bytes: int
    max_total_bytes: int
    sizes: dict[Path, int] = field(default_factory=dict)

    def path(self, step: int) -> Path:
        return self.directory / f"step_{step}" / f"worker_{self.worker}.jsonl"


class LineWriter:
    """The process's one writer, made at import and after a fork; its thread starts with the first line.

    caller_seconds: what callers spent in the log, added up by them. An addition may get lost where threads cross.
    """

    def __init__(self, max_lines: int = MAX_LINES) -> None:
        self.max_lines = max_lines
        self.refused: collections.Counter = collections.Counter()  # owner -> lines that found the queue full, or are no JSON
        self.failed = 0  # lines lost to disk errors
        self._is_full = False  # the last write failed
        self.caller_seconds = 0.0
        self._logs_cost = os.environ.get(COST_VARIABLE) == "1"
        self._cost_before = (time.monotonic(), 0.0, 0.0)  # when, and both sums then
        self._written = 0  # lines since then
        self._lines: collections.deque = collections.deque()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # guards the thread's start and the refusal counts, never held during I/O
        self._wake = threading.Event()
        self._handles: collections.OrderedDict[Path, int] = collections.OrderedDict()

    def put(self, owner, step: int, line: bytes) -> None:
        """Queues `line` (with its newline) for `owner.files.path(step)`. `owner` also has `refusal_line` and `cost_line`."""
        if len(self._lines) >= self.max_lines:
            return self.drop(owner)
        self._lines.append((owner, step, line))
        if self._thread is None:
            self._start()
        elif len(self._lines) >= WAKE_LINES and not self._wake.is_set():
            self._wake.set()

    def drop(self, owner) -> None:
        """Counts a line of `owner` that is not written; the log says so as soon as it can."""
        self._count(owner, 1)
        if self._thread is None:
            self._start()

    def _count(self, owner, lines: int) -> None:
        with self._lock:
            self.refused[owner] += lines

    def flush(self, timeout: float, then: Callable[[], None] | None = None) -> bool:
        """Waits until all that was queued before this call is in the files; False if `timeout` seconds were not enough.

        `then` runs in the writing thread at that point.
        """
        done = threading.Event()

        def reached() -> None:
            if then is not None:
                then()
            done.set()

        self._lines.append((reached, 0, b""))
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

        def close_all() -> None:
            for path in [path for path in self._handles if path.is_relative_to(directory)]:
                self._close(path)

        return self.flush(timeout, close_all)

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
            batch = [self._lines.popleft() for _ in range(min(BATCH_LINES, len(self._lines)))]
            last = next((item for item in reversed(batch) if not callable(item[0])), last)
            self._write_batch(batch)
        if self._logs_cost and last is not None and time.monotonic() - self._cost_before[0] >= COST_SECONDS:
            self._log_cost(*last[:2])
        self._say_refused()

    def _say_refused(self) -> None:
        with self._lock:
            refused, self.refused = self.refused, collections.Counter()
        for owner, count in refused.items():
            if self._append(owner.files, owner.step, [owner.refusal_line(count)]):
                self._count(owner, count)  # said when there is room again

    def _log_cost(self, owner, step: int) -> None:
        """Log the process's cost among the lines of `owner`, which wrote last."""
        now = (time.monotonic(), self.caller_seconds, time.thread_time())
        caller, thread = now[1] - self._cost_before[1], now[2] - self._cost_before[2]
        self._append(owner.files, step, [owner.cost_line(step, self._written, caller, thread)])
        self._cost_before, self._written = now, 0

    def _write_batch(self, batch: list) -> None:
        for (owner, step), group in itertools.groupby(batch, key=lambda item: (item[0], item[1])):
            if callable(owner):
                self._say_refused()
                owner()
            else:
                lines = [line for _, _, line in group]
                self._written += len(lines)
                if lost := self._append(owner.files, step, lines):
                    self.failed += lost
                    self._count(owner, lost)

    def _append(self, files: LineFiles, step: int, lines: list[bytes]) -> int:
        """How many of the lines could not be written whole."""
        path, data = files.path(step), b"".join(lines)
        view = memoryview(data)
        try:
            self._make_room(files, path, len(data))
            handle = self._handle(files, path)
            while view:
                view = view[os.write(handle, view) :]
            files.sizes[path] += len(data)
            self._is_full = False
        except OSError as error:
            self._close(path)
            if not self._is_full:
                logger.warning("event log: cannot write %s (%s); training goes on, events are lost", path, error)
            self._is_full = True
        return bytes(view).count(b"\n")

    def _make_room(self, files: LineFiles, path: Path, size: int) -> None:
        written = files.sizes.get(path, 0)
        if written and written + size > files.max_bytes:
            self._close(path)
            parts = (path.with_name(f"{path.stem}.{part}.jsonl") for part in itertools.count(1))
            full = next(part for part in parts if not part.exists())
            path.rename(full)
            files.sizes[full] = files.sizes.pop(path)
        while sum(files.sizes.values()) > files.max_total_bytes and len(files.sizes) > 1:  # the file in use stays
            oldest = next(iter(files.sizes))
            del files.sizes[oldest]
            self._close(oldest)
            with contextlib.suppress(OSError):
                oldest.unlink()

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


def _plain(value: Any) -> Any:
    """What JSON has no word for. A numpy scalar becomes its number.

    A tensor becomes only its type's name, for reading its value may wait for the device.
    """
    if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
        return value.item()
    if isinstance(value, Path):
        return str(value)
    return f"<{type(value).__name__}>"


_encode = msgspec.json.Encoder(enc_hook=_plain).encode
_DEEPEST = 16


def _sound(value: Any, depth: int = 0) -> Any:
    """The same with a question mark for each character that is none, and no deeper than JSON is read."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, (Mapping, list, tuple)) and depth > _DEEPEST:
        return f"<{type(value).__name__}>"
    if isinstance(value, Mapping):
        return {_sound(str(key)): _sound(one, depth + 1) for key, one in value.items()}
    return [_sound(one, depth + 1) for one in value] if isinstance(value, (list, tuple)) else value


class Span:
    """Times a `with` block and logs it at its end; fill `extra` as you go.

    An exception passes through, and `extra["error"]` says which it was.
    """

    __slots__ = ("extra", "_log", "_event", "_step", "_start")

    def __init__(self, log: EventLog, event: str, extra: Mapping | None, step: int | None) -> None:
        self.extra: dict = dict(extra or ())
        self._log, self._event, self._step = log, event, step

    def __enter__(self) -> Span:
        if self._step is None:
            self._step = self._log.step  # the step it began in, should the step end meanwhile
        self._start = time.perf_counter()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        duration = time.perf_counter() - self._start
        if error is not None:
            self.extra["error"] = f"{type(error).__name__}: {error}"[:500]
        self._log.log(self._event, duration, self.extra or None, self._step)


class EventLog:
    """One worker's event log. Safe from threads and asyncio; pickles to a log on the same files; survives fork.

    max_bytes: a file rotates there. max_total_bytes: what this worker keeps on disk, oldest files go first. every: only steps
    that are multiples of it are logged; 1 logs all. run: separates this run of the job from others into the same directory.
    """

    enabled = True

    def __init__(
        self,
        directory: str | os.PathLike,
        worker: int = 0,
        role: str = "trainer",
        job: str | None = None,
        step: int = 0,
        max_bytes: int = MAX_BYTES,
        max_total_bytes: int = MAX_TOTAL_BYTES,
        every: int = 1,
        run: str | None = None,
    ) -> None:
        self.step = step
        self.every = every
        self.run = run
        self.files = LineFiles(Path(directory) / role, worker, max_bytes, max_total_bytes)
        self._arguments = (os.fspath(directory), worker, role, job, max_bytes, max_total_bytes, every, run)
        self._worker = worker
        self._bound = {"role": role} | {key: value for key, value in (("job", job), ("run", run)) if value is not None}
        self._opened_in = 0

    def __reduce__(self):
        directory, worker, role, job, *limits = self._arguments
        return EventLog, (directory, worker, role, job, self.step, *limits)

    def log(
        self,
        event: str,
        duration_sec: float | None = None,
        extra: Mapping | None = None,
        step: int | None = None,
        timestamp: float | datetime | None = None,
    ) -> None:
        """Queues one event that ended at `timestamp` (epoch seconds or local datetime; default now). Never raises."""
        began = time.perf_counter()
        try:
            if self._opened_in != os.getpid():
                self._say_who_we_are()
            step = self.step if step is None else step
            if not self.wants(step):
                return
            writer().put(self, step, self._line(event, duration_sec, extra, step, timestamp))
        except Exception:  # a log must not stop training, whatever it was handed
            writer().drop(self)
        writer().caller_seconds += time.perf_counter() - began

    def wants(self, step: int) -> bool:
        """Is this step logged?"""
        return step % self.every == 0

    def span(self, event: str, extra: Mapping | None = None, step: int | None = None) -> Span:
        """A context manager that logs `event` with its duration."""
        return Span(self, event, extra, step)

    def flush(self, timeout: float = 5.0) -> bool:
        """Waits, at most `timeout` seconds, until the files hold all that was logged. For a step's end."""
        return writer().flush(timeout)

    def close(self) -> None:
        """Flushes and lets go of the files. A later event opens them again."""
        writer().close_files(self.files.directory, timeout=5.0)

    def refusal_line(self, count: int) -> bytes:
        return self._line(events.LOG_DROPPED, None, {"count": count}, self.step, None)

    def cost_line(self, step: int, lines: int, caller: float, thread: float) -> bytes:
        extra = {"lines": lines, "caller_sec": round(caller, 6), "writer_cpu_sec": round(thread, 6)}
        return self._line(events.LOG_COST, None, extra, step, None)

    def _say_who_we_are(self) -> None:
        self._opened_in = os.getpid()
        self.files.sizes.clear()  # after a fork: what the parent wrote is not ours to remove
        offset = float(time.localtime().tm_gmtoff)
        self.log(events.LOG_OPEN, extra={"host": socket.gethostname(), "pid": os.getpid(), "utc_offset_sec": offset})

    def _line(self, event, duration_sec, extra, step, timestamp) -> bytes:
        entry: dict = {"timestamp": _local(timestamp), "event": event}
        if duration_sec is not None:
            entry["duration_sec"] = duration_sec
        if extra is not None:
            entry["extra"] = extra
        entry["workid"] = self._worker
        entry["step"] = step
        entry.update(self._bound)
        try:
            line = _encode(entry)
        except Exception:  # half a character from a model, or values in values without end
            line = _encode(_sound(entry))
        if len(line) > MAX_LINE_BYTES:
            line = _encode(entry | {"extra": {"truncated_bytes": len(line)}})
        return line + b"\n"


def _local(timestamp: float | datetime | None) -> str:
    if timestamp is None:
        return datetime.now().isoformat(timespec="microseconds")
    if not isinstance(timestamp, datetime):
        timestamp = datetime.fromtimestamp(timestamp)
    return timestamp.isoformat(timespec="microseconds")


class NullLog(EventLog):
    """The log that is off: same interface, writes nothing."""

    enabled = False

    def __init__(self) -> None:
        self.step, self.run = 0, None

    def __reduce__(self):
        return NullLog, ()

    def log(self, *_: Any, **__: Any) -> None:
        pass

    def wants(self, step: int) -> bool:
        return False

    def flush(self, timeout: float = 5.0) -> bool:
        return True

    def close(self) -> None:
        pass


NULL_LOG = NullLog()
