"""What a simulated run leaves behind, and a few figures for each policy from its runs over all seeds.

Written by replay.py and fluid.py, read by simulate.py; pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

import msgspec

from research.optimum import Compared, Optimum
from research.workload.varying import Moments
from verl_mux.placement.model import Cluster

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

    def add(self, seconds: float, nodes: tuple[float, float], usd_per_hour: float) -> None:
        """Nodes held beside those given to `hold`; they are in no peak."""
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


class Span(msgspec.Struct, frozen=True):
    """seconds in which no job came, went or moved. steps: of the jobs placed, how many each had done when it began."""

    seconds: float
    steps: Mapping[str, int]
    usd_per_hour: float


class Run(msgspec.Struct, frozen=True):
    """spans: one after the other."""

    finished: list[Finished]
    ledger: Ledger
    spans: list[Span]


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
