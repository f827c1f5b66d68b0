"""A job as the placer sees it in each pair of pools, the questions that the placer is asked, and its answers as input of the
core.

Pure. `of_job` runs in the coordinator's loop; the Answerer in its placement thread, outside the path of leases: however long it
takes, phases are granted meanwhile. The planner is kept between answers, and made anew only where the record is not the one that
its last answer made. So an answer may depend on what it remembers; that is why an answer is an input, and as such in the journal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core.records import Planned, Said
from verl_mux.coordinator.core.settings import Config, kind_name
from verl_mux.errors import UserError
from verl_mux.placement.estimator import Bounds, bounds, job_spec, learnt, on_other_kinds
from verl_mux.placement.feasibility import Progress
from verl_mux.placement.job_needs import find_kind
from verl_mux.placement.model import COLOCATED, SEPARATE, Cluster, JobSpec, Pool
from verl_mux.placement.planner import Answer, Planner, Question, Record, pair_of
from verl_mux.placement.rules import check_fits
from verl_mux.placement.search import Alternative, Decision, Move
from verl_mux.profiling.eventlog import events


def of_job(asked: m.Register, config: Config) -> dict[str, JobSpec]:
    """The job in each pair of pools that could hold it. What it was seen to take counts for the first of them; in the others its
    phases last as many times as long as their bounds do, and the limit of its SLO stays. Raises UserError: no pair could."""
    found: dict[str, JobSpec] = {}
    refusals: list[UserError] = []
    known: tuple[JobSpec, Bounds] | None = None
    # Colocated, it is the same in all pairs of one training pool.
    same = {tuple(pool.name for pool in pools(asked, cluster)): pair for pair, cluster in reversed(config.clusters.items())}
    for pair in [pair for pair in config.clusters if pair in same.values()]:
        cluster = config.clusters[pair]
        try:
            _check_gpus(asked, cluster, config)
            there = _bounds(asked, cluster, config)
            spec = _on(asked, there, config)
            spec = spec if known is None else _elsewhere(spec, there, *known)
            check_fits(spec, cluster, config.placing.rules())
        except UserError as error:
            refusals.append(error)
            continue
        found[pair] = spec
        known = known or (spec, there)
    if not found:
        raise refusals[0]
    return found


def pools(asked: m.Register, cluster: Cluster) -> tuple[Pool, Pool]:
    """On which it rolls out and trains."""
    return cluster.train if asked.colocated else cluster.rollout, cluster.train


def claimed_pair(asked: m.Register, config: Config) -> str:
    """The pair of pools in which a job says that it was placed, if in any."""
    rollout = [] if asked.colocated else asked.placed.get("rollout", [])
    return pair_of(rollout, asked.placed.get("train", []), config.clusters)


def _check_gpus(asked: m.Register, cluster: Cluster, config: Config) -> None:
    for side, pool in zip(m.SIDES, pools(asked, cluster), strict=True):
        gpus, least = getattr(asked.needs, f"{side}_gpus"), min(node.gpus for node in config.pools[pool.name].nodes)
        if gpus > least:
            raise UserError(
                f"job {asked.job!r} asks for {gpus} GPUs on each {side} node; those of pool {pool.name!r} have {least}"
            )


def _bounds(asked: m.Register, cluster: Cluster, config: Config) -> Bounds:
    assert asked.needs is not None
    names = [pool.name for pool in pools(asked, cluster)]
    rollout, train = (find_kind(kind_name(name, config.pools[name]), config.placing.kinds) for name in names)
    return bounds(asked.needs, rollout, train)


def _on(asked: m.Register, found: Bounds, config: Config) -> JobSpec:
    placement, needs = config.placing, asked.needs
    assert needs is not None
    slo = placement.slo if asked.slo is None else asked.slo
    spec = learnt(job_spec(asked.job, needs, found, slo), asked.profiled, "profile")
    modes = (COLOCATED if asked.colocated else SEPARATE,)
    return msgspec.structs.replace(spec, movable=asked.movable, move_s=placement.move_s, modes=modes, colocated=asked.colocated)


def _elsewhere(spec: JobSpec, there: Bounds, known: JobSpec, before: Bounds) -> JobSpec:
    """As `known` is where its phases are bound by `before`. Raises UserError: it would be later alone than its SLO allows."""
    scaled = on_other_kinds(known, before, there)
    if scaled.iteration_s > known.limit_s:
        raise UserError(
            f"job {spec.name!r} would take {scaled.iteration_s:.0f} s an iteration alone, its SLO allows {known.limit_s:.0f} s"
        )
    memory = {"rollout_memory_gb": spec.rollout_memory_gb, "train_memory_gb": spec.train_memory_gb}
    return msgspec.structs.replace(scaled, slo=known.limit_s / scaled.iteration_s, **memory)


# Places of which the log says why they lost; all of them would take longer than the decision.
EXPLAINED = 8


class Asked(msgspec.Struct, frozen=True):
    """One question, and all that the answer depends on. closed: nodes that the placer may not give. held: jobs that it may not
    move, as they are on their way. now: in seconds."""

    question: Question
    record: Record
    config: Config
    closed: frozenset[str]
    now: float
    held: frozenset[str] = frozenset()


class Answerer:
    """Answers one question at a time, in the order in which they were asked."""

    def __init__(self) -> None:
        self._planner: Planner | None = None
        self._made_for: tuple[Config, frozenset[str], int] | None = None

    def answer(self, asked: Asked, progress: Mapping[str, Progress]) -> Planned:
        planner = self._kept(asked)
        planner.held = asked.held
        self._made_for = None  # until the answer is whole
        planner.touched.clear()
        found = planner.answer(asked.question, progress, asked.now, EXPLAINED)
        touched = {name: planner.groups.get(name) for name in sorted(planner.touched)}
        self._made_for = (asked.config, asked.closed, asked.record.version + 1)
        return Planned(
            version=asked.record.version,
            changed=[group for group in touched.values() if group is not None],
            gone=[name for name, group in touched.items() if group is None],
            waiting=list(planner.waiting),
            named=planner.named,
            moves=list(found.moves),
            said=_events(found),
            moved_at=list(planner.moved_at),
            pending=planner.pending,
            because=found.because,
        )

    def _kept(self, asked: Asked) -> Planner:
        before = self._made_for
        config, closed, version = before if before is not None else (None, None, None)
        if self._planner is None or config is not asked.config or (closed, version) != (asked.closed, asked.record.version):
            self._planner = Planner(asked.config.clusters, asked.config.placing.rules(), asked.record, asked.closed)
        return self._planner


def nothing_follows(asked: Asked) -> Planned:
    """The answer to a question that could not be answered."""
    record = asked.record
    return Planned(
        version=record.version,
        changed=[],
        gone=[],
        waiting=list(record.waiting),
        named=record.named,
        moved_at=list(record.moved_at),
    )


def _events(found: Answer) -> list[Said]:
    """What the event log says about an answer."""
    if found.decision is not None and found.spec is not None:
        return [_placed(found.decision, found.spec, found.decision.alternatives)]
    risks = [
        Said(events.SLO_AT_RISK, {"kind": done.kind, "group": done.group, "job": done.job, "reason": done.reason})
        for done in found.actions
    ]
    started = [
        {"job": move.job, "outcome": "placed", "group": move.group, "nodes": _sides(move)}
        for move in found.moves
        if move.kind == "start"
    ]
    return [*risks, *(Said(events.PLACED, about) for about in started)]


def _placed(decision: Decision, spec: JobSpec, others: Sequence[Alternative]) -> Said:
    """The decision, what was estimated, and why each alternative lost."""
    about = {name: getattr(decision, name) for name in ("job", "outcome", "strategy", "group", "usd_per_hour", "wait")}
    estimated = {"rollout_s": spec.rollout.seconds, "train_s": spec.train.seconds, "source": spec.rollout.source}
    memory = {"rollout_memory_gb": spec.rollout_memory_gb, "train_memory_gb": spec.train_memory_gb}
    lost = [{"group": place.group, "strategy": place.strategy, "why": place.why} for place in others]
    return Said(events.PLACED, {**about, "nodes": _sides(decision), "estimated": {**estimated, **memory}, "alternatives": lost})


def _sides(placed: Decision | Move) -> dict[str, list[str]]:
    return {"rollout": list(placed.rollout), "train": list(placed.train)}
