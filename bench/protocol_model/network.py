"""A made network between a client and the coordinator: in order within a connection, in any order between two.

What is under way when a connection breaks is lost, or arrives much later than what the next one brings. While there is no
connection, what is sent waits or is lost.
"""

from __future__ import annotations

from collections.abc import Callable

from bench.protocol_model.world import World

_LATE_S = 20.0


class _Frame:
    def __init__(self, deliver: Callable[[], None]) -> None:
        self.deliver, self.fate = deliver, "arrives"


class Wire:
    """One direction of one client's connections."""

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
        """The connection breaks, and there is none for so long."""
        world = self._world
        for frame in self._under_way:
            if world.rng.random() < 0.5:
                world.later(world.rng.uniform(0.0, _LATE_S), frame.deliver)
        self._under_way = []
        self._free_at = self._cut_until = world.now + seconds
