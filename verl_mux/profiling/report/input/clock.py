"""Leave out lines with a wrong clock, recognised by the order of a file's lines: one worker writes its lines as their events end.

Threads may write slightly out of order, and a log may be ordered by request: a file with many jumps back is in no order of time
and keeps its times, as do files whose times are compared across files (leases). Of others the longest series in order of time is
right. Runs in the report's processes; called by run_log.py; pure.
"""

from __future__ import annotations

import bisect
import collections
from collections.abc import Callable
from dataclasses import dataclass, field

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
DISORDER_SECONDS = 5.0  # a line this far from those around it is kept
ZONE_SECONDS = 600.0  # zones differ by a quarter of an hour and more
MAX_JUMPS = 32  # with more, or more than MAX_PART of its lines, a file is not in order of time
MAX_PART = 0.1
MIN_SERIES = 0.5  # of its lines; where the longest series in order of time is shorter, likewise
WHOLE_BYTES = 16 * 2**20  # files up to here are given whole

ZONE = "timestamp in another time zone than the rest of its file"
STRAY = "timestamp out of the order of its file"
BELIEVED = "clock went back by more than a second"

_OWN = ~pl.col("event").str.starts_with("log_")  # the log writes of itself whenever it can
Where = Callable[[int], str]  # a row's `line` -> the place that a message names


def mend(frame: pl.DataFrame, files: list[LogFile], where: Where, faults: Faults) -> pl.DataFrame:
    """Rows of files in order (columns `file`, `line`, `end`, `zoned`, ...) without those of wrong times; `faults` counts them.

    `file` is a place in `files`, `line` grows.
    """
    frame = _without_other_zones(frame, where, faults)
    own = frame.filter(_OWN).select("file", "line", "end", "role")
    back = ((pl.col("end").diff() < -BACK_SECONDS) & (pl.col("file").diff() == 0)).fill_null(False)
    stray: list[int] = []
    for file in own.filter(back)["file"].unique().sort():
        rows = own.filter(pl.col("file") == file)
        jumps, lines = rows.filter(back)["line"], rows["line"].to_numpy()
        in_order = len(jumps) <= max(2, min(MAX_JUMPS, MAX_PART * len(lines)))
        judged = in_order and files[file].size <= WHOLE_BYTES and rows["role"][0] == "rollout"
        wrong = _out_of_order(rows["end"].to_numpy()) if judged else np.empty(0, int)
        if len(wrong):
            faults.skip(STRAY, where(lines[wrong[0]]), len(wrong))
            stray += lines[wrong].tolist()
        else:
            faults.notice(BELIEVED, where(jumps[0]), len(jumps))
    return frame.filter(~pl.col("line").is_in(stray)) if stray else frame


def _out_of_order(end: np.ndarray) -> np.ndarray:
    """Places of the times that are off the longest series in order of time, by more than DISORDER_SECONDS."""
    last: list[float] = []  # the least time that ends a series of 1, 2, ... members; `at`: its place
    at: list[int] = []
    before = []
    for place, time in enumerate(end):
        longest = bisect.bisect_right(last, time)
        before.append(at[longest - 1] if longest else -1)
        last[longest : longest + 1], at[longest : longest + 1] = [time], [place]
    series = [at[-1]]
    while before[series[-1]] >= 0:
        series.append(before[series[-1]])
    series.reverse()
    if len(series) < MIN_SERIES * len(end):
        return np.empty(0, int)
    after = np.searchsorted(series, np.arange(len(end)))
    times = np.concatenate([[-np.inf], end[series], [np.inf]])
    return np.flatnonzero((end < times[after] - DISORDER_SECONDS) | (end > times[after + 1] + DISORDER_SECONDS))


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
