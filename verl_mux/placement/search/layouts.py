"""Different ways to lay jobs over nodes of one side, nodes being interchangeable.

Nodes with the same occupants form a class. A job takes whole classes, and part of one more at most, and only where it
asks for no new nodes: taking part of several classes, or a new node while some of a class it shares is left, brings
the same conflicts or more for the same nodes or more.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import msgspec

from verl_mux.placement.time.conflicts import Pairs, pairs_of_nodes

# Nodes with the same occupants: (bits of the jobs on them, how many such nodes).
Classes = tuple[tuple[int, int], ...]


class Layout(msgspec.Struct, frozen=True):
    """nodes: how many. occupied: the different sets of jobs (bits) that share a node. on: nodes (bits) of each job.
    pairs: jobs that share a node."""

    nodes: int
    occupied: tuple[int, ...]
    on: tuple[int, ...]
    pairs: Pairs


@functools.lru_cache(maxsize=4096)
def layouts(needs: tuple[int, ...]) -> tuple[Layout, ...]:
    """Every layout of jobs that need that many nodes each, fewest nodes first, none twice up to renaming nodes."""
    order = sorted(range(len(needs)), key=lambda job: -needs[job])
    found = set(_lay((), needs, order))
    return tuple(layout_of(classes, len(needs)) for classes in sorted(found, key=lambda c: (_count(c), c)))


def _count(classes: Classes) -> int:
    return sum(count for _, count in classes)


def _lay(classes: Classes, needs: tuple[int, ...], order: list[int]) -> Iterator[Classes]:
    if not order:
        yield classes
        return
    job, *rest = order
    for shared, left in share(classes, 1 << job, needs[job]):
        new = shared + (((1 << job, left),) if left else ())
        yield from _lay(tuple(sorted(new)), needs, rest)


def share(classes: Classes, bit: int, need: int) -> Iterator[tuple[Classes, int]]:
    """Every way to put the job on 0..need of the nodes there are: (classes afterwards, nodes it still needs)."""
    everywhere = range(len(classes))
    for size in range(len(classes) + 1):
        for whole in itertools.combinations(everywhere, size):
            left = need - sum(classes[i][1] for i in whole)
            if left >= 0:
                shared = tuple((o | bit, n) if i in whole else (o, n) for i, (o, n) in enumerate(classes))
                yield shared, left
                yield from _share_part(shared, bit, left, [i for i in everywhere if i not in whole])


def _share_part(classes: Classes, bit: int, need: int, open_to: list[int]) -> Iterator[tuple[Classes, int]]:
    for i in open_to if need else ():
        occupants, count = classes[i]
        if count > need:
            parts = ((occupants | bit, need), (occupants, count - need))
            yield (*classes[:i], *parts, *classes[i + 1 :]), 0


def layout_of(classes: Classes, jobs: int) -> Layout:
    bits = [0] * jobs
    node = 0
    for occupants, count in classes:
        for _ in range(count):
            for job in range(jobs):
                if occupants >> job & 1:
                    bits[job] |= 1 << node
            node += 1
    occupied = tuple(sorted({occupants for occupants, _ in classes}))
    return Layout(node, occupied, tuple(bits), pairs_of_nodes(bits))
