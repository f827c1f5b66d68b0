"""Stretches in which a worker completed nothing though it should have, and then went on as before. Pure, numpy only.

A gap counts when, at the pace of both sides, at least MISSING completions should have fallen into it. The slower side's pace
is taken, so the thin tail of long answers makes no gap. Two bunches of short and long answers make one, though; `stalled`
and `is_common` tell those from an engine that stood still.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MISSING = 20.0
ALIKE_MISSING = 4.0  # what is enough to say that a peer has such a gap too
MIN_SIDE = 4  # completions needed on each side to know its pace
FEW = 24  # with fewer completions the pace is hardly known: twice as many must be missing
PACE_PART = 0.05  # pace is taken over this part of the completions
TOOLS = 0.7  # of a gap, spent in tool calls
MIN_PART = 0.25  # of the worker's whole time; shorter ones cost too little to report


Place = tuple[str, int, int]  # job, step, worker


@dataclass(frozen=True)
class Gap:
    """Between completion number `before` (counted from 1) and the next. Seconds; `start` and `end` as the input's clock."""

    start: float
    end: float
    before: int
    after: int
    missing: float
    pace_before: float
    pace_after: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


def find_gap(began: float, ends: np.ndarray, least_missing: float = MISSING, least_part: float = MIN_PART) -> Gap | None:
    """The longest gap among sorted completion times of one worker's step, or None where too few completions are missing or it
    is less than `least_part` of the whole time."""
    count = len(ends)
    if count < 2 * MIN_SIDE or ends[-1] <= began:
        return None
    places = np.arange(MIN_SIDE, count - MIN_SIDE + 1)  # a gap lies before ends[place]
    place = int(places[np.argmax(ends[places] - ends[places - 1])])
    seconds = float(ends[place] - ends[place - 1])
    if seconds < least_part * (ends[-1] - began):
        return None
    window = max(MIN_SIDE, int(PACE_PART * count))
    before = _pace(ends[max(0, place - 1 - window) : place])
    after = _pace(ends[place : place + window + 1])
    missing = seconds * min(before, after)
    if missing < enough(least_missing, count):
        return None
    return Gap(float(ends[place - 1]), float(ends[place]), place, count - place, missing, before, after)


def enough(least_missing: float, count: int) -> float:
    """How many completions must be missing among `count`."""
    return least_missing * (2 if count < FEW else 1)


def _pace(ends: np.ndarray) -> float:
    """Completions a second; completions at one instant count as one burst of a microsecond."""
    return (len(ends) - 1) / max(float(ends[-1] - ends[0]), 1e-6)


def stalled(gap: Gap, starts: np.ndarray, ends: np.ndarray, tokens: np.ndarray) -> bool | None:
    """Whether tokens say that the engine stood still: requests open through the gap have normal speed only without it.

    None when too few requests tell. `tokens`: NaN where unknown.
    """
    known = ~np.isnan(tokens) & (tokens > 0)
    through = known & (starts <= gap.start) & (ends >= gap.end)
    clear = known & (ends <= gap.start)
    if through.sum() < MIN_SIDE or clear.sum() < MIN_SIDE:
        return None
    normal = np.median((ends[clear] - starts[clear]) / tokens[clear])
    spent = ends[through] - starts[through]
    with_gap = np.median(spent / tokens[through])
    without = np.median(np.maximum(spent - gap.seconds, 1e-9) / tokens[through])
    return bool(abs(np.log(without / normal)) < abs(np.log(with_gap / normal)))


def in_tools(gap: Gap, starts: np.ndarray, ends: np.ndarray, tools: np.ndarray) -> bool:
    """Whether most requests open through the gap spent it in tool calls. `tools`: seconds of them in each request."""
    through = (starts <= gap.start) & (ends >= gap.end)
    return bool(through.any() and np.mean(tools[through] >= TOOLS * gap.seconds) > 0.5)


def is_common(gap: Gap, others: list[Gap | None], part: float = 0.25) -> bool:
    """Whether more than `part` of other workers and steps have such a gap too: then it is how the work is made, not a stall."""
    alike = sum(other is not None and other.seconds >= 0.5 * gap.seconds for other in others)
    return alike > part * max(len(others), 1)
