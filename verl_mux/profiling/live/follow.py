"""The lines that a run's event logs grow by: of the newest steps alone, so that a long run costs no more than a short one."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from verl_mux.errors import UserError
from verl_mux.profiling.plain.files import ROLES, LogFile, find_step_files
from verl_mux.profiling.plain.lines import Line, parse

STEPS = 2  # the newest ones of each job: what began in a step may be logged in the next
FIRST_WORKER = "worker_0.jsonl"
MOST_BYTES = 64 * 2**20  # at once, so that a first look at a large log comes soon
_STEP = re.compile(r"step_(\d{1,9})")


class Follower:
    """new() again and again: what was added since. A torn last line is left until it is whole."""

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            given = "is a file" if directory.exists() else "does not exist"
            raise UserError(f"{directory} {given}: give the directory of a run, or of a job's events")
        self._directory = directory
        self._read: dict[str, int] = {}

    def new(self) -> Iterator[Line]:
        """In order of time, as far as one look at all files tells."""
        lines = [line for file in self._newest() for line in self._of(file)]
        yield from sorted(lines, key=lambda line: line.timestamp.timestamp())

    def ended(self) -> set[str]:
        """Jobs of which the launcher has written how they ended."""
        return {events.parent.name for events in self._event_folders() if (events.parent / "exit_code").exists()}

    def _newest(self) -> Iterator[LogFile]:
        for events in self._event_folders():
            written = _steps_in(events)
            # A job that was started again goes on from an earlier step, in the folders that it filled before.
            lately = sorted(written, key=lambda step: (written[step], step))[-STEPS:]
            for step in sorted({*sorted(written)[-STEPS:], *lately}):
                yield from (replace(file, job=_job_of(events, file)) for file in find_step_files(events, step))

    def _event_folders(self) -> list[Path]:
        """A job's `events`, in a run directory those of all jobs and of the coordinator."""
        if _steps_in(self._directory):
            return [self._directory]
        return sorted(folder for folder in self._directory.glob("*/events") if folder.is_dir())

    def _of(self, file: LogFile) -> Iterator[Line]:
        start = self._read.get(file.path, max(0, file.size - MOST_BYTES))
        if file.size < start:  # it was rotated: a new one has its name
            start = 0
        try:
            with open(file.path, "rb") as raws:
                raws.seek(start)
                data = raws.read(MOST_BYTES)
        except OSError:
            return
        whole = data.rfind(b"\n") + 1
        self._read[file.path] = start + whole
        for raw in data[:whole].splitlines():
            if (line := parse(raw, file)) is not None:
                yield line


def _steps_in(events: Path) -> dict[int, float]:
    """Of any role, or of the plain layout, which has no roles: when the first worker of any role last wrote there, in seconds
    since the epoch. One file a step is looked at: a long run has thousands of steps."""
    found: dict[int, float] = {}
    for folder in (events, *(events / role for role in ROLES)):
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                if step := _STEP.fullmatch(name):
                    at = _written(folder / name / FIRST_WORKER)
                    found[int(step[1])] = max(at, found.get(int(step[1]), 0.0))
    return found


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _job_of(events: Path, file: LogFile) -> str:
    return file.job or (events.parent.name if events.name == "events" else "")
