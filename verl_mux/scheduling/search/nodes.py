"""Which nodes of a pool are taken. Low numbers first, so that the same run names the same nodes."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable

from verl_mux.scheduling.model import Pool


class Nodes:
    """FREE -> taken by take() -> FREE by release(). A pool without node names grows as needed. closed: nodes of the pool, or
    others, that are never free. spot: those that may vanish."""

    def __init__(self, pool: Pool, closed: Collection[str] = (), spot: Collection[str] = ()) -> None:
        self.pool = pool
        self.taken: set[str] = set()
        self._number = {name: i for i, name in enumerate(pool.nodes or ())}
        self._names = list(pool.nodes or ())
        self._closed = {name for name in closed if name in self._number}
        self._spot = {number for name, number in self._number.items() if name in spot}
        self._free = [number for name, number in self._number.items() if name not in self._closed]

    @property
    def free(self) -> float:
        return math.inf if self.pool.nodes is None else len(self._names) - len(self.taken | self._closed)

    def take(self, spot: bool) -> str:
        """One that is free; spot: rather one that may vanish than another, else rather not."""
        assert self.free >= 1
        if not self._free:
            name = f"{self.pool.name}-{len(self._names)}"
            heapq.heappush(self._free, len(self._names))
            self._number[name] = len(self._names)
            self._names.append(name)
        name = self._names[self._pop(spot)]
        self.taken.add(name)
        return name

    def _pop(self, spot: bool) -> int:
        if not self._spot:
            return heapq.heappop(self._free)
        first = min(self._free, key=lambda number: ((number in self._spot) is not spot, number))
        self._free.remove(first)
        heapq.heapify(self._free)
        return first

    def take_back(self, names: Iterable[str]) -> None:
        """Those of them that were released meanwhile."""
        if released := [name for name in names if name not in self.taken]:
            self.claim(released)

    def claim(self, names: Iterable[str]) -> None:
        """Takes nodes by name, of those that this pool names."""
        names = {name for name in names if name in self._number}
        self.taken |= names
        self._free = [number for number in self._free if self._names[number] not in names]
        heapq.heapify(self._free)

    def release(self, names: Iterable[str]) -> None:
        for name in names:
            self.taken.remove(name)
            if name not in self._closed:
                heapq.heappush(self._free, self._number[name])
