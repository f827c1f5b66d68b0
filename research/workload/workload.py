"""What arrives when in one simulated run: the jobs of a trace with shapes, SLOs and phase times drawn from one seed."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence

import msgspec

from research.workload.shapes import Shape, draw_job
from research.workload.trace import TraceRow
from verl_mux.errors import UserError
from verl_mux.placement.model import JobSpec

# Nodes a side where the trace does not say how many GPUs a job has: an assumption, see shapes.py.
NODES = {"small": 1, "medium": 2, "large": 4}
GPUS_PER_NODE = 8


class Phases:
    """The real seconds of a job's phases, iteration by iteration; without surprises they are the estimates.

    solo_s: what the iterations drawn so far would have taken alone."""

    def __init__(self, job: JobSpec, draws: Iterator[tuple[float, float]] | None = None) -> None:
        self.job = job
        self.draws = draws or itertools.repeat((job.rollout.seconds, job.train.seconds))
        self.history: list[tuple[float, float]] = []
        self._alone_s = [0.0]

    def times(self) -> tuple[Iterator[float], Iterator[float], Iterator[float]]:
        """Endless seconds of ROLLOUT (sync included), TAIL and TRAIN."""
        return self._rollouts(), itertools.repeat(self.job.tail_s), self._trains()

    def _rollouts(self) -> Iterator[float]:
        for rollout, train in self.draws:
            self.history.append((rollout, train))
            self._alone_s.append(self._alone_s[-1] + rollout + train)
            yield self.job.sync_s + rollout - self.job.tail_s

    def _trains(self) -> Iterator[float]:
        while True:
            yield self.history[-1][1]

    def solo_s(self, iterations: int) -> float:
        """What the first `iterations` would have taken alone."""
        return self._alone_s[iterations] + iterations * self.job.sync_s

    def begin_after(self, iterations: int) -> None:
        """The first `iterations` are done."""
        for _ in itertools.islice(self._rollouts(), iterations):
            pass

    def forget(self, iterations: int) -> None:
        """What was drawn beyond the first `iterations` is thrown away."""
        del self.history[iterations:], self._alone_s[iterations + 1 :]


class Arrival(msgspec.Struct, frozen=True):
    """job: as it is announced. iterations: how many it runs; says: how many it says that it will, None: it does not. draws: its
    real phase times, None for the estimates. profile_s, profiled: how long it has run before on nodes of its own, to be looked
    at, and how many iterations it did there."""

    job: JobSpec
    at_s: float
    iterations: int
    draws: Callable[[], Iterator[tuple[float, float]]] | None = None
    profile_s: float = 0.0
    profiled: int = 0
    says: int | None = None

    def says_left(self, done: int) -> int | None:
        """Iterations that it says are left when it has done so many."""
        return None if self.says is None else max(self.says - done, 0)


def parse_slo(spec: str) -> tuple[float, float]:
    """`uniform:1,2` or a number: the range that SLOs are drawn from evenly. Raises UserError."""
    kind, _, bounds = spec.rpartition(":")
    try:
        found = [float(bound) for bound in bounds.split(",")]
    except ValueError:
        found = []
    if kind not in ("", "uniform") or len(found) != (2 if kind else 1):
        raise UserError(f"SLO {spec!r} is not understood; give a number of at least 1, or uniform:LOW,HIGH")
    low, high = found[0], found[-1]
    if not (1 <= low <= high < math.inf):
        raise UserError(f"SLO {spec!r} is out of range; an SLO is a factor of at least 1, and LOW is not above HIGH")
    return low, high


def draw_workload(rows: Sequence[TraceRow], shapes: Sequence[Shape], slo: tuple[float, float], seed: int) -> list[Arrival]:
    """One job per row. A job runs as many whole iterations as its duration alone holds, at least one."""
    rng = random.Random(seed)
    return [_arrival(row, rng.choice(shapes), rng.uniform(*slo), rng) for row in rows]


def _arrival(row: TraceRow, shape: Shape, slo: float, rng: random.Random) -> Arrival:
    nodes = NODES[shape.size] if row.gpus is None else math.ceil(row.gpus / GPUS_PER_NODE)
    job = draw_job(row.job, shape, nodes, GPUS_PER_NODE, slo, rng)
    iterations = max(1, round(row.duration_h * 3600 / job.iteration_s))
    return Arrival(job, row.arrival_h * 3600, iterations)
