"""Find the files of an event log and read their events one by one, without a dataframe library.

    DIR/step_3/worker_0.jsonl                       the plain layout: role "rollout", job ""
    DIR/a/events/trainer/step_3/worker_0.jsonl      a run directory: role "trainer", job "a"
    .../worker_0.1.jsonl                            a rotated part of worker_0.jsonl
    DIR/worker_0.jsonl                              no step directory: step 0, unless its lines name theirs

A line's own keys (`job`, `role`, `step`, `workid`) override its path. At the end: what readers of times share, sets of time as
sorted lists of disjoint (start, end) pairs in seconds. Runs in the trainer's driver, the launcher and the command line; called by
step_metrics.py, the launcher, live/ and report/; reads files only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from verl_mux.errors import UserError
from verl_mux.profiling.eventlog.events import ALIASES

ROLES = ("trainer", "rollout", "server", "coordinator", "agent")
MAX_STEP = 10**9 - 1
_STEP = re.compile(r"step_(\d{1,9})")
_WORKER = re.compile(r"worker_(\d{1,9})(?:\.\d+)?\.jsonl")


@dataclass(frozen=True)
class LogFile:
    """One file, its size in bytes, and what its path says."""

    path: str
    size: int
    job: str
    role: str
    step: int
    worker: int


def find_log_files(directory: str | os.PathLike) -> list[LogFile]:
    """All event logs under `directory`, ordered by job, role, step, worker. May be empty.

    Raises UserError when `directory` is not a directory.
    """
    root = Path(directory)
    if not root.is_dir():
        given = "is a file" if root.exists() else "does not exist"
        raise UserError(f"{root} {given}: give a directory that holds step_<N>/worker_<R>.jsonl, at any depth")
    return sorted(_walk(root.absolute()), key=lambda file: (file.job, file.role, file.step, file.worker, file.path))


def find_step_files(directory: str | os.PathLike, step: int) -> list[LogFile]:
    """The logs of one step of a job's event directory, found without looking through those of its other steps."""
    root = Path(directory).absolute()
    folders = [root, *(root / role for role in ROLES)]
    return [file for folder in folders for file in _walk(folder / f"step_{step}")]


def _walk(root: Path) -> Iterator[LogFile]:
    for folder, _, names in os.walk(root):
        step = _STEP.fullmatch(os.path.basename(folder))
        job, role = _job_and_role(root, Path(folder).parent if step else Path(folder))
        for name in names:
            worker = _WORKER.fullmatch(name)
            path = os.path.join(folder, name)
            if worker is not None and os.path.isfile(path):
                yield LogFile(path, os.path.getsize(path), job, role, int(step[1]) if step else 0, int(worker[1]))


def _job_and_role(root: Path, parent: Path) -> tuple[str, str]:
    """`parent` holds the step directories; the job's name may stand above `root`."""
    role = parent.name if parent.name in ROLES else ""
    home = parent.parent if role else parent
    if home.name == "events":
        return printable(home.parent.name), role or "rollout"
    if not home.is_relative_to(root) or home == root:
        return "", role or "rollout"
    return printable(home.relative_to(root).as_posix()), role or "rollout"


def printable(name: str) -> str:
    """Names of files may hold bytes that are no text; those are spelled out."""
    return name.encode("utf-8", "backslashreplace").decode()


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

    @property
    def start(self) -> float:
        return self.end - self.seconds

    def number(self, key: str) -> float | None:
        """A number of `extra`, if it is one."""
        value = self.extra.get(key)
        return value if isinstance(value, (int, float)) else None


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


Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time without overlaps; empty and reversed intervals vanish."""
    merged: list[Interval] = []
    for start, end in sorted(pair for pair in intervals if pair[1] > pair[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Seconds covered, overlaps counted once."""
    return sum(end - start for start, end in union(intervals))


def clip(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """What lies inside `window`."""
    return [(max(a, window[0]), min(b, window[1])) for a, b in intervals if min(b, window[1]) > max(a, window[0])]


def overlap(one: Interval, other: Interval) -> float:
    """Seconds the two share."""
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))


def throughput_ratio(alone: Mapping[str, float | None], together: Mapping[str, float | None]) -> float | None:
    """Steps per second together over one after the other: sum(1 / together) / (jobs / sum(alone)).

    `alone`, `together`: seconds of a step by job. None where one of them was not measured.
    """
    alone_s = [period for period in alone.values() if period is not None]
    together_s = [period for period in together.values() if period is not None]
    if not alone or alone.keys() != together.keys() or len(alone_s) + len(together_s) < 2 * len(alone):
        return None
    return round(sum(1 / period for period in together_s) * sum(alone_s) / len(alone), 4)
