"""Jobs whose response lengths vary, placed on estimates of their phase times.

Every iteration generates a batch with lengths drawn from a measured distribution (RollMux, arXiv 2512.11306v2, figure
11, digitised). Its rollout lasts in proportion to the longest response, its training in proportion to the mean (as the
paper's section 3.2 has it); a shape's phase times are the means of these. What a job is placed on:

    bound      every response at the longest length, for the phases and for the time alone (the paper's choice)
    mean       the mean of the profiled iterations
    quantile:Q an upper bound of the Q-quantile of phase times at 95 % confidence, from the profiled iterations; the time
               alone, which the SLO counts from, is their mean: no slower phase raises what the SLO allows
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
from verl_mux.placement.model import Estimate, JobSpec

BATCH = 256
# Different batches drawn per distribution; iterations take one of them at random.
BATCHES = 256
PROFILED = 32  # iterations observed before a job is placed
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
    profile = list(itertools.islice(_draws(job, lengths, random.Random(f"profile {seed}"))(), PROFILED))
    draws = _draws(job, lengths, random.Random(f"run {seed}"))
    return Arrival(_estimated(job, lengths, profile, estimates), arrival.at_s, arrival.iterations, draws)


def _draws(job: JobSpec, lengths: Lengths, rng: random.Random) -> Callable[[], Iterator[tuple[float, float]]]:
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
        Estimate(seconds=min(given, bound), bound_s=bound, source=estimates.kind)
        for given, bound in zip(seconds, bounds, strict=True)
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
