"""The plain reader: the events of logs one by one. Lines that are torn or are no events are passed over.

The report reads in bulk instead, and says what is wrong with a log (report/input/line_reader.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from verl_mux.profiling.eventlog.events import ALIASES
from verl_mux.profiling.plain.files import LogFile, find_log_files


class _Logged(msgspec.Struct):
    """As it stands in the file."""

    timestamp: datetime
    event: str
    duration_sec: float | None = None
    extra: dict[str, Any] | None = None
    workid: int | None = None
    step: int | None = None
    role: str | None = None
    job: str | None = None
    run: str | None = None


class Line(msgspec.Struct):
    """One event, under its name in the table of events. What the line does not say of itself, its file's path does."""

    timestamp: datetime
    event: str
    duration_sec: float | None
    extra: dict[str, Any]
    workid: int
    step: int
    role: str
    job: str
    run: str | None = None

    @property
    def end(self) -> float:
        """Seconds since the epoch."""
        return self.timestamp.timestamp()

    @property
    def seconds(self) -> float:
        """0 for an instant."""
        return max(self.duration_sec or 0.0, 0.0)


_decode = msgspec.json.Decoder(_Logged).decode


def read_lines(files: Iterable[LogFile]) -> Iterator[Line]:
    """The events of these files, file by file. Raises OSError when one cannot be read."""
    for file in files:
        with open(file.path, "rb") as raws:
            for raw in raws:
                if (line := parse(raw, file)) is not None:
                    yield line


def parse(raw: bytes, file: LogFile) -> Line | None:
    """One line of a file; None where it is none: a process that was killed may leave one torn line."""
    try:
        return _complete(_decode(raw), file)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def read_directory(directory: str | Path) -> Iterator[Line]:
    """The events of all logs under `directory`; none where it is not there."""
    return read_lines(find_log_files(directory) if Path(directory).is_dir() else ())


def _complete(logged: _Logged, file: LogFile) -> Line:
    return Line(
        timestamp=logged.timestamp,
        event=ALIASES.get(logged.event, logged.event),
        duration_sec=logged.duration_sec,
        extra=logged.extra or {},
        workid=file.worker if logged.workid is None else logged.workid,
        step=file.step if logged.step is None else logged.step,
        role=file.role if logged.role is None else logged.role,
        job=file.job if logged.job is None else logged.job,
        run=logged.run,
    )
