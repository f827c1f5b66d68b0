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

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from verl_mux.placement.divisions import OutOfEffort, Part, Partitioner, SharedNodes
from verl_mux.placement.estimator import LEAST
from verl_mux.placement.feasibility import Feasibility, Progress, late_job
from verl_mux.placement.group_run import group_periods
from verl_mux.placement.groups import (
    EPSILON_USD,
    SIDES,
    Books,
    Groups,
    Search,
    groups_without,
    isolated,
    isolated_usd,
    pairs_of_pins,
    yet_to_take,
)
from verl_mux.placement.model import FIFO, ORDERS, Cluster, Group, JobSpec, Pin, Rules

# The order of a group in which an SLO is at risk and no job can move.
FIRST_AID = "tightest-first"


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """A job is to start on these nodes, out of the queue (kind `start`), or to go there from elsewhere (`move`), where
    it starts cold, in `load_s` seconds, with the iteration it is in."""

    job: str
    kind: str
    group: str
    rollout: tuple[str, ...]
    train: tuple[str, ...]
    load_s: float = 0.0


def moved(job: JobSpec, kind: str, group: Group) -> Move:
    """The move of the job that brings it into the group, in which it is by now."""
    pin, load_s = group.pin_of(job.name), job.load_s if kind == "move" else 0.0
    return Move(job=job.name, kind=kind, group=group.name, rollout=pin.runs_rollouts_on, train=pin.train, load_s=load_s)


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """What was done for an SLO that was about to be missed. kind: `order` (of the group's phases), `move` (of `job`, to
    elsewhere), or `priority` (of `job`, since nothing keeps all SLOs)."""

    kind: str
    group: str
    job: str
    reason: str


# A group is tried with the emptiest others first; in a large cluster the fuller ones are left alone.
WINDOWS = 4
# A regrouping too close to an SLO now is looked at again when its youngest job is older by this part plus these seconds.
LATER, LATER_S = 0.05, 60.0


class Placer:
    """groups: as they are, by name. `progress` says how far the placed jobs are, by name; the caller carries the moves out."""

    def __init__(self, cluster: Cluster, rules: Rules, books: Books) -> None:
        self.cluster, self.rules = cluster, rules
        self.groups = Groups(cluster, books)
        self.feasibility = Feasibility(rules.keep)
        self.search = Search(self.groups, rules, self.feasibility)
        self.partitioner = Partitioner(cluster, self.feasibility, rules)

    def adopt(self, groups: Sequence[Group]) -> None:
        """Go on from where another placer was. What moving would save is looked for anew."""
        self.groups.adopt(groups)
        self._changed([group for group in groups if any(job.movable for job in group.jobs)])

    @property
    def pending(self) -> bool:
        """Whether `repack` has something in view that may pay later, or did not come to an end."""
        return self.rules.repack and bool(self.groups.dirty)

    # --- one job comes or goes ---

    def drop(self, name: str, progress: Mapping[str, Progress]) -> list[Move]:
        """The job is gone, and the nodes on which it was alone are free. Returns moves of jobs that would be late without it."""
        self._forget(name)
        group = self.groups.group_of(name)
        left = self._changed(self.groups.replace([group], groups_without(group, [name])))
        return self._relieve(left, progress) if self.rules.repack and self.rules.guard else []

    # --- estimates that change ---

    def correct(self, job: JobSpec, progress: Mapping[str, Progress]) -> tuple[list[Move], list[Action]]:
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
        return moves, taken

    def _at_risk(self, group: Group, progress: Mapping[str, Progress]) -> str | None:
        """What endangers an SLO, or None."""
        if len(group.pins) < 2:
            return None
        if self._allowed(group.pins, group.order):
            known = all(job.name in progress for job in group.jobs)
            late = late_job(group, progress, {}) if self.rules.guard and known else None
            return None if late is None else f"as the group stands now, {late} would be late"
        periods = group_periods(group)
        for job in group.jobs:
            if (mean_s := periods[job.name]) > job.limit_s:
                return f"{job.name} takes {mean_s:.0f} s an iteration, its SLO allows {job.limit_s:.0f} s"
        return f"not every SLO is kept with a probability of {self.rules.keep:g}, now or after a job leaves"

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
        self.partitioner.until = self.partitioner.simulated + self.rules.effort  # groups that may be simulated
        while self.rules.repack and self._may_move(now) and (found := self._next(unmoved(progress, moves))):
            self._changed(self.groups.replace(found.old, found.groups))
            moves += [moved(job, "move", self.groups.group_of(job.name)) for job in found.movers]
            self.groups.books.moved_at += [now] * len(found.movers)
        return moves

    def _next(self, progress: Mapping[str, Progress]) -> Regrouping | None:
        """A regrouping that pays now, or None. Jobs of unknown progress are not moved, nor are others moved to them."""
        seen: set[frozenset[str]] = set()
        try:
            for name in [name for name, at in self.groups.dirty.items() if _due(at, progress)]:
                if (group := self.groups.get(name)) and (found := self._look(group, progress, seen)):
                    return found
                if name not in self.groups:
                    del self.groups.dirty[name]
        except OutOfEffort:
            pass  # groups that were not reached stay dirty, and come first next time
        return None

    def _look(self, group: Group, progress: Mapping[str, Progress], seen: set[frozenset[str]]) -> Regrouping | None:
        """`seen`: sets of groups that were looked at."""
        again_s = math.inf
        for window in self._windows(group):
            names = frozenset(g.name for g in window)
            if names in seen:
                continue
            seen.add(names)
            if found := self._regrouping(window):
                wait_s = self._wait_s(found, progress)
                if wait_s == 0:
                    return found
                again_s = min(again_s, wait_s)
        del self.groups.dirty[group.name]
        if again_s < math.inf:
            youngest = min(group.jobs, key=lambda job: progress[job.name].age_s if job.name in progress else math.inf)
            at = progress.get(youngest.name)
            self.groups.dirty[group.name] = (youngest.name, (at.age_s if at else 0.0) + again_s)
        return None

    def _windows(self, group: Group) -> Iterator[list[Group]]:
        """Sets of groups to divide anew together, of `reach` jobs at most: this one and the emptiest others, then pairs of
        them."""
        if not any(self.search.may_move(job) for job in group.jobs):
            return
        reach = self.rules.reach
        # No window holds more than `reach`.
        emptiest = sorted(self.groups.values(), key=lambda group: group.fullness)[: WINDOWS * reach + 1]
        others = [g for g in emptiest if g is not group]
        for _ in range(WINDOWS):
            window, size = [group], len(group.pins)
            while others and size + len(others[0].pins) <= reach:
                size += len(others[0].pins)
                window.append(others.pop(0))
            if len(window) > 1 or len(group.pins) > 1:
                yield window
            if len(window) > 2:
                yield from ([group, other] for other in window[1:])
            if not others:
                return

    def _regrouping(self, groups: Sequence[Group]) -> Regrouping | None:
        usd, parts = self.partitioner.solve(job for group in groups for job in group.jobs)
        now = sum(self.search.price.of_group(group) for group in groups)
        found = regroup(groups, parts, self.search) if usd < now - EPSILON_USD else None
        if found is None:
            return None
        # A cheaper division may need more nodes of the cheaper kind than a finite cluster has.
        more = [sum(len(nodes(g)) for g in found.groups) - sum(len(nodes(g)) for g in found.old) for nodes in SIDES]
        return found if all(need <= free for need, free in zip(more, self.groups.free, strict=True)) else None

    def _wait_s(self, found: Regrouping, progress: Mapping[str, Progress]) -> float:
        """0: carry it out now. Else seconds after which to look again."""
        names = [job.name for group in found.groups for job in group.jobs]
        if not all(name in progress for name in names):
            return LATER_S
        if wait_s := found.pays_in_s(self.cluster, progress, self.rules.hysteresis):
            return wait_s
        loads = {job.name: job.load_s for job in found.movers}
        if _in_time([group for group in found.groups if group not in found.old], progress, loads):
            return 0.0
        return LATER_S + LATER * min(progress[name].age_s for name in names)

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
        if self._allowed(group.pins, group.order):
            found = self._move_out(group, progress)
            return found[0] if found else None
        by_price = self._by_price(group.jobs)
        fits = [job for job in by_price if all(self._allowed(rest.pins) for rest in groups_without(group, [job.name]))]
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
        home = self.groups.take(place)
        left = self._changed([g for g in rest if self.groups.get(g.name) is g])
        return moved(job, "move", home), left

    def _allowed(self, pins: Sequence[Pin], order: str = FIFO) -> bool:
        """Whether all keep their SLOs once every job has had its turn a few times."""
        return self.feasibility.allows([pin.job for pin in pins], *pairs_of_pins(pins), order)

    def _by_price(self, jobs: Iterable[JobSpec]) -> list[JobSpec]:
        return sorted(jobs, key=lambda job: isolated_usd(job, self.cluster))

    def _changed(self, groups: list[Group]) -> list[Group]:
        self.groups.dirty.update((group.name, None) for group in groups)
        return groups

    def _forget(self, name: str) -> None:
        self.feasibility.forget(name)
        self.partitioner.forget(name)


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


