"""Which job held which node when, which waited, and how fast jobs stepped: from intervals, never from counters.

A node's pool is the one its leases name; where they name none, nodes used only by rollouts form the pool "rollout", those used
only by training "train", those used by both "shared". Runs in the report; called by analysis.py and
findings/; pure.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter
from statistics import median
from typing import Any

import numpy as np
import polars as pl

from verl_mux.profiling.eventlog import events
from verl_mux.profiling.plain.lines import Interval, clip, length, throughput_ratio

AWAY, AWAY_S = 5.0, 600.0  # longest phases, and seconds, without any work: the time between two runs is no bubble
MARK_SLACK = 0.1  # seconds: a segment's first lease may be logged as begun a little before the segment's mark
LONGER = 0.75  # quantile of a job's phases
WORK = set(events.POOL_OF_PHASE)  # `init` is not work that a pool is paid for


@dataclass(frozen=True)
class Hold:
    """A phase of a job on its nodes, or the wait for the lease of one. Seconds since the epoch.

    behind: of a wait, seconds by the job that held one of the nodes meanwhile.
    """

    job: str
    phase: str
    nodes: tuple[str, ...]
    start: float
    end: float
    step: int
    pool: str | None = None
    behind: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Segment:
    """A part of the run in which jobs take turns in one manner."""

    index: int
    mode: str
    window: Interval


@dataclass(frozen=True)
class Leases:
    """The run's holds and waits in order of start, nodes by pool, and segments."""

    holds: list[Hold]
    waits: list[Hold]
    pools: dict[str, list[str]]
    segments: list[Segment]

    def busy(self, node: str, window: Interval) -> list[Interval]:
        """When work ran on `node`, inside `window`."""
        return clip([(h.start, h.end) for h in self.holds if node in h.nodes and h.phase in WORK], window)

    def usual_hold(self, job: str, nodes: tuple[str, ...]) -> float:
        """Seconds of a longer phase of the job (its upper quartile) on any of these nodes; 0 without any."""
        return max((self._usual_holds.get((job, node), 0.0) for node in nodes), default=0.0)

    @cached_property
    def _usual_holds(self) -> dict[tuple[str, str], float]:
        held: dict[tuple[str, str], list[float]] = defaultdict(list)
        for hold in self.holds:
            for node in hold.nodes if hold.phase in WORK else ():
                held[hold.job, node].append(hold.seconds)
        return {place: float(np.quantile(seconds, LONGER)) for place, seconds in held.items()}

    def bubble(self, pool: str, window: Interval) -> float:
        """Part of the pool's node time, 0 to 1, in which no phase ran."""
        nodes = self.pools[pool]
        whole = (window[1] - window[0]) * len(nodes)
        return 1 - sum(length(self.busy(node, window)) for node in nodes) / whole if whole > 0 else 0.0


def make_leases(spans: pl.DataFrame) -> Leases:
    """From the coordinator's `lease_held` and `lease_wait`; without a coordinator, from each trainer's `phase`."""
    coordinator = spans.filter(pl.col("role") == "coordinator")
    leased = _with_steps(coordinator.filter(pl.col("event").is_in([events.LEASE_HELD, events.LEASE_WAIT])), spans)
    held, waited = (leased.filter(pl.col("event") == event) for event in (events.LEASE_HELD, events.LEASE_WAIT))
    if held.is_empty():
        trainer = spans.filter(pl.col("role") == "trainer")
        held = trainer.filter((pl.col("event") == events.PHASE) & pl.col("phase").is_not_null())
        waited = trainer.filter(pl.col("event") == events.LEASE_WAIT)
    holds = [_hold(row) for row in held.sort("start").iter_rows(named=True)]
    holders = _Holders(holds)
    waits = [replace(wait, behind=holders.during(wait)) for wait in map(_hold, waited.sort("start").iter_rows(named=True))]
    return Leases(holds, waits, _pools(holds), _segments(coordinator, holds))


