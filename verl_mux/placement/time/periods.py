"""T_coexec: how long an iteration of each job of a group lasts once the group has settled.

Strict rounds (every job once per cycle) are not what one FIFO queue per node does: with private rollout nodes a short
job overtakes a long one. So the period comes from the events themselves, except where any two jobs share nodes on both
sides: there FIFO never lets one overtake another, and the period of all of them is the largest of the busiest node's
work per round and the longest single iteration (checked against the events by the tests).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import msgspec

from verl_mux.placement.model import Group, JobSpec
from verl_mux.placement.time.group_run import GroupRun, Member
from verl_mux.placement.time.order import IN_ROUNDS, ORDERS
from verl_mux.placement.time.settled import MAX_ITERATIONS, average, fifo_means


class Period(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds per iteration of one job: mean over a cycle of the group, and the longest one in it."""

    mean_s: float
    worst_s: float


def periods_by_job(group: Group) -> dict[str, Period]:
    """Settled period of every job of the group, by its name, under the group's own order."""
    return {job.name: period for job, period in zip(group.jobs, group_periods(group), strict=True)}


def group_periods(group: Group) -> list[Period]:
    """Of each pin. All begin at once, in order of their names: the same course by which feasibility.py judges a group, which may
    settle otherwise from another start."""
    jobs, (rollout, train) = group.jobs, masks(group)
    rank = sorted(range(len(jobs)), key=lambda i: jobs[i].name)
    settled = periods([jobs[i] for i in rank], [rollout[i] for i in rank], [train[i] for i in rank], group.order)
    found = dict(zip(rank, settled, strict=True))
    return [found[i] for i in range(len(jobs))]


def masks(group: Group) -> tuple[list[int], list[int]]:
    """Each pin's nodes for a rollout and for training as bits of one numbering, training nodes after the rollout nodes."""
    bits = {node: 1 << i for i, node in enumerate(group.rollout_nodes)}
    train_bits = {node: 1 << i for i, node in enumerate(group.train_nodes, start=len(bits))}
    rollout = [sum(bits[node] for node in pin.rollout) for pin in group.pins]
    train = [sum(train_bits[node] for node in pin.train) for pin in group.pins]
    return rollout_bits(group.jobs, rollout, train), train


def rollout_bits(jobs: Sequence[JobSpec], rollout: Sequence[int], train: Sequence[int]) -> list[int]:
    """The nodes (bits) on which each job's rollouts run: of one that is colocated its training nodes."""
    return [trained if job.colocated else held for job, held, trained in zip(jobs, rollout, train, strict=True)]


def periods(jobs: Sequence[JobSpec], rollout: Sequence[int], train: Sequence[int], order: str = "fifo") -> list[Period]:
    """As `group_periods`, with nodes as bits; `rollout`: those on which rollouts run, training nodes only of colocated jobs."""
    if len(jobs) == 1:
        return [Period(mean_s=jobs[0].iteration_s, worst_s=jobs[0].iteration_s)]
    if order == "fifo" and _in_one_round(jobs, rollout, train):
        return [_one_round(jobs)] * len(jobs)
    return _settle(planned_run(jobs, rollout, train, order))


def mean_seconds(jobs: Sequence[JobSpec], rollout: Sequence[int], train: Sequence[int], order: str = "fifo") -> list[float]:
    """The means of `periods`, sooner."""
    if len(jobs) == 1 or order != "fifo" or any(job.tail_s for job in jobs) or _in_one_round(jobs, rollout, train):
        return [period.mean_s for period in periods(jobs, rollout, train, order)]
    return fifo_means(jobs, rollout, train)


def _in_one_round(jobs: Sequence[JobSpec], rollout: Sequence[int], train: Sequence[int]) -> bool:
    """Whether nobody can overtake, and rollouts run beside training."""
    return _all_meet(rollout) and _all_meet(train) and not any(job.tail_s or job.colocated for job in jobs)


def _all_meet(on: Sequence[int]) -> bool:
    return all(a & b for a, b in itertools.combinations(on, 2))


def _one_round(jobs: Sequence[JobSpec]) -> Period:
    held = [job.rollout_hold_s + job.rollout_switch_s for job in jobs]
    trained = [job.train.seconds + job.train_switch_s for job in jobs]
    seconds = max(sum(held), sum(trained), *(h + t for h, t in zip(held, trained, strict=True)))
    return Period(mean_s=seconds, worst_s=seconds)


def planned_run(jobs: Sequence[JobSpec], rollout: Sequence[int], train: Sequence[int], order: str) -> GroupRun:
    """All jobs ask for their first rollout at 0, in the order given, and every phase takes its estimate."""
    run = GroupRun(rounds=order in IN_ROUNDS)
    for job, held, trained, rank in zip(jobs, rollout, train, ORDERS[order](jobs), strict=True):
        run.join(planned_member(job, held, trained, rank))
    return run


def planned_member(job: JobSpec, rollout: int, train: int, rank: int = 0) -> Member:
    repeat = itertools.repeat
    times = (repeat(job.rollout_hold_s), repeat(job.tail_s), repeat(job.train.seconds))
    return Member(job.name, rollout, train, times, (job.rollout_switch_s, job.train_switch_s), rank, job.tail_s > 0)


def _settle(run: GroupRun) -> list[Period]:
    """Runs until a state repeats, and averages over the cycle between; else over the second half of MAX_ITERATIONS."""
    members = run.members
    ends: dict[Member, list[float]] = {member: [] for member in members}
    seen: dict[tuple, tuple[float, list[int]]] = {}
    # A member that starves would never get there: the others' events are bounded as well.
    for _ in range(MAX_ITERATIONS * 2 * len(members)):
        member = run.step()
        if member is None:
            continue
        ends[member].append(run.now)
        if member is members[0]:
            done = [m.done for m in members]
            if (at := state(run)) in seen:
                since, before = seen[at]
                return [_cycle(run.now - since, b, ends[m]) for m, b in zip(members, before, strict=True)]
            seen[at] = run.now, done
    return [_average(e) for e in ends.values()]


def _cycle(seconds: float, before: int, ends: list[float]) -> Period:
    """A job that had done `before` iterations when the cycle began. The first gap that ends in a cycle may have begun
    otherwise than in the cycles to come, but no gap in those is longer than it and the rest."""
    iterations = len(ends) - before
    if iterations == 0:
        return Period(mean_s=math.inf, worst_s=math.inf)
    gaps = [b - a for a, b in itertools.pairwise(ends[max(before - 1, 0) :])]
    return Period(mean_s=seconds / iterations, worst_s=max([seconds / iterations, *gaps]))


def _average(ends: list[float]) -> Period:
    mean_s = average(ends)
    return Period(mean_s=mean_s, worst_s=max([mean_s, *(b - a for a, b in itertools.pairwise(ends[len(ends) // 2 :]))]))


def state(run: GroupRun) -> tuple:
    """What the future depends on, times relative to now and to a microsecond."""
    now = run.now
    return (
        *((m.phase, m.resident) for m in run.members),
        *(m.turns - run.members[0].turns for m in run.members if run.rounds),
        *(round(end - now, 6) for end in run.ends if end < math.inf),
        *(m.name for m in run.waiting),
    )
