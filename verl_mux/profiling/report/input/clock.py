"""Repair wrong clocks, recognised by the order of a file's lines: one worker writes its lines as their events end.

Threads may write slightly out of order, and a log may be ordered by request. A jump back is the clock's fault only where it
moves a request before its own earlier line, or where lines lie before or after all others of their file, or began before the
file did. Up to STRAY_LINES such lines are left out; a longer run of them is shifted to go on from the line before. Other jumps
are noted and kept. Runs in the report's processes; called by run_log.py; pure.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import polars as pl

from verl_mux.profiling.plain.lines import LogFile


@dataclass
class Faults:
    """What was wrong with the input. `skipped`: lines lost, by reason. `noticed`: lines kept, by what was odd."""

    skipped: collections.Counter = field(default_factory=collections.Counter)
    noticed: collections.Counter = field(default_factory=collections.Counter)
    examples: dict[str, str] = field(default_factory=dict)  # reason -> the first place it was met

    def skip(self, reason: str, where: str, count: int = 1) -> None:
        self.skipped[reason] += count
        self.examples.setdefault(reason, where)

    def notice(self, reason: str, where: str, count: int = 1) -> None:
        self.noticed[reason] += count
        self.examples.setdefault(reason, where)

    def add(self, other: Faults) -> None:
        self.skipped.update(other.skipped)
        self.noticed.update(other.noticed)
        for reason, where in other.examples.items():
            self.examples.setdefault(reason, where)


BACK_SECONDS = 1.0  # less is how threads take turns
DISORDER_SECONDS = 5.0  # a stray line is kept within this
STRAY_LINES = 5
SET_BACK_SECONDS = 60.0  # a clock set back and later set right again: less could be a pause of the worker
ZONE_SECONDS = 600.0  # zones differ by a quarter of an hour and more
MAX_JUMPS = 32  # with more, or more than MAX_PART of its lines, a file is not in order of time
MAX_PART = 0.1
WHOLE_BYTES = 16 * 2**20  # files up to here are given whole

ZONE = "timestamp in another time zone than the rest of its file"
STRAY = "timestamp far from the lines around it"
SHIFTED = "clock went back: what follows was shifted to go on from the line before"
BELIEVED = "clock went back by more than a second"

_OWN = ~pl.col("event").str.starts_with("log_")  # the log writes of itself whenever it can
Where = Callable[[int], str]  # a row's `line` -> the place that a message names


def mend(frame: pl.DataFrame, files: list[LogFile], where: Where, faults: Faults) -> pl.DataFrame:
    """Rows of files in order (columns `file`, `line`, `end`, `zoned`, ...) without their wrong times; `faults` counts them.

    `file` is a place in `files`, `line` grows.
    """
    frame = _without_other_zones(frame, where, faults)
    if not _jumps(frame).size:
        return frame
    own = frame.filter(_OWN).select("file", "line", "end")
    jumps, of_file = _jumps(own), own["file"].to_numpy()
    stray, shifts = [], []
    for file, first, count in zip(*np.unique(of_file[jumps], return_index=True, return_counts=True), strict=True):
        start, stop = np.searchsorted(of_file, [file, file + 1])
        if count > max(2, min(MAX_JUMPS, MAX_PART * (stop - start))):
            faults.notice(BELIEVED, where(own["line"][int(jumps[first])]), int(count))
            continue
        rows = frame.filter((pl.col("file") == file) & _OWN)
        clock = _Clock(rows, files[file].size <= WHOLE_BYTES)
        clock.set_right()
        if clock.stray:
            faults.skip(STRAY, where(clock.stray[0]), len(clock.stray))
        if clock.shifts:
            shift = clock.shifts[0]
            faults.notice(SHIFTED, f"{where(shift.first)}, {shift.seconds:.3f} s", len(clock.shifts))
        if clock.believed:
            faults.notice(BELIEVED, where(clock.believed[0]), len(clock.believed))
        stray += clock.stray
        shifts += clock.shifts
    return _changed(frame, stray, shifts) if stray or shifts else frame


def _jumps(frame: pl.DataFrame) -> np.ndarray:
    """Rows that end more than BACK_SECONDS before the row above, of the same file."""
    back = np.diff(frame["end"].to_numpy()) < -BACK_SECONDS
    return np.flatnonzero(back & (np.diff(frame["file"].to_numpy()) == 0)) + 1


def _changed(frame: pl.DataFrame, stray: list[int], shifts: list[Shift]) -> pl.DataFrame:
    end, line = frame["end"].to_numpy().copy(), frame["line"].to_numpy()
    for shift in shifts:
        end[np.searchsorted(line, shift.first) : np.searchsorted(line, shift.last, "right")] += shift.seconds
    frame = frame.with_columns(pl.Series("end", end))
    return frame.filter(~pl.col("line").is_in(stray)) if stray else frame


def _without_other_zones(frame: pl.DataFrame, where: Where, faults: Faults) -> pl.DataFrame:
    """Local times and times of a named zone do not go together in a file; the fewer go, unless they agree with the others."""
    if not frame["zoned"].any():
        return frame.drop("zoned")
    few = pl.when(pl.col("zoned").mean().over("file") <= 0.5).then("zoned").otherwise(~pl.col("zoned"))
    frame = frame.with_columns(few.alias("few"))
    rest = pl.when(~pl.col("few")).then("end")
    distance = pl.min_horizontal(
        (pl.col("end") - rest.forward_fill().over("file")).abs(), (pl.col("end") - rest.backward_fill().over("file")).abs()
    )
    other = frame.select((pl.col("few") & (distance > ZONE_SECONDS)).fill_null(False)).to_series()
    if other.any():
        faults.skip(ZONE, where(frame["line"].filter(other)[0]), int(other.sum()))
    return frame.filter(~other).drop("zoned", "few")


class Shift(NamedTuple):
    """`line` of the first and the last row whose clock was wrong, and what their times lack."""

    first: int
    last: int
    seconds: float


class _Clock:
    """One file with a few jumps back. `place` counts the rows that are left of it."""

    def __init__(self, rows: pl.DataFrame, whole: bool) -> None:
        self.line, self.end, self.step = (rows[name].to_numpy().copy() for name in ("line", "end", "step"))
        self.start = self.end - rows["seconds"].fill_null(0.0).to_numpy()
        # Other roles' times are compared across files (leases), and all files of a run may have a jump in common.
        self.may_shift = whole and rows["role"][0] == "rollout" and np.mean(np.diff(self.end) < 0) < 0.5
        self.set_back = _set_back(rows)
        self.stray: list[int] = []  # `line` of rows to leave out
        self.shifts: list[Shift] = []
        self.believed: list[int] = []  # `line` of rows after a jump

    def set_right(self) -> None:
        place = 0
        while len(jumps := np.flatnonzero(np.diff(self.end[place:]) < -BACK_SECONDS)):
            place = self._treat(place + int(jumps[0]) + 1)

    def _treat(self, jump: int) -> int:
        """Returns the place up to which all is dealt with."""
        strays = sorted(self._strays(jump), key=lambda block: block[1] - block[0])
        size = float(self.end[jump - 1] - self.end[jump])
        if size > DISORDER_SECONDS:
            for first, stop in strays:
                if self._is_wrong(first, stop, jump):
                    self._leave_out(first, stop)
                    return first - 1
        if self.may_shift and (size > DISORDER_SECONDS or not strays):
            for first, stop, seconds in self._lasting(jump, size):
                if self._is_wrong(first, stop, jump):
                    self.end[first:stop] += seconds
                    self.start[first:stop] += seconds
                    self.shifts.append(Shift(int(self.line[first]), int(self.line[stop - 1]), seconds))
                    return jump
        self.believed.append(int(self.line[jump]))
        return jump

    def _strays(self, jump: int) -> Iterator[tuple[int, int]]:
        """A few rows after the jump that are behind, or a few before it that are ahead: first, and the one after the last."""
        for stop in range(jump + 1, min(jump + STRAY_LINES + 1, len(self.end))):
            if self.end[stop] >= self.end[jump - 1] - BACK_SECONDS:
                yield jump, stop
                break
        for first in range(jump - 1, max(jump - STRAY_LINES, 1) - 1, -1):
            if self.end[first - 1] <= self.end[jump] + BACK_SECONDS:
                yield first, jump
                return
        if jump <= STRAY_LINES and len(self.end) > 4 * jump:
            yield 0, jump

    def _lasting(self, jump: int, size: float) -> Iterator[tuple[int, int, float]]:
        """First row, the one after the last, seconds to add: up to where the clock was set right again, else to the end."""
        if size >= SET_BACK_SECONDS:
            steps = np.diff(self.end)
            forward = np.flatnonzero((steps >= size - BACK_SECONDS) & (steps <= 1.05 * size)) + 1
            for place in forward[forward > jump][:1]:
                yield jump, int(place), size
            for place in forward[forward < jump][-1:]:
                yield int(place), jump, -size
        yield jump, len(self.end), size

    def _is_wrong(self, first: int, stop: int, jump: int) -> bool:
        """Whether rows first..stop cannot have been when they say they were, beside a jump at one of their ends."""
        line = self.line[jump]
        if any(earlier < line <= later for earlier, later in self.set_back):
            return True
        if self.end[jump - 1] - self.end[jump] <= DISORDER_SECONDS:
            return False
        block = np.zeros(len(self.line), dtype=bool)
        block[first:stop] = True
        if block.all() or not np.isin(self.step[block], self.step[~block]).any():
            return False
        early = self.start[block].min() < self.start[~block].min() - DISORDER_SECONDS
        before = self.end[block].max() < self.end[~block].min() - DISORDER_SECONDS
        after = self.end[block].min() > self.end[~block].max() + DISORDER_SECONDS
        return before or after or (early and first == jump)

    def _leave_out(self, first: int, stop: int) -> None:
        self.stray += self.line[first:stop].tolist()
        for name in ("line", "end", "start", "step"):
            setattr(self, name, np.delete(getattr(self, name), np.s_[first:stop]))


def _set_back(rows: pl.DataFrame) -> list[tuple[int, int]]:
    """`line` of neighbours within one request, the later of which has the earlier time. A line written twice counts once."""
    key = ["step", "request_id"]
    owned = rows.filter(pl.col("request_id").is_not_null())
    owned = owned.unique([*key, "event", "turn", "end"], keep="first", maintain_order=True)
    pairs = owned.select(pl.col("line").shift().over(key).alias("before"), "line", back=pl.col("end").diff().over(key))
    return pairs.filter(pl.col("back") < -BACK_SECONDS).select("before", "line").rows()
