"""Phases that vary from step to step and grow while a model learns, what a short profile of a job tells of them, and how long
jobs say that they run."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence

import msgspec

from research.workload.workload import Arrival
from verl_mux.placement.estimator import Observed, learnt
from verl_mux.placement.model import JobSpec

# Steps over which phases grow by the whole drift; after those they stay.
DRIFT_STEPS = 300
# Steps of a profile. The first of a run loads and compiles, which is part of the cold start here.
PROFILED = 3


class Varying(msgspec.Struct, frozen=True):
    """noise: standard deviation over mean of each phase, log-normal. drift: by which factor both phases grow over DRIFT_STEPS."""

    noise: float = 0.0
    drift: float = 1.0


STEADY = Varying()
# So many of Philly's jobs are killed or fail (Jeon et al., Analysis of Large-Scale Multi-Tenant GPU Clusters, USENIX ATC 2019).
STOP_EARLY = 0.3


def with_varying_phases(arrivals: Sequence[Arrival], varying: Varying, seed: int) -> list[Arrival]:
    """The same jobs; what is announced of them stays as it was, and holds for the mean of their first steps."""
    return [msgspec.structs.replace(a, draws=_draws(a, varying, f"{seed} {a.job.name}")) for a in arrivals]


def with_said_lengths(arrivals: Sequence[Arrival], stop_early: float, seed: int) -> list[Arrival]:
    """The same jobs, which say how many iterations they will run. This part of them, chosen at random, says too many: it ends on
    the way, anywhere alike."""
    return [msgspec.structs.replace(a, says=_said(a, stop_early, random.Random(f"{seed} {a.job.name} says"))) for a in arrivals]


def _said(arrival: Arrival, stop_early: float, rng: random.Random) -> int:
    if rng.random() >= stop_early:
        return arrival.iterations
    return math.ceil(arrival.iterations / (1 - rng.random()))


def profiled(arrival: Arrival, movable: bool) -> Arrival:
    """Placed on what its first PROFILED steps showed, which it does on nodes of its own; where it stays on those, it goes on with
    the next. A shorter job ends there."""
    job = arrival.job
    draws = arrival.draws() if arrival.draws else itertools.repeat((job.rollout.seconds, job.train.seconds))
    steps = list(itertools.islice(draws, PROFILED))
    seen = Observed()
    for rollout, train in steps:
        seen = seen.seen("rollout", rollout + job.sync_s).seen("train", train)
    done = steps[: arrival.iterations]
    took_s = job.cold_start_s + sum(rollout + train + job.sync_s for rollout, train in done)
    spec = msgspec.structs.replace(learnt(job, seen, "profile"), movable=movable)
    real = _with_sync(arrival.draws, job)
    at_s = arrival.at_s + took_s
    return msgspec.structs.replace(arrival, job=spec, at_s=at_s, draws=real, profile_s=took_s, profiled=len(done))


def _with_sync(
    draws: Callable[[], Iterator[tuple[float, float]]] | None, job: JobSpec
) -> Callable[[], Iterator[tuple[float, float]]]:
    """What is seen of a rollout holds the sync."""
    steady = itertools.repeat((job.rollout.seconds, job.train.seconds))
    return lambda: ((rollout + job.sync_s, train) for rollout, train in (draws() if draws else steady))


def _draws(arrival: Arrival, varying: Varying, seed: str) -> Callable[[], Iterator[tuple[float, float]]]:
    job, under = arrival.job, arrival.draws
    spread = math.sqrt(math.log1p(varying.noise**2))

    def draws() -> Iterator[tuple[float, float]]:
        rng = random.Random(seed)
        means = under() if under else itertools.repeat((job.rollout.seconds, job.train.seconds))
        for step, (rollout, train) in enumerate(means):
            grown = 1 + (varying.drift - 1) * min(step / DRIFT_STEPS, 1)
            yield (
                rollout * grown * math.exp(rng.gauss(-(spread**2) / 2, spread)),
                train * grown * math.exp(rng.gauss(-(spread**2) / 2, spread)),
            )

    return draws
