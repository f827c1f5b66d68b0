"""What a simulated run leaves behind: finished jobs, and integrals over time."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

# Attained is attained, whatever the last bit of a sum says.
TOLERANCE = 1 + 1e-9


class Finished(msgspec.Struct, frozen=True):
    """One job's life. arrived_s, placed_s, ended_s: on the clock of the run. solo_s: its iterations alone, as they
    really were; planned_solo_s: as estimated. moves: to other nodes on the way, which lost lost_s of its time. profile_s:
    before it was placed, in nodes of its own."""

    job: str
    slo: float
    arrived_s: float
    placed_s: float
    ended_s: float
    iterations: int
    solo_s: float
    planned_solo_s: float
    moves: int = 0
    lost_s: float = 0.0
    profile_s: float = 0.0

    @property
    def stay_s(self) -> float:
        return self.ended_s - self.placed_s


class Ledger:
    """Integrals over time. held_s and busy_s: node-seconds of (rollout, training)."""

    def __init__(self) -> None:
        self.usd = 0.0
        self.held_s = [0.0, 0.0]
        self.busy_s = [0.0, 0.0]
        self.peak_nodes: list[float] = [0, 0]
        self.peak_usd_per_hour = 0.0
        self.samples: list[tuple[float, float]] = []

    def add(self, seconds: float, nodes: tuple[float, float], usd_per_hour: float) -> None:
        """What was held beside all that `hold` was told of; it is in no peak."""
        self.usd += usd_per_hour * seconds / 3600
        for side in (0, 1):
            self.held_s[side] += nodes[side] * seconds

    def hold(self, since: float, until: float, nodes: tuple[float, float], usd_per_hour: float) -> None:
        hours = (until - since) / 3600
        if hours <= 0:
            return
        self.usd += usd_per_hour * hours
        for side in (0, 1):
            self.held_s[side] += nodes[side] * (until - since)
            self.peak_nodes[side] = max(self.peak_nodes[side], nodes[side])
        self.peak_usd_per_hour = max(self.peak_usd_per_hour, usd_per_hour)
        self.samples.append((since, usd_per_hour))


class Span(msgspec.Struct, frozen=True):
    """seconds in which nobody came, went or moved. steps: of the jobs placed, how many each had done when it began."""

    seconds: float
    steps: Mapping[str, int]
    usd_per_hour: float


class Run(msgspec.Struct, frozen=True):
    """spans: one after the other."""

    finished: list[Finished]
    ledger: Ledger
    spans: list[Span]
