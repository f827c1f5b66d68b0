"""Dividing the jobs of a few groups anew: who would have to move, what it saves, and whether that pays.

The saving is counted until the first of the jobs concerned ends: whoever is left is then divided anew. A job that does not say
how many iterations it has left is expected to stay as long again as it has stayed (job lengths are heavy-tailed). Against it
stands what the moved jobs' nodes cost while those load, and while they did that part of an iteration which a move throws away.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from verl_mux.placement.model import Cluster, Group, JobSpec, Pin
from verl_mux.placement.search.cheapest_nodes import SharedNodes, isolated_usd
from verl_mux.placement.search.extension import groups_without, isolated, yet_to_take
from verl_mux.placement.search.partition import EPSILON_USD, Part
from verl_mux.placement.search.search import Search, group_at
from verl_mux.placement.time.forecast import Progress, late_job


class Regrouping(msgspec.Struct, frozen=True):
    """groups: what `old` becomes; new nodes are yet to be taken. movers: jobs whose nodes change.
    saving_usd: per hour."""

    old: tuple[Group, ...]
    groups: tuple[Group, ...]
    movers: tuple[JobSpec, ...]
    saving_usd: float

    def pays_in_s(self, cluster: Cluster, progress: Mapping[str, Progress], hysteresis: float) -> float:
        """Seconds after which the saving can be expected to pay for the moves so many times; 0: now; infinite: some job concerned
        says that it ends before."""
        concerned = [(job, progress[job.name]) for group in self.groups if group not in self.old for job in group.jobs]
        loss = sum(isolated_usd(job, cluster) * _lost_s(job, progress[job.name]) for job in self.movers)
        needed_s = hysteresis * loss / self.saving_usd
        wait_s = max([0.0, *(needed_s - at.age_s for _, at in concerned if at.left is None)])
        lefts_s = [left_s for job, at in concerned if (left_s := at.left_s(job)) is not None]
        return math.inf if min(lefts_s, default=math.inf) - wait_s < needed_s else wait_s

    def in_time(self, progress: Mapping[str, Progress]) -> bool:
        """Whether everybody keeps within the SLO over its whole life, cold starts of the movers included."""
        loads = {job.name: job.load_s for job in self.movers}
        return all(late_job(group, progress, loads) is None for group in self.groups if group not in self.old)


def _lost_s(job: JobSpec, at: Progress) -> float:
    """The cold start, and what it has done of the iteration it is in."""
    left = at.remaining_s
    if at.phase == "loading":
        return job.load_s
    if at.phase == "rollout":
        return job.load_s + (0.0 if left is None else max(job.rollout_hold_s - left, 0.0))
    if at.phase == "tail" or left is None:
        return job.load_s + job.rollout_hold_s
    return job.load_s + job.rollout_hold_s + max(job.train.seconds - left, 0.0)


def regroup(old: Sequence[Group], parts: Sequence[Part], search: Search) -> Regrouping | None:
    """What turns the groups `old` into the given parts with few moves; None if it would save nothing, or move who cannot be."""
    claimed: set[str] = set()
    groups = [_settle(jobs, shared, old, search, claimed) for jobs, shared in sorted(parts, key=lambda p: -len(p[0]))]
    homes = {pin.job.name: pin for group in old for pin in group.pins}
    movers = tuple(pin.job for group in groups for pin in group.pins if pin != homes[pin.job.name])
    saving = sum(search.price.of_group(g) for g in old) - sum(search.price.of_group(g) for g in groups)
    can = saving > EPSILON_USD and all(search.may_move(job) for job in movers)
    return Regrouping(tuple(old), tuple(groups), movers, saving) if can else None


def _settle(
    jobs: tuple[JobSpec, ...], shared: SharedNodes | None, old: Sequence[Group], search: Search, claimed: set[str]
) -> Group:
    """A group of these jobs at the price of `shared`: on what some of them hold already, if that can be; else anew."""
    usd = shared.price if shared else isolated_usd(jobs[0], search.cluster)
    group = next((g for base in _bases(jobs, old, claimed) if (g := _grown(base, jobs, usd, search))), None)
    group = group or _fresh(jobs, shared)
    claimed |= {*group.rollout_nodes, *group.train_nodes}
    return group


def _bases(jobs: tuple[JobSpec, ...], old: Sequence[Group], claimed: set[str]) -> Iterator[Group]:
    """Old groups without those who are not among `jobs`, or there in another mode, who would take longest to move first; then
    those without one more, whoever came last first: it is to join the others anew, as where the same jobs need fewer nodes."""
    rests = [rest for group in old for rest in groups_without(group, [j.name for j in group.jobs if j not in jobs])]
    rests = [rest for rest in rests if claimed.isdisjoint((*rest.rollout_nodes, *rest.train_nodes))]
    shared = [rest for rest in rests if len(rest.pins) > 1]
    fewer = [less for rest in shared for job in reversed(rest.jobs) for less in groups_without(rest, [job.name])]
    for bases in (rests, fewer):
        yield from sorted(bases, key=lambda base: -sum(job.load_s for job in base.jobs))


def _grown(base: Group, jobs: Sequence[JobSpec], usd: float, search: Search) -> Group | None:
    """`base` with the rest of `jobs` joined one by one, if that costs no more than `usd`."""
    missing = sorted((job for job in jobs if job not in base.jobs), key=lambda job: -sum(job.nodes))
    for job in missing:
        left = usd - search.price.of_group(base) + 2 * EPSILON_USD
        place = search.join(job, base, left, free=(1e9, 1e9), progress={})
        if place is None:
            return None
        base = group_at(place)
    return base if search.price.of_group(base) <= usd + EPSILON_USD else None


def _fresh(jobs: tuple[JobSpec, ...], shared: SharedNodes | None) -> Group:
    """These jobs on new nodes throughout."""
    if shared is None:
        return isolated(jobs[0])
    rollout = yet_to_take(jobs[0], "rollout", shared.rollout_nodes)
    train = yet_to_take(jobs[0], "train", shared.train_nodes)
    pins = tuple(
        Pin(job=job, rollout=_chosen(rollout, on), train=_chosen(train, on_train))
        for job, on, on_train in zip(jobs, shared.rollout, shared.train, strict=True)
    )
    return Group(name=jobs[0].name, pins=pins, rollout_nodes=rollout, train_nodes=train, order=shared.order)


def _chosen(nodes: tuple[str, ...], bits: int) -> tuple[str, ...]:
    return tuple(node for i, node in enumerate(nodes) if bits >> i & 1)
