"""Cheaper divisions of the jobs of a few groups, the moves that lead there, and whether they pay.

Pure; held by a Placer (placer.py); `Partitioner` also serves the optimum in research/.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from verl_mux.placement.feasibility import Feasibility, Progress, late_job, pairs_of_nodes
from verl_mux.placement.groups import SIDES, Search, groups_without, isolated, yet_to_take
from verl_mux.placement.layouts import (
    EPSILON_USD,
    Find,
    Price,
    SharedNodes,
    cheapest_alone,
    cheapest_nodes,
    in_cheapest_modes,
    isolated_usd,
)
from verl_mux.placement.model import Cluster, Group, JobSpec, Pin, Rules

# --- the cheapest way to divide jobs into groups: a dynamic programme over sets of jobs ---
#
# Exact given what `cheapest_nodes` says a group costs, and tractable to about 16 jobs at a time: those costs are remembered,
# so that a job that arrives only adds the sets it is in.
#
# The probability that a group keeps its SLOs takes long to compute. It is asked only for the groups of the division that would be
# cheapest if phases lasted as estimated. Groups that fail are priced anew, and the division is sought again. A group that is
# feasible while phases vary is also feasible while they last, so the result is the one that asking for every group would find.

Part = tuple[tuple[JobSpec, ...], SharedNodes | None]


class OutOfEffort(Exception):
    """The search has used up what it may simulate; what it found so far is remembered."""


class Partitioner:
    """Remembers the cheapest nodes of every set of up to `cap` jobs it met, and the cheapest divisions; `forget` a
    job when it leaves or when its estimates change.

    until: the number of groups (`simulated`) from which on it gives up with OutOfEffort.
    find: the cheapest nodes of jobs in given modes; None: `cheapest_nodes` within what `feasibility` allows."""

    def __init__(self, cluster: Cluster, feasibility: Feasibility, rules: Rules, find: Find | None = None) -> None:
        self.cluster, self.feasibility, self.rules = cluster, feasibility, rules
        price = Price(cluster, rules).of_shared if rules.count_stays else None
        # While phases last as estimated.
        self._lasting = Feasibility() if feasibility.keep and find is None else feasibility
        self._find = find or (lambda jobs, below: cheapest_nodes(jobs, cluster, self._lasting, below, price))
        self._find_sure: Find = lambda jobs, below: cheapest_nodes(jobs, cluster, feasibility, below, price)
        self.until = math.inf
        # By the jobs' names, sorted.
        self._shared: dict[tuple[str, ...], SharedNodes | None] = {}
        self._solved: dict[tuple[str, ...], tuple[float, list[Part]]] = {}
        self._keys: dict[str, list[tuple[str, ...]]] = {}
        self._doubted: set[tuple[str, ...]] = set()  # what they share has to be sure

    def forget(self, name: str) -> None:
        if self._lasting is not self.feasibility:
            self._lasting.forget(name)
        for key in self._keys.pop(name, ()):
            self._shared.pop(key, None)
            self._solved.pop(key, None)
            self._doubted.discard(key)

    def solve(self, jobs: Iterable[JobSpec]) -> tuple[float, list[Part]]:
        """(USD per hour, parts): jobs as they are placed, with the nodes they share, None for a job on nodes of its own."""
        ordered = sorted(jobs, key=lambda job: job.name)
        key = tuple(job.name for job in ordered)
        if key not in self._solved:
            found = _Division(self, ordered).solve()
            while self._corrected(found[1]):
                found = _Division(self, ordered).solve()
            self._solved[key] = found
            self._note(key)
        return self._solved[key]

    @property
    def simulated(self) -> int:
        """Groups so far."""
        return sum(each.simulated for each in {self.feasibility, self._lasting})

    def _corrected(self, parts: Sequence[Part]) -> bool:
        """Whether there are groups among these that do not keep their SLOs as phases vary. They are priced anew when they are met
        again, and so are larger ones, which may have been left out because of them."""
        if self._lasting is self.feasibility:
            return False

        def is_sure(shared: SharedNodes) -> bool:
            return self.feasibility.allows(shared.jobs, pairs_of_nodes(shared.rollout), pairs_of_nodes(shared.train))

        wrong = [shared for _, shared in parts if shared is not None and not is_sure(shared)]
        for key in [tuple([job.name for job in shared.jobs]) for shared in wrong]:
            self._doubted.add(key)
            for larger in [other for other in self._keys[key[0]] if set(key) <= set(other)]:
                self._shared.pop(larger, None)
        return bool(wrong)

    def shared_nodes(self, jobs: Sequence[JobSpec], below: Callable[[], float]) -> SharedNodes | None:
        """`below`: what the jobs cost in the best smaller groups; a group that is not cheaper is of no use. Jobs come
        sorted by name."""
        key = tuple([job.name for job in jobs])
        if key not in self._shared:
            if self.simulated >= self.until:
                raise OutOfEffort
            self._note(key)
            find = self._find_sure if key in self._doubted else self._find
            self._shared[key] = in_cheapest_modes(jobs, self.cluster, self.rules, find, below() - EPSILON_USD)
        return self._shared[key]

    def _note(self, key: tuple[str, ...]) -> None:
        for name in key:
            self._keys.setdefault(name, []).append(key)


class _Division:
    """One run of the programme; sets of jobs are bits, and each group is listed under its lowest job."""

    def __init__(self, owner: Partitioner, jobs: list[JobSpec]) -> None:
        self.owner = owner
        self.jobs = jobs
        self.alone = [cheapest_alone(job, owner.cluster, owner.rules) for job in jobs]
        self.alone_usd = [isolated_usd(job, owner.cluster) for job in self.alone]
        self.groups: list[list[tuple[int, SharedNodes]]] = [[] for _ in jobs]
        self.best: dict[int, tuple[float, int]] = {0: (0.0, 0)}

    def solve(self) -> tuple[float, list[Part]]:
        for low in range(len(self.jobs) - 1, -1, -1):
            self._list_groups(low)
        all_jobs = (1 << len(self.jobs)) - 1
        return self._cheapest(all_jobs)[0], self._read_off(all_jobs)

    def _list_groups(self, low: int) -> None:
        """All groups of use whose lowest job is `low`, small ones first, as larger ones must beat them."""
        owner, jobs = self.owner, self.jobs
        for size in range(1, min(owner.rules.cap, len(jobs))):
            for others in itertools.combinations(range(low + 1, len(jobs)), size):
                members = (low, *others)
                bits = sum([1 << i for i in members])
                if shared := owner.shared_nodes([jobs[i] for i in members], functools.partial(self._least_usd, bits)):
                    self.groups[low].append((bits, shared))

    def _cheapest(self, bits: int) -> tuple[float, int]:
        if bits not in self.best:
            self.best[bits] = self._split(bits)
        return self.best[bits]

    def _least_usd(self, bits: int) -> float:
        return self._split(bits)[0]

    def _split(self, bits: int) -> tuple[float, int]:
        """Lowest cost over the groups listed so far for the lowest job, and that group."""
        low = (bits & -bits).bit_length() - 1
        found = 1 << low
        least = self.alone_usd[low] + self._cheapest(bits ^ found)[0]
        for group, shared in self.groups[low]:
            if group & ~bits == 0:
                usd = shared.price + self._cheapest(bits ^ group)[0]
                if usd < least - EPSILON_USD:
                    least, found = usd, group
        return least, found

    def _read_off(self, bits: int) -> list[Part]:
        parts = []
        while bits:
            group = self.best[bits][1]
            low = (bits & -bits).bit_length() - 1
            shared = dict(self.groups[low]).get(group)
            parts.append((shared.jobs if shared else (self.alone[low],), shared))
            bits ^= group
        return parts


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

    def in_time(self, progress: Mapping[str, Progress]) -> bool:
        """Whether every job keeps its SLO over its whole life, cold starts of the movers included."""
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


# --- looking for a regrouping that pays ---

# A group is tried with the emptiest others first; in a large cluster the fuller ones are left alone.
WINDOWS = 4
# A regrouping too close to an SLO now is looked at again when its youngest job is older by this part plus these seconds.
LATER, LATER_S = 0.05, 60.0


class Repack:
    """dirty: groups that changed since they were last looked at with nothing to gain, each with the (job, age in
    seconds) from which on another look makes sense."""

    def __init__(self, search: Search, partitioner: Partitioner) -> None:
        self.search, self.groups, self.rules, self.partitioner = search, search.groups, search.rules, partitioner
        self.dirty: dict[str, tuple[str, float] | None] = {}

    def begin(self) -> None:
        """A new search may simulate `effort` groups again."""
        self.partitioner.until = self.partitioner.simulated + self.rules.effort

    def next(self, progress: Mapping[str, Progress]) -> Regrouping | None:
        """A regrouping that pays now, or None. Jobs of unknown progress are not moved, nor are others moved to them."""
        seen: set[frozenset[str]] = set()
        try:
            for name in [name for name, at in self.dirty.items() if _due(at, progress)]:
                if (group := self.groups.get(name)) and (found := self._look(group, progress, seen)):
                    return found
                if name not in self.groups:
                    del self.dirty[name]
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
        del self.dirty[group.name]
        if again_s < math.inf:
            youngest = min(group.jobs, key=lambda job: progress[job.name].age_s if job.name in progress else math.inf)
            at = progress.get(youngest.name)
            self.dirty[group.name] = (youngest.name, (at.age_s if at else 0.0) + again_s)
        return None

    def _windows(self, group: Group) -> Iterator[list[Group]]:
        """Sets of groups to divide anew together, of `reach` jobs at most: this one and the emptiest others, then pairs of
        them."""
        if not any(self.search.may_move(job) for job in group.jobs):
            return
        reach = self.rules.reach
        others = [g for g in self.groups.emptiest(WINDOWS * reach + 1) if g is not group]  # no window holds more than `reach`
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
        if wait_s := found.pays_in_s(self.groups.cluster, progress, self.rules.hysteresis):
            return wait_s
        if found.in_time(progress):
            return 0.0
        return LATER_S + LATER * min(progress[name].age_s for name in names)


def _due(at: tuple[str, float] | None, progress: Mapping[str, Progress]) -> bool:
    return at is None or at[0] not in progress or progress[at[0]].age_s >= at[1]
