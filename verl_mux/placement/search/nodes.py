"""Which nodes of a pool are taken. Low numbers first, so that the same run names the same nodes."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Mapping

from verl_mux.placement.model import Pool


class Nodes:
    """FREE -> taken by take() -> FREE by release(). A pool without node names grows as needed. closed: nodes of the pool, or
    others, that are never free. spot: those that may vanish; spot_usd: USD per hour of those that have a price of
    their own."""

    def __init__(
        self, pool: Pool, closed: Collection[str] = (), spot: Collection[str] = (), spot_usd: Mapping[str, float] | None = None
    ) -> None:
        self.pool = pool
        self.taken: set[str] = set()
        self._number = {name: i for i, name in enumerate(pool.nodes or ())}
        self._names = list(pool.nodes or ())
        self._closed = {name for name in closed if name in self._number}
        own = spot_usd or {}
        # How much less than the pool's price each costs.
        self._spot = {
            i: pool.kind.usd_per_hour - own[name] if name in own else 0.0 for name, i in self._number.items() if name in spot
        }
        self._free = [number for name, number in self._number.items() if name not in self._closed]

    @property
    def free(self) -> float:
        return math.inf if self.pool.nodes is None else len(self._names) - len(self.taken | self._closed)

    @property
    def saved_usd(self) -> float:
        """How much less than the pool's price those that are taken cost, USD per hour."""
        return sum(less for number, less in self._spot.items() if self._names[number] in self.taken)

    def would_save_usd(self, count: int) -> float:
        """The same of so many that `take` would give, one that may vanish rather than another."""
        return sum(heapq.nlargest(count, [self._spot[number] for number in self._free if number in self._spot]))

    def take(self, spot: bool) -> str:
        """One that is free; spot: rather one that may vanish than another, the cheapest, else rather not."""
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
        first = min(self._free, key=lambda number: ((number in self._spot) is not spot, -self._spot.get(number, 0.0), number))
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
