"""Sets of time as sorted lists of disjoint (start, end) pairs in seconds, and the throughput ratio. Called by launcher/ and
report/; pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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
