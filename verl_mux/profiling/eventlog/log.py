"""The event log: one JSON object a line in `<directory>/<role>/step_<N>/worker_<worker>.jsonl`.

    log = EventLog("runs/demo/a/events", worker=0, role="trainer", job="a")
    log.step = 3
    log.log(events.SAMPLE_READY, 0.2)
    with log.span(events.SYNC, extra={"version": 7}) as span:
        span.extra["bytes"] = send()

`timestamp` is the END of the event in local time, `duration_sec` reaches back from it. Nothing here waits, raises into
the caller or touches a device: a line is encoded on the caller's side (a few microseconds, and a snapshot of `extra`),
queued, and written by a daemon thread (line_writer.py).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from verl_mux.profiling.eventlog import events
from verl_mux.profiling.eventlog.line_writer import LineFiles, writer

MAX_LINE_BYTES = 65_536
MAX_BYTES = 256 * 2**20
MAX_TOTAL_BYTES = 8 * 2**30


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
            writer().failed += 1
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
        line = _encode(entry)
        if len(line) > MAX_LINE_BYTES:
            line = _encode(entry | {"extra": {"truncated_bytes": len(line)}})
        return line + b"\n"


def _local(timestamp: float | datetime | None) -> str:
    if timestamp is None:
        return datetime.now().isoformat(timespec="microseconds")
    if not isinstance(timestamp, datetime):
        timestamp = datetime.fromtimestamp(timestamp)
    return timestamp.isoformat(timespec="microseconds")


class _NullSpan:
    __slots__ = ("extra",)

    def __enter__(self) -> _NullSpan:
        self.extra: dict = {}
        return self

    def __exit__(self, *_: object) -> None:
        pass


class NullLog:
    """The log that is off: same interface, does nothing."""

    enabled = False
    step = 0
    run = None

    def log(self, *_: Any, **__: Any) -> None:
        pass

    def wants(self, step: int) -> bool:
        return False

    def span(self, *_: Any, **__: Any) -> _NullSpan:
        return _NullSpan()

    def flush(self, timeout: float = 5.0) -> bool:
        return True

    def close(self) -> None:
        pass


NULL_LOG = NullLog()
