"""All groups as rows of numbers, so that one decision looks at thousands of them at once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from verl_mux.placement.model import Group

EMPTY = np.inf  # the share of time promised on a node that a group does not have: never room for anybody


class GroupTable:
    """Groups in the order in which they were set up; `replace` keeps a group's place in it."""

    def __init__(self) -> None:
        self._row: dict[str, int] = {}
        self._groups: list[Group | None] = []
        self._unused: list[int] = []
        self._turns = itertools.count()
        self._turn = np.zeros(0, dtype=np.int64)
        self._jobs = np.zeros(0, dtype=np.int64)
        self._fullness = np.zeros(0)
        self._used = {"rollout": np.full((0, 1), EMPTY), "train": np.full((0, 1), EMPTY)}

    def add(self, group: Group) -> None:
        if not self._unused:
            self._grow()
        row = self._unused.pop()
        self._row[group.name] = row
        self._turn[row] = next(self._turns)
        self._fill(row, group)

    def replace(self, group: Group) -> None:
        """Other numbers for a group that is there under the same name."""
        self._fill(self._row[group.name], group)

    def remove(self, name: str) -> None:
        row = self._row.pop(name)
        self._groups[row] = None
        self._fullness[row] = EMPTY
        self._unused.append(row)
        for used in self._used.values():
            used[row] = EMPTY

    def openings(
        self, need: tuple[int, int], cap: int, room: tuple[float, float], usd: tuple[float, float], below: float, best_fit: bool
    ) -> Iterator[tuple[float, Group]]:
        """(least USD per hour it could ask, group) of the groups with fewer than `cap` jobs that share a node with a job
        that needs so many for less than `below`, the cheapest first; of equally cheap ones the fullest (`best_fit`), then
        the oldest.

        A node can be shared that promised no more than `room`; `usd`: of a node the group would have to add. Pairs are
        (rollout, training).
        """
        sides = zip(("rollout", "train"), need, room, strict=True)
        shared = [np.minimum((self._used[side] <= most).sum(axis=1), asked) for side, asked, most in sides]
        new = [asked - held for asked, held in zip(need, shared, strict=True)]
        least = new[0] * usd[0] + new[1] * usd[1]
        rows = np.flatnonzero((self._jobs < cap) & (least < below) & (shared[0] + shared[1] > 0))
        second = -self._fullness[rows] if best_fit else np.zeros(len(rows))
        ordered = rows[np.lexsort((self._turn[rows], second, least[rows]))]
        return ((float(least[row]), self._groups[row]) for row in ordered)

    def emptiest(self, count: int) -> list[Group]:
        """So many groups, the least full first, then the oldest."""
        count = min(count, len(self._row))
        if not count:
            return []
        # All that are as full as the last one counted, so that it is the oldest of them that is taken.
        most = np.partition(self._fullness, count - 1)[count - 1]
        rows = np.flatnonzero(self._fullness <= most)
        ordered = rows[np.lexsort((self._turn[rows], self._fullness[rows]))]
        return [self._groups[row] for row in ordered[:count]]

    def _fill(self, row: int, group: Group) -> None:
        self._groups[row] = group
        self._jobs[row] = len(group.pins)
        self._fullness[row] = group.fullness
        for side, shares in (("rollout", group.rollout_used), ("train", group.train_used)):
            if missing := max(len(shares) - self._used[side].shape[1], 0):
                self._used[side] = np.pad(self._used[side], ((0, 0), (0, missing)), constant_values=EMPTY)
            self._used[side][row] = EMPTY
            self._used[side][row, : len(shares)] = shares

    def _grow(self) -> None:
        """Twice as many rows."""
        old, more = len(self._groups), max(len(self._groups), 16)
        self._groups += [None] * more
        self._unused = list(range(old + more - 1, old - 1, -1))
        self._turn = np.pad(self._turn, (0, more))
        self._jobs = np.pad(self._jobs, (0, more))
        self._fullness = np.pad(self._fullness, (0, more), constant_values=EMPTY)
        for side, used in self._used.items():
            self._used[side] = np.pad(used, ((0, more), (0, 0)), constant_values=EMPTY)
