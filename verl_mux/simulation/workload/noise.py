"""Phases that vary from step to step and grow while a model learns, and what a short profile of a job tells of them."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence

import msgspec

from verl_mux.scheduling.estimate.estimator import Observed
from verl_mux.scheduling.estimate.learning import learnt
from verl_mux.scheduling.model import JobSpec
from verl_mux.simulation.workload.workload import Arrival

# Steps over which phases grow by the whole drift; after those they stay.
DRIFT_STEPS = 300
# Steps of a profile. The first of a run loads and compiles, which is part of the cold start here.
PROFILED = 3


class Varying(msgspec.Struct, frozen=True):
    """noise: standard deviation over mean of each phase, log-normal. drift: by which factor both phases grow over DRIFT_STEPS."""

    noise: float = 0.0
    drift: float = 1.0


STEADY = Varying()


def with_varying_phases(arrivals: Sequence[Arrival], varying: Varying, seed: int) -> list[Arrival]:
    """The same jobs; what is announced of them stays as it was, and holds for the mean of their first steps."""
    return [msgspec.structs.replace(a, draws=_draws(a, varying, f"{seed} {a.job.name}")) for a in arrivals]


def profiled(arrival: Arrival, movable: bool) -> Arrival:
    """Placed after a profile of PROFILED steps on nodes of its own, on what that showed. The run then begins anew."""
    job = arrival.job
    draws = arrival.draws() if arrival.draws else itertools.repeat((job.rollout.seconds, job.train.seconds))
    steps = list(itertools.islice(draws, PROFILED))
    seen = Observed()
    for rollout, train in steps:
        seen = seen.seen("rollout", rollout + job.sync_s).seen("train", train)
    took_s = job.cold_start_s + sum(rollout + train + job.sync_s for rollout, train in steps)
    spec = msgspec.structs.replace(learnt(job, seen, "profile"), movable=movable)
    real = _with_sync(arrival.draws, job)
    return msgspec.structs.replace(arrival, job=spec, at_s=arrival.at_s + took_s, draws=real, profile_s=took_s)


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