def _with_steps(leased: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Where a coordinator logged no step of a phase, it is the one of the job that ended next."""
    ends = spans.filter((pl.col("event") == events.STEP) & (pl.col("role") == "trainer")).sort("end")
    ends = ends.select("end", of_job="job", ended="step")
    found = leased.sort("end").join_asof(ends, on="end", by="of_job", strategy="forward", check_sortedness=False)
    lacks = (pl.col("step") == 0) & (pl.col("phase") != "init")
    return found.with_columns(step=pl.when(lacks).then(pl.coalesce("ended", "step")).otherwise("step")).drop("ended")


def _hold(row: dict) -> Hold:
    nodes = tuple(row["nodes"] or ([row["node"]] if row["node"] else [events.POOL_OF_PHASE.get(row["phase"], "node")]))
    return Hold(row["of_job"] or row["job"], row["phase"] or "phase", nodes, row["start"], row["end"], row["step"], row["pool"])


class _Holders:
    """Which jobs held a node in a given time; arrays, for a long run has tens of thousands of holds and waits."""

    def __init__(self, holds: list[Hold]) -> None:
        self.jobs, self.start, self.end = (np.array([getattr(hold, key) for hold in holds]) for key in ("job", "start", "end"))
        nodes = {node for hold in holds for node in hold.nodes}
        self.nodes = {node: np.array([node in hold.nodes for hold in holds]) for node in nodes}

    def during(self, wait: Hold) -> dict[str, float]:
        """Seconds by job, of other jobs that held one of the wait's nodes."""
        named = [self.nodes[node] for node in wait.nodes if node in self.nodes]
        if not named:
            return {}
        shared = np.minimum(self.end, wait.end) - np.maximum(self.start, wait.start)
        behind: dict[str, float] = defaultdict(float)
        for index in np.flatnonzero(np.logical_or.reduce(named) & (shared > 0) & (self.jobs != wait.job)):
            behind[str(self.jobs[index])] += float(shared[index])
        return dict(behind)


def _pools(holds: list[Hold]) -> dict[str, list[str]]:
    phases: dict[str, set[str]] = defaultdict(set)
    for hold in holds:
        for node in hold.nodes if hold.phase in WORK else ():
            phases[node].add(events.POOL_OF_PHASE[hold.phase])
    named = {node: hold.pool for hold in holds if hold.pool for node in hold.nodes}
    pools: dict[str, list[str]] = defaultdict(list)
    for node, kinds in sorted(phases.items()):
        pools[named.get(node) or (kinds.pop() if len(kinds) == 1 else "shared")].append(node)
    return dict(pools)


def _segments(coordinator: pl.DataFrame, holds: list[Hold]) -> list[Segment]:
    work = [hold for hold in holds if hold.phase in WORK]
    if not work:
        return []
    first, last = work[0].start, max(hold.end for hold in work)
    marks = coordinator.filter(pl.col("event") == events.SEGMENT).sort("end").select("end", "mode").rows()
    last_end = np.maximum.accumulate([hold.end for hold in work])
    away = max(AWAY * max(hold.seconds for hold in work), AWAY_S)
    marks += [(hold.start, None) for hold, end in zip(work[1:], last_end[:-1], strict=True) if hold.start - end > away]
    marks = (
        [(first, None)]
        + [(at - MARK_SLACK, mode) for at, mode in sorted(marks, key=itemgetter(0)) if first < at - MARK_SLACK < last]
        + [(last, None)]
    )
    segments = []
    for index, ((start, mode), (end, _)) in enumerate(itertools.pairwise(marks)):
        inside = [hold for hold in work if start <= hold.start < end]
        if inside:
            window = (inside[0].start, min(end, max(hold.end for hold in inside)))
            segments.append(Segment(index, mode or _mode(inside), window))
    return segments


def _mode(holds: list[Hold]) -> str:
    """`alone` for one job; else how several shared the nodes, by the order of their phases."""
    if len({hold.job for hold in holds}) == 1:
        return "alone"
    for one, other in ((a, b) for i, a in enumerate(holds) for b in holds[i + 1 : i + 9]):
        if one.job != other.job and set(one.nodes) & set(other.nodes) and other.start < one.end - 0.05:
            return "uncoordinated"
    changes = sum(one.job != other.job for one, other in itertools.pairwise(holds))
    return "sequential" if changes < len({hold.job for hold in holds}) else "interleaved"


Ends = dict[str, list[float]]  # job -> when its steps ended, in order


def step_ends(spans: pl.DataFrame) -> Ends:
    """From the trainers' `step` events."""
    steps = spans.filter((pl.col("event") == events.STEP) & (pl.col("role") == "trainer")).sort("end")
    return {job: rows["end"].to_list() for (job,), rows in steps.group_by("job", maintain_order=True)}


def shared_window(segment: Segment, ends: Ends) -> Interval:
    """From when every job has ended a step of the segment until the first job is through; the segment where that is empty."""
    inside = [[end for end in found if _within(end, segment)] for found in ends.values()]
    if not inside or not all(inside):
        return segment.window
    start, end = max(found[0] for found in inside), min(found[-1] for found in inside)
    return (start, end) if end > start else segment.window


def _within(end: float, segment: Segment) -> bool:
    return segment.window[0] < end <= segment.window[1] + 1.0  # a step ends a moment after its last lease


def throughput(leases: Leases, ends: Ends) -> dict[str, Any] | None:
    """`alone_s` and `together_s` by job, and their `ratio` (throughput_ratio). None without both."""
    alone = _periods([s for s in leases.segments if s.mode == "sequential"], ends, whole=True)
    together = _periods([s for s in leases.segments if s.mode == "interleaved"], ends, whole=False)
    if set(alone) != set(ends):
        return None
    ratio = throughput_ratio(alone, together)
    periods = {"alone_s": alone, "together_s": together}
    rounded = {key: {job: round(period, 4) for job, period in by_job.items()} for key, by_job in periods.items()}
    return None if ratio is None else {"ratio": ratio, **rounded}


def _periods(segments: list[Segment], ends: Ends, whole: bool) -> dict[str, float]:
    found: dict[str, list[float]] = defaultdict(list)
    for segment in segments:
        until = float("inf") if whole else shared_window(segment, ends)[1]
        for job, times in ends.items():
            inside = [end for end in times if _within(end, segment) and end <= until]
            found[job] += [b - a for a, b in itertools.pairwise(inside)]
    return {job: median(periods) for job, periods in found.items() if periods and median(periods) > 0}
