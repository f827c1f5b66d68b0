"""Which jobs share which nodes of one pair of pools. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from verl_mux.errors import UserError
from verl_mux.placement.estimator import LEAST
from verl_mux.placement.feasibility import Feasibility, Progress, Without, late_job
from verl_mux.placement.group_run import group_periods
from verl_mux.placement.groups import Groups, groups_without, isolated, pairs_of_pins
from verl_mux.placement.layouts import isolated_usd
from verl_mux.placement.model import Cluster, Group, JobSpec
from verl_mux.placement.repack import Partitioner, Regrouping, Repack
from verl_mux.placement.rules import ORDERS, OURS, Rules, check_fits, modes_of
from verl_mux.placement.search import Action, Decision, Move, Revision, Search, decision_for, group_at

# Jobs that a finite cluster has no room for yet, and who is next.
#
# Whoever holds the least per hour for his share goes first, then by `ranks`, then whoever came first; a job may be passed by
# younger ones that fit where it does not. But each one that starts before it counts, and once `max_bypass` have, nobody else
# starts before it: what comes free is kept for it. Every job that fits the empty cluster therefore starts, if running jobs end.


class _Entry:
    __slots__ = ("job", "number", "passed")

    def __init__(self, job: JobSpec, number: int, passed: int) -> None:
        self.job = job
        self.number = number
        self.passed = passed


class Waiting:
    """shares: of owners, 1 for all that are not named. ranks: of jobs, by name, lowest first; 0 for all others."""

    def __init__(self, max_bypass: int) -> None:
        self.max_bypass = max_bypass
        self.shares: Mapping[str, float] = {}
        self.ranks: Mapping[str, int] = {}
        self._entries: list[_Entry] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: str) -> bool:
        return any(entry.job.name == name for entry in self._entries)

    @property
    def jobs(self) -> list[JobSpec]:
        """In order of arrival."""
        return [entry.job for entry in self._entries]

    @property
    def entries(self) -> list[tuple[JobSpec, int]]:
        """In order of arrival, each with the number of younger jobs that started before it."""
        return [(entry.job, entry.passed) for entry in self._entries]

    def add(self, job: JobSpec, passed: int = 0) -> None:
        self._count += 1
        self._entries.append(_Entry(job, self._count, passed))

    def refill(self, entries: Iterable[tuple[JobSpec, int]]) -> None:
        """These wait, and nobody else: as `entries`."""
        self._entries = [_Entry(job, number, passed) for number, (job, passed) in enumerate(entries, 1)]
        self._count = len(self._entries)

    def remove(self, name: str) -> None:
        self._entries = [entry for entry in self._entries if entry.job.name != name]

    @property
    def overdue(self) -> JobSpec | None:
        """The oldest job that nobody may pass any more."""
        return next((entry.job for entry in self._entries if entry.passed >= self.max_bypass), None)

    def candidates(self, usd_by_owner: Mapping[str, float]) -> list[JobSpec]:
        """Those who may start now if there is room, in order of preference."""
        if self.overdue:
            return [self.overdue]
        return [entry.job for entry in sorted(self._entries, key=lambda entry: self._key(entry, usd_by_owner))]

    def _key(self, entry: _Entry, usd_by_owner: Mapping[str, float]) -> tuple[float, int, int]:
        owner = entry.job.owner
        held = usd_by_owner.get(owner, 0.0) / self.shares.get(owner, 1.0)
        return held, self.ranks.get(entry.job.name, 0), entry.number

    def started(self, name: str) -> None:
        """A waiting job starts: it leaves the queue, and whoever came before it was passed."""
        number = next(entry.number for entry in self._entries if entry.job.name == name)
        self.remove(name)
        for entry in self._entries:
            entry.passed += entry.number < number

    def passed_by_newcomer(self) -> None:
        """A job that never waited starts before all of them."""
        for entry in self._entries:
            entry.passed += 1


# Which jobs share which nodes: what is asked when a job arrives, departs, or turns out other than estimated.
#
#     job: admit() -> placed | queued -> placed by somebody's depart() -> depart()
#
# No I/O, no clock: the caller says how far the placed jobs are (`progress`, by job name), carries the answers out, and
# asks again. Invariants (asserted by the tests):
# - every node belongs to one group, and a job of it is pinned there; a group's cost is the sum of its nodes' prices;
# - the states pinned to a node fit in its host memory; every job has all the nodes it asks for, on both sides;
# - no job adds more than its nodes would cost alone, and all groups together never cost more than every job alone, on as many
#   nodes as it holds: those that it asks for (by the rule `whole_pool` all training nodes of its group, and it keeps them when
#   the job that brought them leaves, as nobody moves);
# - settled periods, from one start, are within every job's SLO, whoever departs (the guard runs the group on from where it
# stands);
# - in a finite cluster nobody waits for ever: at most `max_bypass` younger jobs start before a waiting one.

# The order of a group in which somebody is at risk and nobody can move.
FIRST_AID = "tightest-first"
NOTHING_KNOWN: Mapping[str, Progress] = {}


class Offer(msgspec.Struct, frozen=True):
    """A place that a job may have: `usd`, by which places are compared (price.py); the group that it `joins`, None: nodes of its
    own; and the `group` as it would be, whose new nodes are yet to be taken."""

    usd: float
    joins: Group | None
    group: Group


class Placer:
    """groups: as they are, by name. waiting: jobs that a finite cluster has no room for."""

    def __init__(self, cluster: Cluster, rules: Rules = OURS) -> None:
        self.cluster = cluster
        self.rules = rules
        self.groups = Groups(cluster)
        self.waiting = Waiting(rules.max_bypass)
        self.feasibility = Feasibility(rules.orders, rules.keep)
        self.search = Search(cluster, rules, self.feasibility)
        self.partitioner = Partitioner(cluster, self.feasibility, rules)
        self.moved_at: list[float] = []  # those that rescued an SLO apart, of the last hour
        self._repack = Repack(self.groups, self.partitioner, self.search, rules)

    def admit(self, job: JobSpec, progress: Mapping[str, Progress] = NOTHING_KNOWN) -> Decision:
        """Places the job, or queues it. Raises UserError for a name in use and for a job the cluster cannot hold."""
        check_fits(job, self.cluster, self.rules)
        if job.name in self.groups.home or job.name in self.waiting:
            raise UserError(f"job {job.name!r} is placed or waiting already; job names are unique")
        before = self.groups.usd_per_hour
        overdue = self.waiting.overdue
        if overdue is None and (group := self._place(job, progress)):
            self.waiting.passed_by_newcomer()
            return decision_for(group, self.groups.usd_per_hour - before)
        self.waiting.add(job)
        wait = f"job {overdue.name!r} waits longer and is next" if overdue else "no room within everybody's SLO"
        return Decision(job=job.name, outcome="queued", wait=wait)

    def depart(self, name: str, progress: Mapping[str, Progress] = NOTHING_KNOWN, now: float = 0.0) -> list[Move]:
        """Drops the job and the nodes nobody else is pinned to. Returns who starts or moves in consequence."""
        if name in self.waiting:
            overdue = self.waiting.overdue
            self.waiting.remove(name)
            return self.start_waiting(progress) if overdue is not None and overdue.name == name else []
        moves = self.drop(name, progress)
        progress = unmoved(progress, moves)
        return moves + self.start_waiting(progress) + self.repack(progress, now)

    def drop(self, name: str, progress: Mapping[str, Progress]) -> list[Move]:
        """Of `depart` what comes before anybody starts: who has to move, since the group would be late without the job."""
        if name not in self.groups.home:
            raise UserError(f"job {name!r} is not placed; placed are: {', '.join(sorted(self.groups.home)) or 'none'}")
        self._forget(name)
        group = self.groups.group_of(name)
        left = self._changed(self.groups.replace([group], groups_without(group, [name])))
        return self._relieve(left, progress) if self.rules.repack and self.rules.guard else []

    def revise(self, job: JobSpec, progress: Mapping[str, Progress] = NOTHING_KNOWN, now: float = 0.0) -> Revision:
        """Takes over a placed job's new estimates. If its group no longer keeps everybody's SLO: another order, if all keep
        theirs under it; else jobs move out, the cheapest to keep alone first; else whoever has the least room goes first. If it
        has become easier to place, repacking may follow. While anybody in the group has yet to be seen for LEAST steps, only the
        order may change: to be asked again then, by this with the job as it is."""
        done = self.correct(job, progress)
        progress = unmoved(progress, done.moves)
        started = self.start_waiting(progress)
        return Revision((*done.moves, *started, *self.repack(progress, now)), done.actions)

    def correct(self, job: JobSpec, progress: Mapping[str, Progress]) -> Revision:
        """Of `revise` what comes before anybody starts."""
        self._forget(job.name)
        self.groups.update(job)
        taken: list[Action] = []
        moves: list[Move] = []
        while (why := self._at_risk(group := self.groups.group_of(job.name), unmoved(progress, moves))) is not None:
            if (ordered := self._reorder(group, progress, why)) is not None:
                taken.append(ordered)
                break
            if not _seen(group, progress):
                break
            if (evicted := self._rescue(group, unmoved(progress, moves))) is None:
                if group.order != FIRST_AID:
                    taken.append(self._prefer(group, why))
                break
            moves.append(evicted)
            taken.append(Action(kind="move", group=group.name, job=evicted.job, reason=why))
        self._changed([self.groups.group_of(job.name)])
        return Revision(tuple(moves), tuple(taken))

    def repack(self, progress: Mapping[str, Progress] = NOTHING_KNOWN, now: float = 0.0) -> list[Move]:
        """Moves jobs where what that saves pays for the moves. To be asked again from time to time: what does
        not pay for young jobs pays later. `now`: seconds of any clock, for the limit of moves an hour."""
        moves: list[Move] = []
        self._repack.begin()
        while self.rules.repack and self._may_move(now) and (found := self._repack.next(unmoved(progress, moves))):
            carried = self._carry_out(found)
            self.moved_at += [now] * len(carried)
            moves += carried
        return moves + (self.start_waiting(unmoved(progress, moves)) if moves else [])

    def vacate(self, node: str, progress: Mapping[str, Progress] = NOTHING_KNOWN) -> list[Move]:
        """Moves whoever can be moved off a closed node, while there is room elsewhere. Returns who moves or starts in
        consequence."""
        moves: list[Move] = []
        there = [p.job for g in self.groups.values() for p in g.pins if node in (*p.rollout, *p.train)]
        for job in [job for job in there if self.search.may_move(job)]:
            group = self.groups.group_of(job.name)
            rest = self.groups.replace([group], groups_without(group, [job.name]))
            if home := self._place(job, unmoved(progress, moves), job.load_s):
                self._changed([g for g in rest if self.groups.get(g.name) is g])
                moves.append(self._move(job, "move", home))
            else:
                self.groups.replace(rest, [group])
        return moves + (self.start_waiting(unmoved(progress, moves)) if moves else [])

    def start_waiting(self, progress: Mapping[str, Progress]) -> list[Move]:
        """Starts who waits and now has room, as after nodes came free that others had. Returns who starts."""
        moves: list[Move] = []
        while len(self.waiting) and (started := self._start_one(progress)):
            moves.append(started)
        return moves

    def _may_move(self, now: float) -> bool:
        self.moved_at = [at for at in self.moved_at if at > now - 3600]
        return not self.rules.moves_per_hour or len(self.moved_at) < self.rules.moves_per_hour

    def _at_risk(self, group: Group, progress: Mapping[str, Progress]) -> str | None:
        """What endangers a promise, or None."""
        if len(group.pins) < 2:
            return None
        if self._settles(group):
            known = all(job.name in progress for job in group.jobs)
            late = late_job(group, progress, {}) if self.rules.guard and known else None
            return None if late is None else f"as the group stands now, {late} would be late"
        for job, period in zip(group.jobs, group_periods(group), strict=True):
            if period.mean_s > job.limit_s:
                return f"{job.name} takes {period.mean_s:.0f} s an iteration, its SLO allows {job.limit_s:.0f} s"
        return f"not every SLO is kept with a probability of {self.rules.keep:g}, or not whoever leaves"

    def _settles(self, group: Group) -> bool:
        """Whether all keep their SLOs once everybody has had its turn a few times."""
        return self.feasibility.keeps(group.jobs, *pairs_of_pins(group.pins), group.order)

    def _rescue(self, group: Group, progress: Mapping[str, Progress]) -> Move | None:
        """Moves one job out. Where somebody is late only by what has been, as by another's start-up, a move is one more delay: it
        has to bring all in time."""
        if not self._settles(group):
            return self._evict_one(group, progress)
        found = self._move_out(group, progress)
        return found[0] if found else None

    def _reorder(self, group: Group, progress: Mapping[str, Progress], why: str) -> Action | None:
        for order in ORDERS:
            other = msgspec.structs.replace(group, order=order)
            if order != group.order and self._at_risk(other, progress) is None:
                self.groups.reorder(group.name, order)
                return Action(kind="order", group=group.name, job="", reason=f"{why}; under the order {order} all keep theirs")
        return None

    def _prefer(self, group: Group, why: str) -> Action:
        self.groups.reorder(group.name, FIRST_AID)
        first = min(group.jobs, key=lambda job: job.limit_s - job.iteration_s)
        return Action(
            kind="priority", group=group.name, job=first.name, reason=f"{why}; nobody can move, so the tightest goes first"
        )

    def adopt(self, groups: Sequence[Group], named: int, moved_at: Iterable[float]) -> None:
        """Goes on from where another placer was. What moving would save it does not remember, so that is looked for anew."""
        self.groups.adopt(groups, named)
        self.moved_at = list(moved_at)
        self._changed([group for group in groups if any(job.movable for job in group.jobs)])

    @property
    def pending(self) -> bool:
        """Whether `repack` has something in view that may pay later, or did not come to an end."""
        return self.rules.repack and bool(self._repack.dirty)

    def offer(self, job: JobSpec, progress: Mapping[str, Progress], load_s: float = 0.0) -> Offer | None:
        """The cheapest place for the job; None if a finite cluster has no room."""
        free = self.groups.free
        modes = modes_of(job, self.cluster, self.rules)
        fits = [placed for placed in modes if placed.nodes[0] <= free[0] and placed.nodes[1] <= free[1]]
        alone = min(fits, key=self.groups.alone_usd, default=None)
        below = math.inf if alone is None else self.groups.alone_usd(alone)
        if place := self.search.find(job, self.groups.table, below, free, progress, load_s):
            return Offer(place.usd, place.group, group_at(place))
        return None if alone is None else Offer(below, None, isolated(alone))

    def start(self, job: JobSpec, offer: Offer) -> Move:
        """Somebody who waited goes where he was just offered to."""
        return self._move(job, "start", self._taken(offer))

    def _taken(self, offer: Offer) -> Group:
        return self._changed(self.groups.replace([offer.joins] if offer.joins else [], [offer.group]))[0]

    def _place(self, job: JobSpec, progress: Mapping[str, Progress], load_s: float = 0.0) -> Group | None:
        """The group it was put in."""
        found = self.offer(job, progress, load_s)
        return None if found is None else self._taken(found)

    def _changed(self, groups: list[Group]) -> list[Group]:
        self._repack.dirty.update((group.name, None) for group in groups)
        return groups

    def _forget(self, name: str) -> None:
        self.feasibility.forget(name)
        self.partitioner.forget(name)

    def _start_one(self, progress: Mapping[str, Progress]) -> Move | None:
        for job in self.waiting.candidates(self.usd_by_owner()):
            if found := self.offer(job, progress):
                self.waiting.started(job.name)
                return self.start(job, found)
        return None

    def usd_by_owner(self) -> dict[str, float]:
        """USD per hour of what each owner's jobs would cost alone."""
        usd: dict[str, float] = defaultdict(float)
        for job in (job for group in self.groups.values() for job in group.jobs):
            usd[job.owner] += isolated_usd(job, self.cluster)
        return usd

    def _carry_out(self, found: Regrouping) -> list[Move]:
        self._changed(self.groups.replace(found.old, found.groups))
        return [self._move(job, "move", self.groups.group_of(job.name)) for job in found.movers]

    def _evict_one(self, group: Group, progress: Mapping[str, Progress]) -> Move | None:
        """Moves the job out that leaves the others within their SLOs, the cheapest alone first; None if no nodes
        are left to move anybody to."""
        by_price = sorted(group.jobs, key=lambda job: isolated_usd(job, self.cluster))
        fits = [job for job in by_price if all(self._feasible(rest) for rest in groups_without(group, [job.name]))]
        for job in [job for job in fits or by_price if self.search.may_move(job)]:
            rest = self.groups.replace([group], groups_without(group, [job.name]))
            if home := self._place(job, progress, job.load_s):
                self._changed([g for g in rest if g.name in self.groups])
                return self._move(job, "move", home)
            self.groups.replace(rest, [group])
        return None

    def _relieve(self, groups: list[Group], progress: Mapping[str, Progress]) -> list[Move]:
        """Moves jobs out of groups in which, as they stand now, somebody would be late. The settled periods are within
        the SLOs whoever departs; on the way from one settled course to the next a job may still lose too much."""
        moves: list[Move] = []
        unchecked = list(groups)
        while unchecked:
            group = unchecked.pop()
            alright = len(group.pins) < 2 or _in_time([group], progress, {})
            if not alright and (found := self._move_out(group, unmoved(progress, moves))):
                moves.append(found[0])
                unchecked += found[1]
        return moves

    def _move_out(self, group: Group, progress: Mapping[str, Progress]) -> tuple[Move, list[Group]] | None:
        """Moves one job to where all are in time, the cheapest alone first, and says what is left of the group; None
        if nobody's leaving helps."""
        for job in sorted(
            (job for job in group.jobs if self.search.may_move(job)), key=lambda job: isolated_usd(job, self.cluster)
        ):
            rest = list(groups_without(group, [job.name]))
            if not _in_time([*rest, isolated(job)], progress, {job.name: job.load_s}):
                continue
            rest = self.groups.replace([group], rest)
            if home := self._place(job, progress, job.load_s):
                left = self._changed([g for g in rest if self.groups.get(g.name) is g])
                return self._move(job, "move", home), left
            self.groups.replace(rest, [group])
        return None

    def _feasible(self, group: Group) -> bool:
        return self.feasibility.order(group.jobs, *pairs_of_pins(group.pins)) is not None

    def _move(self, job: JobSpec, kind: str, group: Group) -> Move:
        pin = self.groups.pin_of(job.name)
        load_s = job.load_s if kind == "move" else 0.0
        return Move(job=job.name, kind=kind, group=group.name, rollout=pin.runs_rollouts_on, train=pin.train, load_s=load_s)


def _in_time(groups: Iterable[Group], progress: Mapping[str, Progress], loads: Mapping[str, float]) -> bool:
    """Whether nobody is expected to be late in these groups; unknown progress is no reason to move anybody."""
    return all(late_job(group, progress, loads) is None for group in groups if all(job.name in progress for job in group.jobs))


def _seen(group: Group, progress: Mapping[str, Progress]) -> bool:
    """Whether all were seen long enough for their own phases to count. A move costs minutes, and what somebody was only said to
    take is no reason for one: it is known a few steps later."""
    found = [progress.get(job.name) for job in group.jobs]
    return all(it is not None and (it.done if it.seen is None else it.seen) >= LEAST for it in found)


def unmoved(progress: Mapping[str, Progress], moves: Sequence[Move]) -> Mapping[str, Progress]:
    """Nobody is moved twice in one answer."""
    return Without(progress, {move.job for move in moves}) if moves else progress
