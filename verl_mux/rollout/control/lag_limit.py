"""How old tokens may be when they are trained on: the limit, and who has to be trained now so that nobody exceeds it later.

Age and lag are in versions of the weights, one a step: a group whose oldest token was written k steps ago has age k, and lag k
if it is trained in this one. Each step trains `wanted` groups, so the limit is kept as long as the groups under way are no more
than (most + 1) * wanted and the oldest go first whenever there would be too many of them later.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

STRATEGIES = ("protect", "wait", "drop")


class LagLimit(NamedTuple):
    """most: versions. strategy: what becomes of a group that has to be trained now and is not complete.

    protect: it has a seat and runs to its end, the others are cut off as ever. wait: nobody is cut off until it is complete.
    drop: groups older than the limit are given up, so that short responses are kept and long ones lost.
    """

    most: int
    strategy: str = "protect"

    def under_way(self, wanted: int) -> int:
        """Most groups that may be under way at once."""
        return (self.most + 1) * wanted


def must_train(ages: Sequence[int], wanted: int, most: int) -> int:
    """How many of the oldest have to be trained in this step, of groups with these ages.

    A group with age a has to be trained within most - a further steps; within h further steps h * wanted can be.
    """
    within = sorted(most - age for age in ages)
    return max((bisect_right(within, further) - further * wanted for further in range(most + 1)), default=0)
