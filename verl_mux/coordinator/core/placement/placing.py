"""Applies the placer's decisions (scheduling/placer, which makes them) to the coordinator's records. Pure.

Jobs that leave their nodes to the coordinator are placed when they come, the rest planned anew when they go:

    asked for `auto` -> estimated from its needs -> placed | waits -> placed when somebody leaves -> gone
                                                        observed step by step: estimates corrected, errors recorded

The decisions are the same that `verl-mux plan` and `verl-mux simulate` ask. A placer is
made from the records for each decision and its memory written back, so a restart finds every placement as it was.
Nodes that jobs name themselves are out of its hands as long as those jobs live.
"""

from __future__ import annotations

from collections.abc import Sequence

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core.inputs_and_instructions import Instruction, Log
from verl_mux.coordinator.core.placement.observing import progress
from verl_mux.coordinator.core.placement.prediction import predicted
from verl_mux.coordinator.core.records import Job, JobState, State, Watched
from verl_mux.coordinator.core.settings import Config, cluster, kind_name
from verl_mux.errors import UserError
from verl_mux.profiling.eventlog import events
from verl_mux.scheduling.estimate.estimator import bounds, job_spec
from verl_mux.scheduling.estimate.gpu_kinds import find_kind
from verl_mux.scheduling.estimate.job_needs import JobNeeds
from verl_mux.scheduling.model import Group, JobSpec, Pin
from verl_mux.scheduling.placer.explain import alternatives, lost_to
from verl_mux.scheduling.placer.placer import Placer
from verl_mux.scheduling.placer.record import Record, record_of, restore
from verl_mux.scheduling.search.decision import Alternative, Decision, Move


def check(asked: m.Register, state: State, config: Config) -> None:
    """Whether the job can ever be placed. Raises UserError."""
    if config.placement is None:
        raise UserError(
            f"job {asked.job!r} leaves its nodes to the coordinator, which has no `placement: scheduler`; name nodes:"
            f" {config.describe_pools()}"
        )
    if asked.needs is None:
        raise UserError(f"job {asked.job!r} leaves its nodes to the coordinator but does not say what it needs")
    if asked.slo is not None and not asked.slo >= 1:
        raise UserError(f"job {asked.job!r}: slo is {asked.slo:g}; an SLO is a factor of at least 1")
    for side in m.SIDES:
        pool = getattr(config.placement, side)
        gpus, least = getattr(asked.needs, f"{side}_gpus"), min(node.gpus for node in config.pools[pool].nodes)
        if gpus > least:
            raise UserError(f"job {asked.job!r} asks for {gpus} GPUs on each {side} node; those of pool {pool!r} have {least}")
    if asked.placed:
        _check_claimed(asked, asked.needs, config)
    if state.placed.job(asked.job) is None:
        Placer(cluster(config.placement, config.pools), config.placement.rules()).admit(_spec(asked, config))


def _check_claimed(asked: m.Register, needs: JobNeeds, config: Config) -> None:
    """Whether a job can have been placed where it says it was. Raises UserError."""
    for side in m.SIDES:
        names, count = asked.placed.get(side, []), getattr(needs, f"{side}_nodes")
        pool = [node.name for node in config.pools[getattr(config.placing, side)].nodes]
        if len(set(names)) != count or len(names) != count or not set(names) <= set(pool):
            raise UserError(
                f"job {asked.job!r} says it was placed on {names[: count + 1]} for {side}; allowed: {count} of {', '.join(pool)}"
            )


def named_by_hand(asked: m.Register, nodes: dict[str, list[str]], state: State) -> None:
    """Raises UserError where a job names nodes that placed jobs hold."""
    for group in state.placed.groups:
        for node in (*group.rollout_nodes, *group.train_nodes):
            if any(node in names for names in nodes.values()):
                jobs = ", ".join(job.name for job in group.jobs)
                raise UserError(
                    f"job {asked.job!r} names node {node!r}, on which the coordinator has placed {jobs}; leave the nodes to it"
                    " (`auto`), or name others"
                )


def arrive(state: State, config: Config, job: Job, asked: m.Register, now: float) -> list[Instruction]:
    """Places a job that has just come, or queues it; `job.nodes` stays empty while it waits."""
    job.watched = Watched()
    spec = _spec(asked, config)
    if asked.placed:
        return _readopt(state, config, job, spec, asked.placed, now)
    placer = _placer(state, config)
    before = state.placed
    could = alternatives(placer, spec)
    decision = placer.admit(spec, progress(state, now))
    others = [place for place in could if (place.group, place.strategy) != _taken(decision)]
    state.placed = record_of(placer)
    _pin(state, job)
    return [_said(decision, spec, lost_to(decision.usd_per_hour, others)), *_regrouped(before, state, config)]


def _taken(decision: Decision) -> tuple[str | None, str | None]:
    """As in an Alternative, where nodes of one's own have no group."""
    return (None if decision.strategy == "isolated" else decision.group), decision.strategy