# --- regrouping ---
#
# The saving is counted until the first of the jobs concerned ends: the others are then divided anew. A job that does not say
# how many iterations it has left is expected to stay as long again as it has stayed (job lengths are heavy-tailed). Against the
# saving stands the cost of the moved jobs' nodes while those load, and while they did that part of an iteration which a move
# throws away.


class Regrouping(msgspec.Struct, frozen=True):
    """groups: what `old` becomes; new nodes are yet to be taken. movers: jobs whose nodes change.
    saving_usd: per hour."""

    old: tuple[Group, ...]
    groups: tuple[Group, ...]
    movers: tuple[JobSpec, ...]
    saving_usd: float

    def pays_in_s(self, cluster: Cluster, progress: Mapping[str, Progress], hysteresis: float) -> float:
        """Seconds after which the saving should pay for the moves `hysteresis` times; 0: now; infinite: some job concerned
        says that it ends before."""
        concerned = [(job, progress[job.name]) for group in self.groups if group not in self.old for job in group.jobs]
        loss = sum(isolated_usd(job, cluster) * _lost_s(job, progress[job.name]) for job in self.movers)
        needed_s = hysteresis * loss / self.saving_usd
        wait_s = max([0.0, *(needed_s - at.age_s for _, at in concerned if at.left is None)])
        lefts_s = [left_s for job, at in concerned if (left_s := at.left_s(job)) is not None]
        return math.inf if min(lefts_s, default=math.inf) - wait_s < needed_s else wait_s


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
    """What turns the groups `old` into the given parts with few moves; None: it saves nothing, or moves a job that cannot
    move."""
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
    """Old groups without the jobs that are not among `jobs` or there in another mode, those that take longest to move first; then
    the same without one more job, the youngest first: it is to join the others anew, as where they need fewer nodes by now."""
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
        base = place.group
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
    return Group(name=jobs[0].name, pins=pins, rollout_nodes=rollout, train_nodes=train)


def _chosen(nodes: tuple[str, ...], bits: int) -> tuple[str, ...]:
    return tuple(node for i, node in enumerate(nodes) if bits >> i & 1)


def _due(at: tuple[str, float] | None, progress: Mapping[str, Progress]) -> bool:
    return at is None or at[0] not in progress or progress[at[0]].age_s >= at[1]
