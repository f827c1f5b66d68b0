"""What is learnt of a job while it runs: how long its phases take now, how much they vary, and whether they drift. Pure.

Estimates follow the last `RECENT` steps, since responses grow and shrink while a model learns; how much phases vary is taken from
the differences between neighbouring steps, which a slow drift hardly touches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median

import msgspec

from verl_mux.placement.estimate.estimator import Observed, seen
from verl_mux.placement.model import Estimate, JobSpec

RECENT = 12
# So many steps are needed before they say more than what was known.
LEAST = 3
# How much phases vary before anybody has seen it (as RollMux, arXiv 2512.11306v2, figure 10), and so many steps' worth of it.
PRIOR_CV, PRIOR_STEPS = 0.1, 4
# A change by less, or by less than so many standard errors, is no drift.
WORTH, ERRORS = 0.03, 3.0


def learnt(job: JobSpec, observed: Observed, source: str = "mean") -> JobSpec:
    """The job as its last steps were; unchanged before LEAST of them. Observed rollouts hold the sync. The time between phases
    holds no node: it counts as the end of the rollout."""
    if observed.steps < LEAST:
        return job
    between = median(observed.between[-RECENT:]) if observed.between else 0.0
    rollout, train = _estimate(observed.rollout, job.rollout, between, source), _estimate(observed.train, job.train, 0.0, source)
    return msgspec.structs.replace(job, rollout=rollout, train=train, tail_s=between, sync_s=0.0, solo_s=None)


def corrected(job: JobSpec, observed: Observed) -> JobSpec | None:
    """The job as it was seen lately, if that is other than what it is placed by."""
    now = learnt(job, observed)
    return now if now is not job and drifted(job, now) else None


def drifted(job: JobSpec, now: JobSpec) -> bool:
    """Whether the phases of `now` differ from those that the job was placed by, beyond what chance would do."""
    rollout = msgspec.structs.replace(job.rollout, seconds=job.rollout.seconds + job.sync_s, bound_s=None)
    return _differ(rollout, now.rollout) or _differ(job.train, now.train)


def _differ(before: Estimate, now: Estimate) -> bool:
    if before.seconds == 0 or before.source == "bound":
        return now.seconds != before.seconds
    off = abs(now.seconds / before.seconds - 1)
    return off > max(WORTH, ERRORS * math.hypot(now.unsure, 0 if before.source == "given" else before.unsure))


def _estimate(seconds: Sequence[float], before: Estimate, more: float, source: str) -> Estimate:
    recent = seconds[-RECENT:]
    mean = fmean(recent)
    cv = _cv(recent, mean)
    return msgspec.structs.replace(seen(before, mean + more, source), cv=cv, unsure=cv / math.sqrt(len(recent)))


def _cv(seconds: Sequence[float], mean: float) -> float:
    """From differences of neighbours, whose variance is twice that of a step; with the prior's steps beside them."""
    squares = [((b - a) / mean) ** 2 / 2 for a, b in zip(seconds, seconds[1:], strict=False)] if mean else []
    return math.sqrt((PRIOR_CV**2 * PRIOR_STEPS + sum(squares)) / (PRIOR_STEPS + len(squares)))
