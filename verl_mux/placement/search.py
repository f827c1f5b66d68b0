"""Where a job fits best among the groups there are (Algorithm 1 of the paper, with a wider choice of places), and the answers of
placement as data.

Pure; asked by placer.py and repack.py.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping

import msgspec

from verl_mux.placement.feasibility import TOLERANCE, Feasibility, Progress, late_job
from verl_mux.placement.group_run import Period, periods_by_job
from verl_mux.placement.groups import STRATEGIES, Extension, Groups, extensions, pairs_of_pins, with_newcomer, yet_to_take
from verl_mux.placement.layouts import EPSILON_USD, Price
from verl_mux.placement.model import Cluster, Group, JobSpec, cycle_time, load_time
from verl_mux.placement.rules import Rules, modes_of

# --- answers ---


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """A place that was not taken. group None: nodes of its own, by the strategy `isolated` or `colocated`. usd_per_hour: what it
    would have added; work_usd_per_hour: the same for as much work, where places are compared by that (`Price` in layouts.py).
    why: the reason; empty: the job could go there."""

    group: str | None
    strategy: str
    usd_per_hour: float | None
    why: str
    work_usd_per_hour: float | None = None


# By whether both phases run on its training nodes.
OWN_NODES = {False: "isolated", True: "colocated"}


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """outcome: `placed`, or `queued` in a finite cluster that has no room now. rollout, train: nodes of its phases, the same ones
    if it is colocated. usd_per_hour: added by the job. periods: of every job of its group, settled. wait: why it is queued."""

    job: str
    outcome: str
    strategy: str | None = None
    group: str | None = None
    rollout: tuple[str, ...] = ()
    train: tuple[str, ...] = ()
    order: str = "fifo"
    usd_per_hour: float = 0.0
    periods: dict[str, Period] = {}
    alternatives: tuple[Alternative, ...] = ()
    wait: str = ""

    @property
    def was(self) -> tuple[str | None, str | None]:
        """Group and strategy as in an Alternative."""
        return (None if self.strategy in OWN_NODES.values() else self.group), self.strategy


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """A job is to start on these nodes, out of the queue (kind `start`), or to go there from elsewhere (`move`), where
    it starts cold, in `load_s` seconds, with the iteration it is in."""

    job: str
    kind: str
    group: str
    rollout: tuple[str, ...]
    train: tuple[str, ...]
    load_s: float = 0.0


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """What was done for an SLO that was about to be missed. kind: `order` (of the group's phases), `move` (of `job`, to
    elsewhere), or `priority` (of `job`, since nothing keeps all SLOs)."""

    kind: str
    group: str
    job: str
    reason: str


class Revision(msgspec.Struct, frozen=True):
    """What follows from new estimates: jobs that are to move or to start, and what was done for which SLO."""

    moves: tuple[Move, ...] = ()
    actions: tuple[Action, ...] = ()


def decision_for(group: Group, usd_per_hour: float) -> Decision:
    """The decision that put the last job of `group` there, at `usd_per_hour` more for all groups."""
    pin = group.pins[-1]
    return Decision(
        job=pin.job.name,
        outcome="placed",
        strategy=_strategy(group),
        group=group.name,
        rollout=pin.runs_rollouts_on,
        train=pin.train,
        order=group.order,
        usd_per_hour=usd_per_hour,
        periods=periods_by_job(group),
    )


def _strategy(group: Group) -> str:
    """How the last job of the group joined it."""
    *others, pin = group.pins
    if not others:
        return OWN_NODES[pin.job.colocated]
    new_rollout = not set(pin.rollout) <= {node for other in others for node in other.rollout}
    new_train = not set(pin.train) <= {node for other in others for node in other.train}
    return STRATEGIES[new_rollout, new_train]


# --- the search ---


class Place(msgspec.Struct, frozen=True):
    """The job as it is placed, a group to join, how, in which order it then runs, and how much higher that makes the price of
    the group."""

    job: JobSpec
    group: Group
    extension: Extension
    order: str
    usd: float


class Search:
    """The price of a place is known before it is tried. So groups are tried in order of the least they could ask, and the
    search ends at the first price that cannot be beaten; a saturated group costs one comparison.

    held: names of jobs that are not to be moved now, movable or not.
    """

    def __init__(self, cluster: Cluster, rules: Rules, feasibility: Feasibility) -> None:
        self.cluster = cluster
        self.rules = rules
        self.feasibility = feasibility
        self.price = Price(cluster, rules)
        self.held: frozenset[str] = frozenset()

    def may_move(self, job: JobSpec) -> bool:
        return job.movable and job.name not in self.held

    def find(
        self,
        job: JobSpec,
        groups: Groups,
        below: float,
        free: tuple[float, float],
        progress: Mapping[str, Progress],
        load_s: float = 0.0,
    ) -> Place | None:
        """The cheapest place in any mode under `below` USD per hour that needs no more new nodes than `free` (rollout, training).
        Groups with a job of unknown progress are judged by their settled periods alone. load_s: cold start of the job there."""
        best, until = None, self.feasibility.simulated + self.rules.effort
        for least, placed, group in self._shortlist(job, groups, below):
            if least >= below - EPSILON_USD or self.feasibility.simulated >= until:
                break
            if place := self.join(placed, group, below, free, progress, load_s):
                best, below = place, place.usd
        return best

    def join(
        self,
        job: JobSpec,
        group: Group,
        below: float,
        free: tuple[float, float],
        progress: Mapping[str, Progress],
        load_s: float = 0.0,
    ) -> Place | None:
        """The cheapest way into one group in the mode in which the job is given."""
        rollout, train = pairs_of_pins(group.pins)
        best = None
        for found in extensions(group, job, self.cluster, self.rules):
            if found.usd >= below - EPSILON_USD:
                break
            if found.rollout.new > free[0] or found.train.new > free[1]:
                continue
            jobs = (*group.jobs, job)
            order = self.feasibility.order(jobs, rollout | found.rollout.pairs, train | found.train.pairs)
            if not order:
                continue
            place = self.priced(job, group, found, order)
            if place.usd >= below - EPSILON_USD or not self._in_time(place, progress, load_s):
                continue
            if not self.rules.count_stays:
                return place
            best, below = place, place.usd
        return best

    def priced(self, job: JobSpec, group: Group, extension: Extension, order: str) -> Place:
        place = Place(job, group, extension, order, extension.usd)
        if not self.rules.count_stays:
            return place
        return msgspec.structs.replace(place, usd=self.price.of_group(group_at(place)) - self.price.of_group(group))

    def _in_time(self, place: Place, progress: Mapping[str, Progress], load_s: float) -> bool:
        if not self.rules.guard or not all(member.name in progress for member in place.group.jobs):
            return True
        return late_job(group_at(place), progress, {place.job.name: load_s}) is None

    def _shortlist(self, job: JobSpec, groups: Groups, below: float) -> Iterator[tuple[float, JobSpec, Group]]:
        """(least USD per hour it could ask, the job in one of its modes, group), cheapest first, then fullest; no more than the
        rules allow."""
        openings = [self._openings(placed, groups, below) for placed in modes_of(job, self.cluster, self.rules)]
        return itertools.islice(heapq.merge(*openings, key=lambda found: found[0]), self.rules.shortlist)

    def _openings(self, job: JobSpec, groups: Groups, below: float) -> Iterator[tuple[float, JobSpec, Group]]:
        room = TOLERANCE - job.rollout_share, TOLERANCE - job.train_share
        openings = groups.openings(job, self.rules.cap, room, below - EPSILON_USD, self.rules.best_fit)
        return ((least, job, group) for least, group in openings if not self.saturated(group))

    def nearest(self, job: JobSpec, groups: Groups, count: int) -> list[Group]:
        """The `count` groups that could ask the least."""
        found = {group.name: group for _, _, group in self._shortlist(job, groups, math.inf)}
        return list(found.values())[:count]

    def saturated(self, group: Group) -> bool:
        return self.rules.prune_saturated and load_time(group) >= cycle_time(group)


def group_at(place: Place) -> Group:
    """The group as it would be; its new nodes are yet to be taken."""
    job, ask = place.job, place.extension
    rollout = (*ask.rollout.shared, *yet_to_take(job, "rollout", ask.rollout.new))
    train = (*ask.train.shared, *yet_to_take(job, "train", ask.train.new))
    return with_newcomer(place.group, job, rollout, train, place.order)
