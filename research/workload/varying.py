"""Phases that vary and grow, response lengths that vary, what a short profile shows of them, and how long jobs say that they run.

Response lengths: every iteration generates a batch with lengths drawn from a measured distribution (RollMux, arXiv 2512.11306v2,
figure 11, digitised). Its rollout lasts in proportion to the longest response, its training in proportion to the mean (as the
paper's section 3.2 has it); a shape's phase times are the means of these. What a job is placed on:

    bound      every response at the longest length, for the phases and for the time alone (the paper's choice)
    mean       the mean of the profiled iterations
    quantile:Q an upper bound of the Q-quantile of phase times at 95 % confidence, from the profiled iterations; the time
               alone, which the SLO counts from, is their mean: no slower phase raises what the SLO allows

Called by simulate.py; reads the CSV file of the figure.
"""

from __future__ import annotations

import bisect
import csv
import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from statistics import fmean

import msgspec

from research.workload.workload import Arrival
from verl_mux.errors import UserError
from verl_mux.placement.estimator import Observed, learnt
from verl_mux.placement.model import Estimate, JobSpec

# Phases are compared by their means over STRIDE steps; those that differ by more than CHANGE are others.
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
        """The job when it has done `step` steps."""
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


# Steps over which phases grow by the whole drift; after those they stay.
DRIFT_STEPS = 300
# Steps of a profile. The first of a run loads and compiles, which is part of the cold start here.
PROFILED = 3


class Varying(msgspec.Struct, frozen=True):
    """noise: standard deviation over mean of each phase, log-normal. drift: by which factor both phases grow over DRIFT_STEPS."""

    noise: float = 0.0
    drift: float = 1.0


STEADY = Varying()
# The part of Philly's jobs that are killed or fail (Jeon et al., Analysis of Large-Scale Multi-Tenant GPU Clusters, ATC 2019).
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


BATCH = 256
# Different batches drawn per distribution; iterations take one of them at random.
BATCHES = 256
PROFILED_LENGTHS = 32  # iterations observed before a job is placed
CONFIDENCE = 0.95


class Estimates(msgspec.Struct, frozen=True):
    """kind: `exact`, `bound`, `mean` or `quantile`."""

    kind: str
    quantile: float | None = None


EXACT = Estimates("exact")


def parse_estimates(spec: str) -> Estimates:
    """`exact`, `bound`, `mean` or `quantile:0.9`. Raises UserError."""
    kind, _, value = spec.partition(":")
    if kind in ("exact", "bound", "mean") and not value:
        return Estimates(kind)
    try:
        quantile = float(value)
    except ValueError:
        quantile = math.nan
    if kind != "quantile" or not 0 < quantile < 1:
        raise UserError(f"estimates {spec!r} are not known; allowed: exact, bound, mean, quantile:Q with Q between 0 and 1")
    return Estimates(kind, quantile)


class Lengths(msgspec.Struct, frozen=True):
    """(rollout, train) of each batch, in units of their means; bound: the same with every response at the limit."""

    batches: tuple[tuple[float, float], ...]
    bound: tuple[float, float]


Cdf = Sequence[tuple[float, float]]


@functools.cache
def lengths_by_workload() -> dict[str, Lengths]:
    return {name: _batches(name, cdf) for name, cdf in read_lengths().items()}


def read_lengths() -> Mapping[str, Cdf]:
    """Workload -> (share of responses, tokens that they do not exceed), as read off the figure."""
    points: dict[str, list[tuple[float, float]]] = {}
    with (files("research.workload") / "data" / "length_cdf.csv").open(encoding="utf-8") as file:
        for workload, tokens, share in itertools.islice(csv.reader(file), 1, None):
            points.setdefault(workload, []).append((float(share), float(tokens)))
    return points


def _batches(name: str, cdf: Cdf) -> Lengths:
    rng = random.Random(name)
    drawn = [[length_at(cdf, rng.random()) for _ in range(BATCH)] for _ in range(BATCHES)]
    longest, mean = [max(batch) for batch in drawn], [fmean(batch) for batch in drawn]
    scale, limit = (fmean(longest), fmean(mean)), max(tokens for _, tokens in cdf)
    batches = tuple((high / scale[0], middle / scale[1]) for high, middle in zip(longest, mean, strict=True))
    return Lengths(batches, (limit / scale[0], limit / scale[1]))


def length_at(cdf: Cdf, at: float) -> float:
    """Tokens that a share `at` of the responses does not exceed: straight between the points."""
    place = bisect.bisect_left(cdf, (at,))
    if place == len(cdf):
        return cdf[-1][1]
    (low, a), (high, b) = cdf[place - 1] if place else (0.0, 1.0), cdf[place]
    return a + (b - a) * (at - low) / (high - low) if high > low else b


def with_real_lengths(arrivals: Sequence[Arrival], estimates: Estimates, seed: int) -> list[Arrival]:
    """The same jobs with phase times that vary around the given ones, placed on `estimates` of them."""
    rng = random.Random(f"lengths {seed}")
    names = sorted(lengths_by_workload())
    return [_uncertain(arrival, lengths_by_workload()[rng.choice(names)], estimates, rng.random()) for arrival in arrivals]


def _uncertain(arrival: Arrival, lengths: Lengths, estimates: Estimates, seed: float) -> Arrival:
    job = arrival.job
    profile = list(itertools.islice(_length_draws(job, lengths, random.Random(f"profile {seed}"))(), PROFILED_LENGTHS))
    draws = _length_draws(job, lengths, random.Random(f"run {seed}"))
    return Arrival(_estimated(job, lengths, profile, estimates), arrival.at_s, arrival.iterations, draws)


def _length_draws(job: JobSpec, lengths: Lengths, rng: random.Random) -> Callable[[], Iterator[tuple[float, float]]]:
    start = rng.random()

    def draws() -> Iterator[tuple[float, float]]:
        again = random.Random(start)
        while True:
            rollout, train = again.choice(lengths.batches)
            yield job.rollout.seconds * rollout, job.train.seconds * train

    return draws


def _estimated(job: JobSpec, lengths: Lengths, profile: Sequence[tuple[float, float]], estimates: Estimates) -> JobSpec:
    bounds = job.rollout.seconds * lengths.bound[0], job.train.seconds * lengths.bound[1]
    rollouts, trains = zip(*profile, strict=True)
    solo_s: float | None = job.sync_s + fmean(rollouts) + fmean(trains)
    if estimates.kind == "bound":
        seconds, solo_s = bounds, None
    elif estimates.kind == "mean":
        seconds = fmean(rollouts), fmean(trains)
    else:
        assert estimates.quantile is not None  # it comes with the kind, see parse_estimates
        seconds = upper_quantile(rollouts, estimates.quantile), upper_quantile(trains, estimates.quantile)
    rollout, train = (
        Estimate(seconds=min(given, bound), source=estimates.kind) for given, bound in zip(seconds, bounds, strict=True)
    )
    return msgspec.structs.replace(job, rollout=rollout, train=train, solo_s=solo_s)


def upper_quantile(observed: Sequence[float], quantile: float) -> float:
    """The smallest observation that lies at or above the quantile with a confidence of CONFIDENCE, whatever the
    distribution (a one-sided tolerance limit from order statistics); the largest one if none does."""
    ordered, below = sorted(observed), 0.0
    for rank, value in enumerate(ordered):
        below += math.comb(len(ordered), rank) * quantile**rank * (1 - quantile) ** (len(ordered) - rank)
        if below >= CONFIDENCE:
            return value
    return ordered[-1]
