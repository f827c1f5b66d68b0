"""Virtual time, what happens in it, and what must never happen."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable

_WALL = 1.8e9


class World:
    """Everything random comes from `rng`, so a seed is a schedule. `violations`: what was seen, in words, and how often."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.clock_step = 0.0
        self.calm = False  # no more faults from here on
        self.violations: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.story: list[str] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._users: dict[str, set[str]] = {}
        self._tokens: dict[int, str] = {}

    def wall(self) -> float:
        """What a wall clock says, which people and programs set."""
        return _WALL + self.now + self.clock_step

    def later(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._number), action))

    def run(self, until: float, over: Callable[[], bool] = lambda: False) -> None:
        while self._events and self._events[0][0] <= until and not over():
            self.now, _, action = heapq.heappop(self._events)
            action()

    def chance(self, probability: float) -> bool:
        return not self.calm and self.rng.random() < probability

    def fault(self, kind: str) -> None:
        self.faults[kind] += 1
        self.tell(f"fault: {kind}")

    def tell(self, what: str) -> None:
        self.story.append(f"{self.now:9.3f} {what}")

    def violated(self, what: str, about: str) -> None:
        self.violations[what] += 1
        self.tell(f"VIOLATION: {what}: {about}")

    # --- what is checked ---

    def begins_to_use(self, job: str, node: str) -> None:
        users = self._users.setdefault(node, set())
        if others := users - {job}:
            self.violated("double holder", f"{job} uses {node}, which {sorted(others)} still uses")
        users.add(job)

    def uses_no_more(self, job: str, node: str) -> None:
        self._users.get(node, set()).discard(job)

    def granted(self, token: int, key: str) -> None:
        if self._tokens.setdefault(token, key) != key:
            self.violated("repeated token", f"token {token} for {key} and {self._tokens[token]}")
