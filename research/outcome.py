"""A few figures for each policy, from its runs over all seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

import msgspec

from research.ledger import TOLERANCE, Finished, Run, Span
from research.optimum.optimum import Compared, Optimum
from research.workload.moments import Moments
from verl_mux.placement.model import Cluster


class Outcome(msgspec.Struct, frozen=True):
    """One run. usd_per_hour_mean: all USD over the hours the trace spans if every job runs alone, so that slower jobs
    do not thin the cost out. slo_attainment: jobs that stayed no longer, from placed to ended, than SLO times their
    planned time alone; _real: than SLO times what the very same iterations would have taken alone, waiting and profiling apart.
    lost_work_h: of the jobs' time that moves took, with the parts of iterations they threw away. optimum_covers:
    part of the time in which the optimum is known. idle: part of the node-seconds held in which no phase ran."""

    usd_per_hour_mean: float
    usd_per_hour_peak: float
    slo_attainment: float
    slo_attainment_real: float
    cost_over_optimum_mean: float | None
    optimum_covers: float
    idle_rollout: float | None
    idle_train: float | None
    peak_gpus_rollout: float
    peak_gpus_train: float
    slowdown_mean: float
    moves: int
    lost_work_h: float
    profile_s_mean: float
    wait_s_mean: float
    wait_s_max: float


def assess(run: Run, cluster: Cluster, moments: Mapping[str, Moments], optimum: Optimum | None) -> Outcome:
    """optimum: of jobs as they are in `moments`."""
    ledger, jobs = run.ledger, run.finished
    compared = optimum.compare([_as_they_were(span, moments) for span in run.spans]) if optimum else Compared(None, 0.0)
    idle = [1 - busy / held if held else None for busy, held in zip(ledger.busy_s, ledger.held_s, strict=True)]
    return Outcome(
        usd_per_hour_mean=ledger.usd / span_h(jobs),
        usd_per_hour_peak=ledger.peak_usd_per_hour,
        slo_attainment=fmean(job.stay_s <= job.slo * job.planned_solo_s * TOLERANCE for job in jobs),
        slo_attainment_real=fmean(job.stay_s <= job.slo * job.solo_s * TOLERANCE for job in jobs),
        cost_over_optimum_mean=compared.over,
        optimum_covers=compared.covers,
        idle_rollout=idle[0],
        idle_train=idle[1],
        peak_gpus_rollout=ledger.peak_nodes[0] * cluster.rollout.kind.gpus,
        peak_gpus_train=ledger.peak_nodes[1] * cluster.train.kind.gpus,
        slowdown_mean=fmean(job.stay_s / job.solo_s for job in jobs),
        moves=sum(job.moves for job in jobs),
        lost_work_h=sum(job.lost_s for job in jobs) / 3600,
        profile_s_mean=fmean(job.profile_s for job in jobs),
        wait_s_mean=fmean(job.placed_s - job.arrived_s - job.profile_s for job in jobs),
        wait_s_max=max(job.placed_s - job.arrived_s - job.profile_s for job in jobs),
    )


def _as_they_were(span: Span, moments: Mapping[str, Moments]) -> tuple[float, frozenset[str], float]:
    names = frozenset(moments[name].at(step).name for name, step in span.steps.items())
    return span.seconds, names, span.usd_per_hour


def span_h(jobs: Sequence[Finished]) -> float:
    """From the first arrival to the last end, if every job ran its real iterations alone: whatever they were estimated at, so
    that runs on different estimates can be compared."""
    ends = max(job.arrived_s + job.solo_s for job in jobs)
    return (ends - min(job.arrived_s for job in jobs)) / 3600


def summarise(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """Means over the seeds (peaks and waits: the highest), rounded to six digits after the point."""

    def mean(field: str) -> float | None:
        values = [value for outcome in outcomes if (value := getattr(outcome, field)) is not None]
        return round(fmean(values), 6) if values else None

    def most(field: str) -> float:
        return round(max(getattr(outcome, field) for outcome in outcomes), 6)

    means = ("usd_per_hour_mean", "slo_attainment", "slo_attainment_real", "cost_over_optimum_mean", "optimum_covers")
    return {
        **{field: mean(field) for field in means},
        "usd_per_hour_peak": most("usd_per_hour_peak"),
        "idle": {"rollout": mean("idle_rollout"), "train": mean("idle_train")},
        "peak_gpus": {"rollout": most("peak_gpus_rollout"), "train": most("peak_gpus_train")},
        "slowdown_mean": mean("slowdown_mean"),
        "moves_mean": mean("moves"),
        "lost_work_h": mean("lost_work_h"),
        "profile_s_mean": mean("profile_s_mean"),
        "wait_s_mean": mean("wait_s_mean"),
        "wait_s_max": most("wait_s_max"),
    }
