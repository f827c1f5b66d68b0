"""What a job's phases really are while it runs, for what is planned with the phases of the moment."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from statistics import fmean

import msgspec

from research.workload.workload import Arrival
from verl_mux.placement.model import Estimate, JobSpec

# Phases are compared by their means over so many steps; those that differ by more than CHANGE are others.
STRIDE, CHANGE = 20, 0.1

Steps = Sequence[tuple[float, float]]  # seconds of rollout, without sync, and training


class Moments:
    """One job's life. jobs: as it is in each stretch of steps over which its phases hardly change, by names of their own if there
    are several. alone_s: what its first 0, 1, ... iterations take alone."""

    def __init__(self, arrival: Arrival) -> None:
        job, count = arrival.job, arrival.iterations
        if arrival.draws is None:
            self._first, self.jobs = [0], [job]
            self.alone_s = [step * job.iteration_s for step in range(count + 1)]
            return
        steps = list(itertools.islice(arrival.draws(), count))
        self._first = _stretches(steps)
        ends = [*self._first[1:], count]
        self.jobs = [_as_it_is(job, steps[a:b], a, len(ends)) for a, b in zip(self._first, ends, strict=True)]
        self.alone_s = list(itertools.accumulate((job.sync_s + sum(step) for step in steps), initial=0.0))

    def at(self, step: int) -> JobSpec:
        """The job when it has done so many steps."""
        return self.jobs[bisect.bisect_right(self._first, step) - 1]

    def step_after(self, alone_s: float) -> int:
        """How many steps it has done when it has come as far as it would alone in that time."""
        return min(bisect.bisect_right(self.alone_s, alone_s) - 1, len(self.alone_s) - 2)


def _stretches(steps: Steps) -> list[int]:
    """The first step of each."""
    found = [0]
    for first in range(STRIDE, len(steps) - STRIDE + 1, STRIDE):
        before, now = steps[found[-1] : found[-1] + STRIDE], steps[first : first + STRIDE]
        if any(abs(n - b) > CHANGE * b for b, n in zip(_means(before), _means(now), strict=True)):
            found.append(first)
    return found


def _as_it_is(job: JobSpec, steps: Steps, first: int, stretches: int) -> JobSpec:
    rollout, train = [Estimate(seconds=mean) for mean in _means(steps)]
    name = job.name if stretches == 1 else f"{job.name} from step {first}"
    return msgspec.structs.replace(job, name=name, rollout=rollout, train=train, solo_s=None)


def _means(steps: Steps) -> tuple[float, float]:
    rollouts, trains = zip(*steps, strict=True)
    return fmean(rollouts), fmean(trains)
