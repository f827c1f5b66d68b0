"""With what probability a group keeps every SLO while the phases of all its jobs vary together.

Each path draws, for every job, how far its estimates are off and how every single step varies (log-normal, by `Estimate.unsure`
and `Estimate.cv`), and runs the group. A job keeps its SLO on a path if its mean iteration there is at most so many times what
the very same iterations take alone. Quantiles job by job would count every job slow at once; here a slow step of one may meet a
quick one of another, and waiting that adds up only where phases vary is seen.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence

from verl_mux.placement.model import Estimate, JobSpec
from verl_mux.placement.time.group_run import GroupRun, Member
from verl_mux.placement.time.order import IN_ROUNDS, ORDERS

PATHS, ITERATIONS = 8, 10
_TOLERANCE = 1 + 1e-9


def likely(jobs: Sequence[JobSpec], rollout: Sequence[int], train: Sequence[int], order: str, keep: float) -> bool:
    """Whether all keep their SLOs with a probability of at least `keep`, as far as PATHS paths tell. The same question has the
    same answer. rollout, train: nodes of each job as bits of one numbering."""
    if not any(estimate.cv or estimate.unsure for job in jobs for estimate in (job.rollout, job.train)):
        return True
    rng = random.Random("".join(job.name for job in jobs))
    broken, most = 0, math.floor((1 - keep) * PATHS)
    for _ in range(PATHS):
        broken += not _kept(jobs, rollout, train, order, rng)
        if broken > most:
            return False
    return True


def _kept(jobs: Sequence[JobSpec], rollout: Sequence[int], train: Sequence[int], order: str, rng: random.Random) -> bool:
    run = GroupRun(rounds=order in IN_ROUNDS)
    drawn: dict[str, list[float]] = {}
    for job, held, trained, rank in zip(jobs, rollout, train, ORDERS[order](jobs), strict=True):
        alone = drawn[job.name] = []
        rollouts = _draws(job.rollout, job.rollout_hold_s, rng, alone)
        times = rollouts, itertools.repeat(job.tail_s), _draws(job.train, job.train.seconds, rng, alone)
        run.join(Member(job.name, held, trained, times, (job.rollout_switch_s, job.train_switch_s), rank, job.tail_s > 0))
    ends: dict[str, list[float]] = {job.name: [] for job in jobs}
    for _ in range(2 * ITERATIONS * len(jobs) * 3):
        if (member := run.step()) is not None:
            ends[member.name].append(run.now)
            if min(len(times) for times in ends.values()) >= ITERATIONS:
                break
    return all(_in_time(job, ends[job.name], drawn[job.name]) for job in jobs)


def _in_time(job: JobSpec, ends: Sequence[float], drawn: Sequence[float]) -> bool:
    """From the end of its first iteration on: how all begin at once says nothing."""
    if len(ends) < 2:
        return False
    alone = sum(drawn[2 : 2 * len(ends)]) + job.tail_s * (len(ends) - 1)
    return ends[-1] - ends[0] <= job.slo * alone * _TOLERANCE


def _draws(estimate: Estimate, seconds: float, rng: random.Random, drawn: list[float]) -> Iterator[float]:
    """Endless; each is written down."""
    mean = seconds * _factor(rng, estimate.unsure)
    while True:
        drawn.append(mean * _factor(rng, estimate.cv))
        yield drawn[-1]


def _factor(rng: random.Random, cv: float) -> float:
    """Log-normal, of mean 1 and this standard deviation."""
    if not cv:
        return 1.0
    spread = math.log1p(cv * cv)
    return math.exp(rng.gauss(-spread / 2, math.sqrt(spread)))
