"""Virtual time, what happens in it, what must never happen, and a made network between a client and the coordinator.

Made by schedules.py; pure.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable

_WALL = 1.8e9
_LATE_S = 20.0


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


class _Frame:
    def __init__(self, deliver: Callable[[], None]) -> None:
        self.deliver, self.fate = deliver, "arrives"


class Wire:
    """One direction of one client's connections: in order within a connection, in any order between two. What is under way when a
    connection breaks is lost, or arrives much later than what the next one brings. While there is no connection, what is sent
    waits or is lost."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._slowness = world.rng.choice([0.002, 0.02, 0.3])
        self._free_at = 0.0
        self._cut_until = 0.0
        self._under_way: list[_Frame] = []

    def send(self, deliver: Callable[[], None]) -> None:
        world = self._world
        if world.chance(0.005):
            world.fault("doubled")
            world.later(world.rng.uniform(0.0, _LATE_S), deliver)
        if world.now < self._cut_until and world.rng.random() < 0.5:
            return
        frame = _Frame(deliver)
        at = max(world.now, self._cut_until) + world.rng.expovariate(1 / self._slowness)
        self._free_at = max(self._free_at, at)
        self._under_way.append(frame)
        world.later(self._free_at - world.now, lambda: self._arrive(frame))

    def _arrive(self, frame: _Frame) -> None:
        if frame in self._under_way:
            self._under_way.remove(frame)
            frame.deliver()

    def cut(self, seconds: float) -> None:
        """The connection breaks, and there is none for `seconds`."""
        world = self._world
        for frame in self._under_way:
            if world.rng.random() < 0.5:
                world.later(world.rng.uniform(0.0, _LATE_S), frame.deliver)
        self._under_way = []
        self._free_at = self._cut_until = world.now + seconds
