"""The co-execution groups and the nodes they hold, the ways in which one job can join a group, the price by which these are
compared, and the search for the cheapest (Algorithm 1 of the RollMux paper, with a wider choice of places).

Pure; held by a Placer (placer.py) and by the baselines in research/. Every change of the groups is one `replace`, so that no node
is lost.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import msgspec

from verl_mux.placement.feasibility import TOLERANCE, Feasibility, Pairs, Progress, connected, late_job, pair, pairs_of_nodes
from verl_mux.placement.group_run import group_periods
from verl_mux.placement.model import STRATEGIES, Cluster, Group, JobSpec, Pin, Pool, Rules, modes_of

EPSILON_USD = 1e-6

# --- joining and leaving one group; all other jobs of it stay where they are ---
#
# Between the paper's strategies (direct packing: no new node; rollout scaling: new rollout nodes, training shared;
# isolated: a group of its own) lie those that it leaves out: new training nodes with rollout nodes shared, and some new
# nodes beside some shared ones.

NEW = "new: "
# A group's nodes of each side.
SIDES = (lambda group: group.rollout_nodes, lambda group: group.train_nodes)
# Nodes with the same occupants: (bits of the jobs on them, number of such nodes).
Classes = tuple[tuple[int, int], ...]


def share(classes: Classes, bit: int, need: int) -> Iterator[tuple[Classes, int]]:
    """Every way to put the job on 0..need of the existing nodes: (classes afterwards, nodes it still needs)."""
    everywhere = range(len(classes))
    for size in range(len(classes) + 1):
        for whole in itertools.combinations(everywhere, size):
            left = need - sum(classes[i][1] for i in whole)
            if left >= 0:
                shared = tuple((o | bit, n) if i in whole else (o, n) for i, (o, n) in enumerate(classes))
                yield shared, left
                yield from _share_part(shared, bit, left, [i for i in everywhere if i not in whole])


def _share_part(classes: Classes, bit: int, need: int, open_to: list[int]) -> Iterator[tuple[Classes, int]]:
    for i in open_to if need else ():
        occupants, count = classes[i]
        if count > need:
            parts = ((occupants | bit, need), (occupants, count - need))
            yield (*classes[:i], *parts, *classes[i + 1 :]), 0


class Side(msgspec.Struct, frozen=True):
    """Nodes of one side for the newcomer: shared ones, the number of new ones, and the pairs of jobs that then share."""

    shared: tuple[str, ...]
    new: int
    pairs: Pairs


class Extension(msgspec.Struct, frozen=True):
    """One way to join: USD per hour more, and what it asks for on each side."""

    usd: float
    rollout: Side
    train: Side

    @property
    def strategy(self) -> str:
        return STRATEGIES[self.rollout.new > 0, self.train.new > 0]


def extensions(group: Group, job: JobSpec, cluster: Cluster, rules: Rules) -> list[Extension]:
    """All ways for `job` to share at least one node with `group` that leave room on every node, in time and in memory.
    Cheapest first, then fewest conflicts."""
    both = (
        Extension(cluster.usd(r.new, t.new), r, t)
        for r in _sides(_room(group, job, cluster, 0), len(group.pins), job.nodes[0])
        for t in _sides(_room(group, job, cluster, 1), len(group.pins), job.train_nodes)
        if r.pairs | t.pairs and (rules.rollout_scaling or not r.new) and (rules.training_scaling or not t.new)
    )
    return sorted(both, key=lambda e: (e.usd, e.rollout.pairs.bit_count() + e.train.pairs.bit_count()))


def _room(group: Group, job: JobSpec, cluster: Cluster, at: int) -> dict[int, list[str]]:
    """Nodes of a side (0 rollout, 1 training) with room for the newcomer, by the members on them (bits)."""
    room: dict[int, list[str]] = {}
    most_gb = cluster.kinds[at].host_memory_gb
    shares = [(each.rollout_share, each.train_share)[at] for each in (*group.jobs, job)]
    gb = [each.memory_gb[at] for each in (*group.jobs, job)]
    on = [(pin.rollout, pin.train)[at] for pin in group.pins]
    for node in [node for node in SIDES[at](group) if node not in cluster.closed]:
        here = [i for i, nodes in enumerate(on) if node in nodes]
        time, memory = sum([shares[i] for i in here]) + shares[-1], sum([gb[i] for i in here]) + gb[-1]
        if time <= TOLERANCE and memory <= most_gb:
            room.setdefault(sum([1 << i for i in here]), []).append(node)
    return room


def _sides(room: dict[int, list[str]], members: int, need: int) -> list[Side]:
    classes = tuple(sorted((jobs, len(names)) for jobs, names in room.items()))
    newcomer = 1 << members
    found: dict[tuple, Side] = {}
    for shared, new in share(classes, newcomer, need):
        taken = [(jobs ^ newcomer, count) for jobs, count in shared if jobs & newcomer]
        names = tuple(name for jobs, count in taken for name in room[jobs][:count])
        neighbours = {i for jobs, _ in taken for i in range(members) if jobs >> i & 1}
        found[names, new] = Side(names, new, sum(pair(i, members) for i in neighbours))
    return list(found.values())


def with_newcomer(group: Group, job: JobSpec, rollout: Sequence[str], train: Sequence[str]) -> Group:
    """The group, under FIFO, with the newcomer pinned to these nodes, new ones among them or not."""
    return Group(
        name=group.name,
        pins=(*group.pins, Pin(job=job, rollout=tuple(rollout), train=tuple(train))),
        rollout_nodes=tuple(dict.fromkeys((*group.rollout_nodes, *rollout))),
        train_nodes=tuple(dict.fromkeys((*group.train_nodes, *train))),
    )


def isolated(job: JobSpec) -> Group:
    """A group of its own on new nodes, as the job is placed."""
    rollout = yet_to_take(job, "rollout", job.nodes[0])
    train = yet_to_take(job, "train", job.nodes[1])
    return Group(name="", pins=(Pin(job=job, rollout=rollout, train=train),), rollout_nodes=rollout, train_nodes=train)


def yet_to_take(job: JobSpec, side: str, count: int) -> tuple[str, ...]:
    """Names that stand for new nodes until they are taken from a pool."""
    return tuple(f"{NEW}{job.name} {side} {i}" for i in range(count))


def groups_without(group: Group, gone: Sequence[str]) -> Iterator[Group]:
    """What is left when jobs go: nodes without a pinned job are dropped, and jobs that no longer share a node,
    directly or through others, are groups of their own (all under the old name). No job moves."""
    pins = [pin for pin in group.pins if pin.job.name not in gone]
    rollout, train = pairs_of_pins(pins)
    for members in connected(rollout | train, len(pins)):
        kept = tuple(pins[i] for i in members)
        on_rollout = {node for pin in kept for node in pin.rollout}
        on_train = {node for pin in kept for node in pin.train}
        yield Group(
            name=group.name,
            pins=kept,
            rollout_nodes=tuple(node for node in group.rollout_nodes if node in on_rollout),
            train_nodes=tuple(node for node in group.train_nodes if node in on_train),
            order=group.order,
        )


def pairs_of_pins(pins: Sequence[Pin]) -> tuple[Pairs, Pairs]:
    """Pairs of jobs that share rollout nodes, and training nodes."""
    return _pairs([pin.rollout for pin in pins]), _pairs([pin.train for pin in pins])


def _pairs(on: Sequence[tuple[str, ...]]) -> Pairs:
    number: dict[str, int] = {}
    return pairs_of_nodes([sum(1 << number.setdefault(node, len(number)) for node in nodes) for nodes in on])


# --- all groups ---


class Nodes:
    """FREE -> taken by take() -> FREE by release(). Low numbers first, so that the same run names the same nodes. A pool without
    node names grows as needed. closed: nodes of the pool, or others, that are never free."""

    def __init__(self, pool: Pool, closed: Collection[str] = ()) -> None:
        self.pool = pool
        self.taken: set[str] = set()
        self._names = dict.fromkeys(pool.nodes or ())
        self._closed = {name for name in closed if name in self._names}

    @property
    def free(self) -> float:
        return math.inf if self.pool.nodes is None else len(self._names) - len(self.taken | self._closed)

    def take(self) -> str:
        """Take a free node."""
        assert self.free >= 1
        free = (name for name in self._names if name not in self.taken and name not in self._closed)
        name = next(free, f"{self.pool.name}-{len(self._names)}")
        self._names[name] = None
        self.taken.add(name)
        return name

    def claim(self, names: Iterable[str]) -> None:
        """Take nodes by name, as far as this pool names them."""
        self.taken.update(name for name in names if name in self._names)

    def release(self, names: Iterable[str]) -> None:
        self.taken.difference_update(names)


class Books(msgspec.Struct):
    """What the groups of all pairs of pools share. named: groups that were ever given a name. moved_at: seconds, of the moves of
    the last hour that did not rescue an SLO. touched: names of groups that changed, came or went since the planner last emptied
    it. held: names of jobs that are not to be moved now, movable or not."""

    named: int = 0
    moved_at: list[float] = msgspec.field(default_factory=list)
    touched: set[str] = msgspec.field(default_factory=set)
    held: frozenset[str] = frozenset()


class Groups(Mapping[str, Group]):
    """The co-execution groups of one pair of pools by name, in the order in which they were set up. home: group by job name.
    dirty: names of groups that changed since they were last looked at with nothing to gain by moves, each with the (job, age in
    seconds) from which on another look makes sense."""

    def __init__(self, cluster: Cluster, books: Books | None = None) -> None:
        self.cluster = cluster
        self.books = books or Books()
        self.home: dict[str, str] = {}
        self.dirty: dict[str, tuple[str, float] | None] = {}
        self._by_name: dict[str, Group] = {}
        self._pools = Nodes(cluster.rollout, cluster.closed), Nodes(cluster.train, cluster.closed)

    def __getitem__(self, name: str) -> Group:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def free(self) -> tuple[float, float]:
        """Free nodes: rollout, training."""
        return self._pools[0].free, self._pools[1].free

    @property
    def usd_per_hour(self) -> float:
        return self.cluster.usd(*[sum(len(nodes(group)) for group in self._by_name.values()) for nodes in SIDES])

    def group_of(self, job: str) -> Group:
        return self._by_name[self.home[job]]

    def pin_of(self, job: str) -> Pin:
        return self.group_of(job).pin_of(job)

    def take(self, place: Place) -> Group:
        """The group of the job that goes where it was just offered to."""
        (group,) = self.replace([place.joins] if place.joins else [], [place.group])
        self.dirty[group.name] = None
        return group

    def replace(self, old: Iterable[Group], new: Iterable[Group]) -> list[Group]:
        """Dissolve `old` and set up `new`, whose nodes are those of `old` or yet to be taken. Returns the new groups
        with their nodes taken and named; a new group under the name of an old one keeps the name."""
        old, new = list(old), list(new)
        for group in old:
            self._drop(group.name)
        kept = [{node for group in new for node in nodes(group)} for nodes in SIDES]
        gone = [
            [node for group in old for node in nodes(group) if node not in held] for nodes, held in zip(SIDES, kept, strict=True)
        ]
        # Where there is room, take before giving back: a job that moves should not end up where it was, under a new pin.
        ask = [sum(node.startswith(NEW) for group in new for node in nodes(group)) for nodes in SIDES]
        first = any(count > free for count, free in zip(ask, self.free, strict=True))
        if first:
            self._release(gone)
        names = {group.name for group in old}
        done = [self._set_up(group, names) for group in new]
        if not first:
            self._release(gone)
        return done

    def _release(self, gone: Sequence[Sequence[str]]) -> None:
        for pool, names in zip(self._pools, gone, strict=True):
            pool.release(names)

    def _set_up(self, group: Group, names: set[str]) -> Group:
        name = group.name
        if name not in names:
            self.books.named += 1
            name = f"g{self.books.named}"
        names.discard(name)
        rollout, train = (_taken(nodes(group), pool) for nodes, pool in zip(SIDES, self._pools, strict=True))
        done = Group(
            name=name,
            pins=tuple(
                Pin(job=p.job, rollout=tuple(rollout[n] for n in p.rollout), train=tuple(train[n] for n in p.train))
                for p in group.pins
            ),
            rollout_nodes=tuple(rollout.values()),
            train_nodes=tuple(train.values()),
            order=group.order,
        )
        return self._enter(done)

    def _enter(self, group: Group) -> Group:
        self._by_name[group.name] = group
        self.books.touched.add(group.name)
        self.home.update((job.name, group.name) for job in group.jobs)
        return group

    def _drop(self, name: str) -> None:
        group = self._by_name.pop(name)
        self.books.touched.add(name)
        for job in group.jobs:
            del self.home[job.name]

    def adopt(self, groups: Iterable[Group]) -> None:
        """Take over groups as they are, under their names; they do not count as touched."""
        for group in groups:
            self._by_name[group.name] = group
            self.home.update((job.name, group.name) for job in group.jobs)
            for nodes, pool in zip(SIDES, self._pools, strict=True):
                pool.claim(nodes(group))

    def reorder(self, name: str, order: str) -> None:
        """Let the waiting phases of the group start in another order."""
        self._enter(msgspec.structs.replace(self._by_name[name], order=order))

    def update(self, job: JobSpec) -> Group:
        """The same job with other estimates, where it is and as it is placed."""
        group, pin = self.group_of(job.name), self.pin_of(job.name)
        job = msgspec.structs.replace(job, colocated=pin.job.colocated)
        pins = tuple(Pin(job=job, rollout=p.rollout, train=p.train) if p is pin else p for p in group.pins)
        return self._enter(msgspec.structs.replace(group, pins=pins))


def _taken(nodes: Sequence[str], pool: Nodes) -> dict[str, str]:
    """Each node under its real name; those that are yet to be taken are taken from the pool, and so are those that were released
    meanwhile."""
    pool.claim(node for node in nodes if not node.startswith(NEW))
    return {node: pool.take() if node.startswith(NEW) else node for node in nodes}


# --- prices, and the search for the lowest ---


def isolated_usd(job: JobSpec, cluster: Cluster) -> float:
    """USD per hour of nodes of its own, as it is placed."""
    return cluster.usd(*job.nodes)


def cheapest_alone(job: JobSpec, cluster: Cluster, rules: Rules) -> JobSpec:
    """The job in the mode in which nodes of its own cost the least."""
    return min(modes_of(job, cluster, rules), key=lambda placed: isolated_usd(placed, cluster))


class Price:
    """What shared nodes are compared by: USD per hour; by the rule `count_stays` USD for what the jobs would do alone in an hour.

    Jobs that take longer on shared nodes stay longer, so in the long run more of them are there at a time, and more nodes. A
    place for two at half the price each saves nothing if both take twice as long on it, as on nodes that one of them kept busy.
    """

    def __init__(self, cluster: Cluster, rules: Rules) -> None:
        self._cluster, self._count_stays = cluster, rules.count_stays

    def of_group(self, group: Group) -> float:
        """USD per hour, or per hour of work."""
        usd = group.usd_per_hour(self._cluster)
        if not self._count_stays or len(group.pins) < 2:
            return usd
        jobs, periods = sorted(group.jobs, key=lambda job: job.name), group_periods(group)
        return usd * self._slower(jobs, [periods[job.name] for job in jobs])

    def of_shared(self, usd_per_hour: float, jobs: Sequence[JobSpec], seconds: Sequence[float]) -> float:
        """The same of nodes yet to be taken. seconds: the mean iteration of each job there."""
        return usd_per_hour * self._slower(jobs, seconds)

    def _slower(self, jobs: Sequence[JobSpec], seconds: Sequence[float]) -> float:
        """By how much the jobs take longer than alone, on the mean weighted by what each costs alone."""
        usd = [isolated_usd(job, self._cluster) for job in jobs]
        if not any(usd):
            usd = [1.0] * len(jobs)  # on nodes that cost nothing they count alike
        return sum(u * s / job.iteration_s for u, s, job in zip(usd, seconds, jobs, strict=True)) / sum(usd)


class Place(msgspec.Struct, frozen=True, dict=True):
    """A place that a job may have: the job as it would be placed; USD per hour, by which places are compared; the group to join,
    and how (None: nodes of its own)."""

    job: JobSpec
    usd: float
    joins: Group | None = None
    extension: Extension | None = None

    @functools.cached_property
    def group(self) -> Group:
        """The group as it would be; its new nodes are yet to be taken."""
        job, ask = self.job, self.extension
        if self.joins is None or ask is None:
            return isolated(job)
        rollout = (*ask.rollout.shared, *yet_to_take(job, "rollout", ask.rollout.new))
        train = (*ask.train.shared, *yet_to_take(job, "train", ask.train.new))
        return with_newcomer(self.joins, job, rollout, train)


class Search:
    """The price of a place is known before it is tried. So groups are tried in order of the least they could ask, and the
    search ends at the first price that cannot be beaten."""

    def __init__(self, groups: Groups, rules: Rules, feasibility: Feasibility) -> None:
        self.groups, self.cluster, self.rules, self.feasibility = groups, groups.cluster, rules, feasibility
        self.price = Price(groups.cluster, rules)

    def may_move(self, job: JobSpec) -> bool:
        return job.movable and job.name not in self.groups.books.held

    def offer(self, job: JobSpec, progress: Mapping[str, Progress], load_s: float = 0.0) -> Place | None:
        """The cheapest place for the job in any of its modes; None if a finite cluster has no room. Groups with a job of unknown
        progress are judged by their settled periods alone. load_s: cold start of the job there."""
        free = self.groups.free
        modes = modes_of(job, self.cluster, self.rules)
        alone = [Place(placed, isolated_usd(placed, self.cluster)) for placed in modes if _fits(placed.nodes, free)]
        best = min(alone, key=lambda place: place.usd, default=None)
        below, until = best.usd if best else math.inf, self.feasibility.simulated + self.rules.effort
        for least, placed, group in self.shortlist(modes, below):
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
            if not _fits((found.rollout.new, found.train.new), free):
                continue
            jobs = (*group.jobs, job)
            if not self.feasibility.allows(jobs, rollout | found.rollout.pairs, train | found.train.pairs):
                continue
            place = self.priced(job, group, found)
            if place.usd >= below - EPSILON_USD or not self._in_time(place, group, progress, load_s):
                continue
            if not self.rules.count_stays:
                return place
            best, below = place, place.usd
        return best

    def priced(self, job: JobSpec, group: Group, extension: Extension) -> Place:
        place = Place(job, extension.usd, group, extension)
        if not self.rules.count_stays:
            return place
        return msgspec.structs.replace(place, usd=self.price.of_group(place.group) - self.price.of_group(group))

    def _in_time(self, place: Place, group: Group, progress: Mapping[str, Progress], load_s: float) -> bool:
        if not self.rules.guard or not all(member.name in progress for member in group.jobs):
            return True
        return late_job(place.group, progress, {place.job.name: load_s}) is None

    def shortlist(self, modes: Iterable[JobSpec], below: float) -> list[tuple[float, JobSpec, Group]]:
        """(least USD per hour it could ask, the job in one of its modes, group) of the groups that could share a node with the
        job for less than `below`, cheapest first; of equally cheap ones the fullest (by the rule `best_fit`), then the oldest; no
        more than the rules allow."""
        found = []
        for at, job in enumerate(modes):
            room = TOLERANCE - job.rollout_share, TOLERANCE - job.train_share
            for group in [group for group in self.groups.values() if len(group.pins) < self.rules.cap]:
                used = zip((group.rollout_used, group.train_used), room, job.nodes, strict=True)
                shared = [min(sum([share <= most for share in shares]), need) for shares, most, need in used]
                least = self.cluster.usd(job.nodes[0] - shared[0], job.nodes[1] - shared[1])
                if least < below - EPSILON_USD and any(shared):
                    found.append((least, at, -group.fullness if self.rules.best_fit else 0.0, job, group))
        found = sorted(found, key=lambda each: each[:3])[: self.rules.shortlist]
        return [(least, job, group) for least, _, _, job, group in found]


def _fits(need: tuple[int, int], free: tuple[float, float]) -> bool:
    return need[0] <= free[0] and need[1] <= free[1]
