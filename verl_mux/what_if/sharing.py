"""Who shared nodes with whom, and what a step of each job held of them besides its rollout and training. Read from leases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from verl_mux.coordinator.core.settings import Mode
from verl_mux.profiling.report.measures.analysis import Analysis
from verl_mux.profiling.report.measures.lease_times import Hold, Leases, Segment
from verl_mux.what_if.recording import Recording

# Where nobody waits for leases, engines slow each other, which no model here says.
ORDERLY: tuple[Mode, ...] = ("interleaved", "sequential")


@dataclass(frozen=True)
class Share:
    """What one job took. rollout, train: nodes. replicas: of each rollout node, by number; empty where the log does not say.

    before_s, after_s: seconds of a rollout's lease before its first request and after its last. between_s: of a step without a
    lease, waits for one aside. steps: in the time in which the jobs took turns.
    """

    rollout: tuple[str, ...]
    train: tuple[str, ...]
    replicas: dict[str, tuple[int, ...]]
    before_s: float
    after_s: float
    between_s: float
    steps: int

    @property
    def can_shrink(self) -> bool:
        """May a part of its rollout nodes go back before the others?"""
        return len(self.replicas) > 1 and set(self.replicas) == set(self.rollout)


@dataclass(frozen=True)
class Sharing:
    """Jobs that share nodes. mode: of the coordinator's schedule. recorded_s: seconds in which they took turns."""

    shares: dict[str, Share]
    mode: Mode
    recorded_s: float


def sharings(analysis: Analysis, recordings: Mapping[str, Recording]) -> list[Sharing]:
    """Of these jobs, those that took turns on nodes, in the last part of the run in which several did."""
    leases = analysis.leases
    for segment in reversed(leases.segments):
        if together := _together(leases, segment, set(recordings)):
            modes = [mode for mode in ORDERLY if mode == segment.mode]
            return [_sharing(analysis, recordings, segment, mode, jobs) for jobs in together for mode in modes]
    return []


def _together(leases: Leases, segment: Segment, known: set[str]) -> list[list[str]]:
    """Jobs joined by common nodes. One of which the log says too little would be missed by the others: none of those then."""
    holds = _work(leases, segment)
    jobs: list[set[str]] = []
    for node in {node for hold in holds for node in hold.nodes}:
        mine = {hold.job for hold in holds if node in hold.nodes}
        near = [its for its in jobs if its & mine]
        jobs = [its for its in jobs if not its & mine] + [mine.union(*near)]
    return sorted(sorted(its) for its in jobs if len(its) > 1 and its <= known)


def _work(leases: Leases, segment: Segment) -> list[Hold]:
    start, end = segment.window
    return [hold for hold in leases.holds if hold.phase in ("rollout", "train") and start <= hold.start < end]


def _sharing(
    analysis: Analysis, recordings: Mapping[str, Recording], segment: Segment, mode: Mode, jobs: Sequence[str]
) -> Sharing:  # fmt: skip
    holds = [hold for hold in _work(analysis.leases, segment) if hold.job in jobs]
    shares = {}
    for job in jobs:
        mine = [hold for hold in holds if hold.job == job]
        shares[job] = _share(recordings[job], mine, _replicas(analysis, recordings[job]))
    recorded = max(hold.end for hold in holds) - min(hold.start for hold in holds)
    return Sharing(shares, mode, recorded)


def _replicas(analysis: Analysis, recording: Recording) -> dict[str, tuple[int, ...]]:
    """Numbers of those of each node, counted from 0 as a rerun's are; none where the log does not say of each where it is."""
    nodes = sorted((number, node) for (job, number), node in analysis.engines.node_of.items() if job == recording.job)
    out: dict[str, tuple[int, ...]] = {}
    for number, (_, node) in enumerate(nodes):
        out[node] = (*out.get(node, ()), number)
    return out if len(nodes) == recording.replicas else {}


def _share(recording: Recording, holds: Sequence[Hold], replicas: dict[str, tuple[int, ...]]) -> Share:
    rollout, train = ([hold for hold in holds if hold.phase == phase] for phase in ("rollout", "train"))
    before, after, between = [], [], []
    for step in recording.steps:
        around = [hold for hold in rollout if hold.start <= step.start < hold.end]
        trained = [hold.end - hold.start for hold in train if hold.step == step.step]
        if not around or not trained:
            continue
        before.append(step.start - min(hold.start for hold in around))
        after.append(max(max(hold.end for hold in around) - step.start - step.rollout_s, 0.0))
        between.append(max(step.rest_s - before[-1] - after[-1] - sum(trained), 0.0))
    return Share(
        _nodes(rollout), _nodes(train), replicas, _median(before), _median(after), _median(between),
        len({hold.step for hold in rollout}),
    )  # fmt: skip


def _nodes(holds: Sequence[Hold]) -> tuple[str, ...]:
    return tuple(sorted({node for hold in holds for node in hold.nodes}))


def _median(seconds: Sequence[float]) -> float:
    return float(np.median(seconds)) if seconds else 0.0
