"""Which jobs share which nodes of one pair of pools: the groups, and their changes when a job arrives, departs, or turns out
other than estimated.

Pure; held by planner.py, which keeps the queue of waiting jobs. Invariants (asserted by the tests):
- every node belongs to one group, and a job of it is pinned there; a group costs the sum of its nodes' prices;
- the states pinned to a node fit in its host memory; every job has all the nodes it asks for, on both sides;
- no job adds more than its nodes would cost alone, and all groups together never cost more than every job alone, on as many
  nodes as it asks for;
- settled periods, from one start, are within every job's SLO, after every departure (the guard runs the group on from where it
  stands).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from verl_mux.errors import UserError
from verl_mux.placement.estimator import LEAST
from verl_mux.placement.feasibility import Feasibility, Progress, late_job
from verl_mux.placement.group_run import group_periods
from verl_mux.placement.groups import Books, Groups, Place, Search, groups_without, isolated, pairs_of_pins
from verl_mux.placement.layouts import isolated_usd
from verl_mux.placement.model import ORDERS, Cluster, Group, JobSpec, Rules
from verl_mux.placement.questions import Action, Answer, Move
from verl_mux.placement.repack import Partitioner, Repack

# The order of a group in which an SLO is at risk and no job can move.
FIRST_AID = "tightest-first"


class Placer:
    """groups: as they are, by name. `progress` says how far the placed jobs are, by name; the caller carries the moves out."""

    def __init__(self, cluster: Cluster, rules: Rules, books: Books) -> None:
        self.cluster, self.rules = cluster, rules
        self.groups = Groups(cluster, books)
        self.feasibility = Feasibility(rules.keep)
        self.search = Search(self.groups, rules, self.feasibility)
        self.partitioner = Partitioner(cluster, self.feasibility, rules)
        self._repack = Repack(self.search, self.partitioner)

    def adopt(self, groups: Sequence[Group]) -> None:
        """Go on from where another placer was. What moving would save is looked for anew."""
        self.groups.adopt(groups)
        self._changed([group for group in groups if any(job.movable for job in group.jobs)])

    @property
    def pending(self) -> bool:
        """Whether `repack` has something in view that may pay later, or did not come to an end."""
        return self.rules.repack and bool(self._repack.dirty)

    # --- one job comes or goes ---

    def take(self, place: Place) -> Group:
        """The group of the job that goes where it was just offered to."""
        return self._changed(self.groups.replace([place.joins] if place.joins else [], [place.group]))[0]

    def start(self, place: Place) -> Move:
        """A job that waited goes where it was just offered to."""
        return self._move(place.job, "start", self.take(place))

    def drop(self, name: str, progress: Mapping[str, Progress]) -> list[Move]:
        """The job is gone, and the nodes on which it was alone are free. Returns moves of jobs that would be late without it."""
        if name not in self.groups.home:
            raise UserError(f"job {name!r} is not placed; placed are: {', '.join(sorted(self.groups.home)) or 'none'}")
        self._forget(name)
        group = self.groups.group_of(name)
        left = self._changed(self.groups.replace([group], groups_without(group, [name])))
        return self._relieve(left, progress) if self.rules.repack and self.rules.guard else []

    # --- estimates that change ---

    def correct(self, job: JobSpec, progress: Mapping[str, Progress]) -> Answer:
        """Take over the new estimates of a placed job. If its group no longer keeps every SLO: another order, if all keep theirs
        under it; else jobs move out, the cheapest to keep alone first; else the job with the least room goes first. While a job
        of the group has yet to be seen for LEAST steps, only the order may change: to be asked again then, with the job as it
        is."""
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
        return Answer(moves=tuple(moves), actions=tuple(taken))

    def _at_risk(self, group: Group, progress: Mapping[str, Progress]) -> str | None:
        """What endangers an SLO, or None."""
        if len(group.pins) < 2:
            return None
        if self._settles(group):
            known = all(job.name in progress for job in group.jobs)
            late = late_job(group, progress, {}) if self.rules.guard and known else None
            return None if late is None else f"as the group stands now, {late} would be late"
        periods = group_periods(group)
        for job in group.jobs:
            if (mean_s := periods[job.name]) > job.limit_s:
                return f"{job.name} takes {mean_s:.0f} s an iteration, its SLO allows {job.limit_s:.0f} s"
        return f"not every SLO is kept with a probability of {self.rules.keep:g}, now or after a job leaves"

    def _settles(self, group: Group) -> bool:
        """Whether all keep their SLOs once every job has had its turn a few times."""
        return self.feasibility.keeps(group.jobs, *pairs_of_pins(group.pins), group.order)

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
        reason = f"{why}; no job can move, so the tightest goes first"
        return Action(kind="priority", group=group.name, job=first.name, reason=reason)

    # --- moves ---

    def repack(self, progress: Mapping[str, Progress], now: float) -> list[Move]:
        """Move jobs where what that saves pays for the moves. To be asked again from time to time: what does
        not pay for young jobs pays later. now: seconds of any clock, for the limit of moves an hour."""
        moves: list[Move] = []
        self._repack.begin()
        while self.rules.repack and self._may_move(now) and (found := self._repack.next(unmoved(progress, moves))):
            self._changed(self.groups.replace(found.old, found.groups))
            moves += [self._move(job, "move", self.groups.group_of(job.name)) for job in found.movers]
            self.groups.books.moved_at += [now] * len(found.movers)
        return moves

    def vacate(self, node: str, progress: Mapping[str, Progress]) -> list[Move]:
        """Move the jobs that can be moved off a closed node, while there is room elsewhere."""
        moves: list[Move] = []
        there = [p.job for g in self.groups.values() for p in g.pins if node in (*p.rollout, *p.train)]
        for job in [job for job in there if self.search.may_move(job)]:
            group = self.groups.group_of(job.name)
            if found := self._moved(job, group, groups_without(group, [job.name]), unmoved(progress, moves)):
                moves.append(found[0])
        return moves

    def _may_move(self, now: float) -> bool:
        books = self.groups.books
        books.moved_at = [at for at in books.moved_at if at > now - 3600]
        return not self.rules.moves_per_hour or len(books.moved_at) < self.rules.moves_per_hour

    def _rescue(self, group: Group, progress: Mapping[str, Progress]) -> Move | None:
        """Move one job out: one that leaves the others within their SLOs, the cheapest alone first; None if no nodes are left to
        move a job to. Where a job is late only by what has been, as by another's start-up, a move is one more delay: it has to
        bring all in time."""
        if self._settles(group):
            found = self._move_out(group, progress)
            return found[0] if found else None
        by_price = self._by_price(group.jobs)
        fits = [job for job in by_price if all(self._feasible(rest) for rest in groups_without(group, [job.name]))]
        for job in [job for job in fits or by_price if self.search.may_move(job)]:
            if found := self._moved(job, group, groups_without(group, [job.name]), progress):
                return found[0]
        return None

    def _relieve(self, groups: list[Group], progress: Mapping[str, Progress]) -> list[Move]:
        """Move jobs out of groups in which, as they stand now, a job would be late. The settled periods are within
        the SLOs after every departure; on the way from one settled course to the next a job may still lose too much."""
        moves: list[Move] = []
        unchecked = list(groups)
        while unchecked:
            group = unchecked.pop()
            is_fine = len(group.pins) < 2 or _in_time([group], progress, {})
            if not is_fine and (found := self._move_out(group, unmoved(progress, moves))):
                moves.append(found[0])
                unchecked += found[1]
        return moves

    def _move_out(self, group: Group, progress: Mapping[str, Progress]) -> tuple[Move, list[Group]] | None:
        """Move one job to where all are in time, the cheapest alone first. Also returns the rest of the group; None if no move
        helps."""
        for job in self._by_price([job for job in group.jobs if self.search.may_move(job)]):
            rest = list(groups_without(group, [job.name]))
            if _in_time([*rest, isolated(job)], progress, {job.name: job.load_s}) and (
                found := self._moved(job, group, rest, progress)
            ):
                return found
        return None

    def _moved(
        self, job: JobSpec, group: Group, rest: Iterable[Group], progress: Mapping[str, Progress]
    ) -> tuple[Move, list[Group]] | None:
        """The job goes to the cheapest other place, and `rest` is left of its group; None, and nothing changes: there is no
        room."""
        rest = self.groups.replace([group], rest)
        place = self.search.offer(job, progress, job.load_s)
        if place is None:
            self.groups.replace(rest, [group])
            return None
        home = self.take(place)
        left = self._changed([g for g in rest if self.groups.get(g.name) is g])
        return self._move(job, "move", home), left

    def _by_price(self, jobs: Iterable[JobSpec]) -> list[JobSpec]:
        return sorted(jobs, key=lambda job: isolated_usd(job, self.cluster))

    def _changed(self, groups: list[Group]) -> list[Group]:
        self._repack.dirty.update((group.name, None) for group in groups)
        return groups

    def _forget(self, name: str) -> None:
        self.feasibility.forget(name)
        self.partitioner.forget(name)

    def _feasible(self, group: Group) -> bool:
        return self.feasibility.allows(group.jobs, *pairs_of_pins(group.pins))

    def _move(self, job: JobSpec, kind: str, group: Group) -> Move:
        pin = self.groups.pin_of(job.name)
        load_s = job.load_s if kind == "move" else 0.0
        return Move(job=job.name, kind=kind, group=group.name, rollout=pin.runs_rollouts_on, train=pin.train, load_s=load_s)


def _in_time(groups: Iterable[Group], progress: Mapping[str, Progress], loads: Mapping[str, float]) -> bool:
    """Whether no job is expected to be late in these groups; unknown progress is no reason to move a job."""
    return all(late_job(group, progress, loads) is None for group in groups if all(job.name in progress for job in group.jobs))


def _seen(group: Group, progress: Mapping[str, Progress]) -> bool:
    """Whether all were seen for LEAST steps. A move costs minutes, and an announced phase time is no reason for one: the real
    time is known a few steps later."""
    found = [progress.get(job.name) for job in group.jobs]
    return all(at is not None and (at.done if at.seen is None else at.seen) >= LEAST for at in found)


def unmoved(progress: Mapping[str, Progress], moves: Sequence[Move]) -> Mapping[str, Progress]:
    """The progress without these jobs: no job is moved twice in one answer."""
    gone = {move.job for move in moves}
    return {name: progress[name] for name in progress if name not in gone} if gone else progress
