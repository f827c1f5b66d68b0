"""Who stands in whose way: pairs of jobs that share a node of one side, as the bits of an int.

All that FIFO queues, gangs and switches do to a group follows from these pairs and the jobs' times: a phase is held
back exactly by phases of jobs it shares a node with, and pays a switch exactly if one of those ran since its last.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

Pairs = int


def pair(a: int, b: int) -> Pairs:
    """The bit of the pair of jobs number a and b, whatever the size of the group."""
    low, high = (a, b) if a < b else (b, a)
    return 1 << (high * (high - 1) // 2 + low)


def pairs_of_nodes(on: Sequence[int]) -> Pairs:
    """`on`: the nodes of each job as bits."""
    return sum(pair(a, b) for a in range(len(on)) for b in range(a) if on[a] & on[b])


@functools.lru_cache(maxsize=65536)
def nodes_of_pairs(pairs: Pairs, count: int) -> tuple[int, ...]:
    """For each of `count` jobs, one node (bit) per pair that it is in: nodes that bring about just these conflicts."""
    on = [0] * count
    for a in range(count):
        for b in range(a):
            both = pair(a, b)
            if pairs & both:
                on[a] |= both
                on[b] |= both
    return tuple(on)


@functools.lru_cache(maxsize=65536)
def pairs_without(pairs: Pairs, count: int, gone: int) -> Pairs:
    """The pairs among the others, renumbered, when job number `gone` of `count` has left."""
    kept = [job for job in range(count) if job != gone]
    return within(pairs, tuple(kept))


@functools.lru_cache(maxsize=65536)
def within(pairs: Pairs, kept: tuple[int, ...]) -> Pairs:
    """The pairs among the jobs `kept`, renumbered by their place there."""
    found = ((i, j) for i in range(len(kept)) for j in range(i) if pairs & pair(kept[i], kept[j]))
    return sum(pair(i, j) for i, j in found)


@functools.lru_cache(maxsize=65536)
def connected(pairs: Pairs, count: int) -> tuple[tuple[int, ...], ...]:
    """The jobs, grouped by who conflicts with whom directly or through others."""
    left, found = set(range(count)), []
    while left:
        reached = {left.pop()}
        frontier = list(reached)
        while frontier:
            a = frontier.pop()
            near = {b for b in left if pairs & pair(a, b)}
            left -= near
            reached |= near
            frontier += near
        found.append(tuple(sorted(reached)))
    return tuple(found)
