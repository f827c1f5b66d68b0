"""What moving memory between device and host did, in one form from the saver to the event log."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

import msgspec


class Moved(msgspec.Struct, frozen=True):
    """Of one tag: `nbytes` left the device or came to it in `seconds`, and `mapped` bytes are on it now."""

    nbytes: int
    mapped: int
    seconds: float


Moves = dict[str, Moved]  # by tag


def total(parts: Iterable[Moves], seconds: Callable[[Iterable[float]], float] = max) -> Moves:
    """Bytes add up. Ranks, replicas and nodes move at the same time, so the slowest one's seconds count; what moves one after
    another in one process takes the sum."""
    by_tag: dict[str, list[Moved]] = defaultdict(list)
    for moves in parts:
        for tag, moved in moves.items():
            by_tag[tag].append(moved)
    return {
        tag: Moved(sum(it.nbytes for it in its), sum(it.mapped for it in its), seconds([it.seconds for it in its]))
        for tag, its in by_tag.items()
    }