def leave(state: State, config: Config, job: Job, now: float) -> tuple[list[Job], list[Instruction]]:
    """Plans anew without a job that is over. Returns the jobs that now start, and what to log."""
    if config.placement is None or state.placed.job(job.name) is None:
        return [], []
    placer, before = _placer(state, config), state.placed
    moves = placer.depart(job.name, progress(state, now))
    return _carry_out(state, config, placer, moves, before)


def correct(state: State, config: Config, spec: JobSpec, now: float) -> tuple[list[Job], list[Instruction]]:
    """Takes over a job's corrected estimates; nobody moves. Returns the jobs that now start, and what to log."""
    placer, before = _placer(state, config), state.placed
    moves = placer.correct(spec, progress(state, now))
    started, out = _carry_out(state, config, placer, moves, before)
    if not placer.keeps_slo(spec.name):
        out.append(Log(events.SLO_AT_RISK, {"job": spec.name, "group": placer.groups.home[spec.name]}))
    return started, out


def _carry_out(
    state: State, config: Config, placer: Placer, moves: list[Move], before: Record
) -> tuple[list[Job], list[Instruction]]:
    state.placed = record_of(placer)
    started = [state.jobs[move.job] for move in moves]
    for job in started:
        _pin(state, job)
    said = [
        Log(events.PLACED, {"job": move.job, "outcome": "placed", "group": move.group, "nodes": _sides(move)}) for move in moves
    ]
    return started, [*said, *_regrouped(before, state, config)]


def _spec(asked: m.Register, config: Config) -> JobSpec:
    """Of a job that `check` lets pass."""
    placement, needs = config.placing, asked.needs
    assert needs is not None
    pools = [getattr(placement, side) for side in m.SIDES]
    kinds = [find_kind(kind_name(pool, config.pools[pool]), placement.kinds) for pool in pools]
    slo = placement.slo if asked.slo is None else asked.slo
    return job_spec(asked.job, needs, bounds(needs, *kinds), slo, asked.owner)


def _placer(state: State, config: Config) -> Placer:
    by_hand = [n for job in state.jobs.values() if job.watched is None and job.state is not JobState.ENDED for n in job.all_nodes]
    return restore(state.placed, cluster(config.placing, config.pools), config.placing.rules(), by_hand)


def _readopt(
    state: State, config: Config, job: Job, spec: JobSpec, placed: dict[str, list[str]], now: float
) -> list[Instruction]:
    """After a loss of memory: the job is where it says, with all who share a node with it."""
    pin = Pin(job=spec, rollout=tuple(placed["rollout"]), train=tuple(placed["train"]))
    mine = {*pin.rollout, *pin.train}
    near = [group for group in state.placed.groups if mine & {*group.rollout_nodes, *group.train_nodes}]
    before, named = state.placed, state.placed.named + (not near)
    pins = (*(each for group in near for each in group.pins), pin)
    merged = Group(
        name=near[0].name if near else f"g{named}",
        pins=pins,
        rollout_nodes=tuple(dict.fromkeys(node for each in pins for node in each.rollout)),
        train_nodes=tuple(dict.fromkeys(node for each in pins for node in each.train)),
    )
    rest = tuple(group for group in state.placed.groups if group not in near)
    state.placed = Record(groups=(*rest, merged), waiting=state.placed.waiting, named=named)
    _pin(state, job)
    return _regrouped(before, state, config)


def _pin(state: State, job: Job) -> None:
    group = state.placed.group_of(job.name)
    if group is not None:
        pin = next(pin for pin in group.pins if pin.job.name == job.name)
        job.nodes = {"rollout": list(pin.rollout), "train": list(pin.train)}


def _said(decision: Decision, spec: JobSpec, others: Sequence[Alternative]) -> Log:
    """The decision, what was estimated, and why each alternative lost."""
    about = {name: getattr(decision, name) for name in ("job", "outcome", "strategy", "group", "usd_per_hour", "wait")}
    estimated = {"rollout_s": spec.rollout.seconds, "train_s": spec.train.seconds, "source": spec.rollout.source}
    memory = {"rollout_memory_gb": spec.rollout_memory_gb, "train_memory_gb": spec.train_memory_gb}
    lost = [{"group": place.group, "strategy": place.strategy, "why": place.why} for place in others]
    return Log(events.PLACED, {**about, "nodes": _sides(decision), "estimated": {**estimated, **memory}, "alternatives": lost})


def _sides(where: Decision | Move) -> dict[str, list[str]]:
    return {"rollout": list(where.rollout), "train": list(where.train)}


def _regrouped(before: Record, state: State, config: Config) -> list[Instruction]:
    """What is predicted for every group whose jobs have changed; their observations begin anew."""
    known = {frozenset(job.name for job in group.jobs) for group in before.groups}
    out: list[Instruction] = []
    for group in state.placed.groups:
        if frozenset(job.name for job in group.jobs) not in known:
            for job in group.jobs:
                state.watched_of(job.name).fresh = 0
            out.append(predicted(group, state, config))
    return out
