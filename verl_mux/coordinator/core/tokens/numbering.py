"""Fencing tokens: (epoch << 32) + counter, so they rise from one start of the coordinator to the next, whatever was lost.

The epoch is the number of the start. Below 2 ** 52 a token is exact in JSON and in a double.
"""

from __future__ import annotations

_COUNTER_BITS = 32
_COUNTED_FROM = 1_767_225_600  # the year 2026; 30 bits of seconds last for 34 years
_PER_SECOND_BITS = 22
LAST_EPOCH = (1 << 20) - 1


def before(epoch: int) -> int:
    """Lower than every token of this epoch, and not lower than any of those before."""
    return epoch << _COUNTER_BITS


def at(wall: float) -> int:
    """For a start that knows of no earlier one: higher than the tokens of those before, by the wall clock (epoch seconds)."""
    return int(max(0.0, wall - _COUNTED_FROM)) << _PER_SECOND_BITS


def epoch_of(token: int) -> int:
    return token >> _COUNTER_BITS


# That of the last epoch but one: a start must be able to come after it.
LAST = before(LAST_EPOCH) - 1
