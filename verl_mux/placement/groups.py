"""The co-execution groups and the nodes they hold, and the ways one job can join a group. Pure."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import msgspec
import numpy as np

from verl_mux.placement.feasibility import TOLERANCE, Pairs, connected, pair, pairs_of_nodes
from verl_mux.placement.layouts import isolated_usd, share
from verl_mux.placement.model import Cluster, Group, JobSpec, NodeKind, Pin, Pool
from verl_mux.placement.rules import Rules

# Which nodes of a pool are taken. Low numbers first, so that the same run names the same nodes.


class Nodes:
    """FREE -> taken by take() -> FREE by release(). A pool without node names grows as needed. closed: nodes of the pool, or
    others, that are never free. spot: those that may vanish; spot_usd: USD per hour of those that have a price of
    their own."""

    def __init__(
        self, pool: Pool, closed: Collection[str] = (), spot: Collection[str] = (), spot_usd: Mapping[str, float] | None = None
    ) -> None:
        self.pool = pool
        self.taken: set[str] = set()
        self._number = {name: i for i, name in enumerate(pool.nodes or ())}
        self._names = list(pool.nodes or ())
        self._closed = {name for name in closed if name in self._number}
        own = spot_usd or {}
        # How much less than the pool's price each costs.
        self._spot = {
            i: pool.kind.usd_per_hour - own[name] if name in own else 0.0 for name, i in self._number.items() if name in spot
        }
        self._free = [number for name, number in self._number.items() if name not in self._closed]

    @property
    def free(self) -> float:
        return math.inf if self.pool.nodes is None else len(self._names) - len(self.taken | self._closed)

    @property
    def saved_usd(self) -> float:
        """How much less than the pool's price those that are taken cost, USD per hour."""
        return sum(less for number, less in self._spot.items() if self._names[number] in self.taken)

    def would_save_usd(self, count: int) -> float:
        """The same of so many that `take` would give, one that may vanish rather than another."""
        return sum(heapq.nlargest(count, [self._spot[number] for number in self._free if number in self._spot]))

    def take(self, spot: bool) -> str:
        """One that is free; spot: rather one that may vanish than another, the cheapest, else rather not."""
        assert self.free >= 1
        if not self._free:
            name = f"{self.pool.name}-{len(self._names)}"
            heapq.heappush(self._free, len(self._names))
            self._number[name] = len(self._names)
            self._names.append(name)
        name = self._names[self._pop(spot)]
        self.taken.add(name)
        return name

    def _pop(self, spot: bool) -> int:
        if not self._spot:
            return heapq.heappop(self._free)
        first = min(self._free, key=lambda number: ((number in self._spot) is not spot, -self._spot.get(number, 0.0), number))
        self._free.remove(first)
        heapq.heapify(self._free)
        return first

    def take_back(self, names: Iterable[str]) -> None:
        """Those of them that were released meanwhile."""
        if released := [name for name in names if name not in self.taken]:
            self.claim(released)

    def claim(self, names: Iterable[str]) -> None:
        """Takes nodes by name, of those that this pool names."""
        names = {name for name in names if name in self._number}
        self.taken |= names
        self._free = [number for number in self._free if self._names[number] not in names]
        heapq.heapify(self._free)

    def release(self, names: Iterable[str]) -> None:
        for name in names:
            self.taken.remove(name)
            if name not in self._closed:
                heapq.heappush(self._free, self._number[name])


# The ways one job can join a group whose jobs all stay where they are, and a group without one of its jobs.
#
# Between the paper's strategies (direct packing: no new node; rollout scaling: new rollout nodes, training shared;
# isolated: a group of its own) lie those that it leaves out: new training nodes with rollout nodes shared, and some new
# nodes beside some shared ones.

NEW = "new: "

# By whether the newcomer gets new rollout nodes, and new training nodes.
STRATEGIES = {
    (False, False): "direct packing",
    (True, False): "rollout scaling",
    (False, True): "training scaling",
    (True, True): "scaling of both sides",
}


class Side(msgspec.Struct, frozen=True):
    """Nodes of one side for the newcomer: those shared, how many new ones, and the pairs of jobs that then share."""

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

    def allowed(self, rules: Rules) -> bool:
        return (rules.rollout_scaling or not self.rollout.new) and (rules.training_scaling or not self.train.new)


def extensions(group: Group, job: JobSpec, cluster: Cluster, rules: Rules) -> list[Extension]:
    """All ways for `job` to share at least one node with `group` that leave room on every node, in time and in memory.
    Cheapest first, then fewest conflicts."""
    usd = cluster.rollout.kind.usd_per_hour, cluster.train.kind.usd_per_hour
    both = (
        Extension(r.new * usd[0] + t.new * usd[1], r, t)
        for r in _rollout_sides(group, job, cluster)
        for t in _train_sides(group, job, cluster, rules.whole_pool)
        if r.pairs | t.pairs
    )
    return sorted(
        (found for found in both if found.allowed(rules)),
        key=lambda e: (e.usd, e.rollout.pairs.bit_count() + e.train.pairs.bit_count()),
    )


def _rollout_sides(group: Group, job: JobSpec, cluster: Cluster) -> list[Side]:
    members = [(pin.job.rollout_share, pin.job.memory_gb[0], pin.rollout) for pin in group.pins]
    nodes = cluster.shared_with(job, group.rollout_nodes)
    room = _room(nodes, members, job.rollout_share, job.memory_gb[0], cluster.rollout.kind)
    return _sides(room, len(members), job.nodes[0])


def _train_sides(group: Group, job: JobSpec, cluster: Cluster, whole_pool: bool) -> list[Side]:
    members = [(pin.job.train_share, pin.job.memory_gb[1], pin.train) for pin in group.pins]
    nodes = cluster.shared_with(job, group.train_nodes)
    room = _room(nodes, members, job.train_share, job.memory_gb[1], cluster.train.kind)
    if not whole_pool:
        return _sides(room, len(members), job.train_nodes)
    if sum(map(len, room.values())) < len(group.train_nodes) or job.train_nodes > len(group.train_nodes):
        return []
    return [Side(group.train_nodes, 0, sum(pair(i, len(members)) for i in range(len(members))))]


def _room(
    nodes: Sequence[str], members: Sequence[tuple], share_of_time: float, memory_gb: float, kind: NodeKind
) -> dict[int, list[str]]:
    """Nodes with room for the newcomer, by who is on them (bits of members)."""
    room: dict[int, list[str]] = {}
    for node in nodes:
        here = [i for i, (_, _, on) in enumerate(members) if node in on]
        time = sum(members[i][0] for i in here) + share_of_time
        memory = sum(members[i][1] for i in here) + memory_gb
        if time <= TOLERANCE and memory <= kind.host_memory_gb:
            room.setdefault(sum(1 << i for i in here), []).append(node)
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


def with_newcomer(group: Group, job: JobSpec, rollout: Sequence[str], train: Sequence[str], order: str) -> Group:
    """The group with the newcomer pinned to these nodes, new ones among them or not."""
    return Group(
        name=group.name,
        pins=(*group.pins, Pin(job=job, rollout=tuple(rollout), train=tuple(train))),
        rollout_nodes=(*group.rollout_nodes, *(n for n in rollout if n not in group.rollout_nodes)),
        train_nodes=(*group.train_nodes, *(n for n in train if n not in group.train_nodes)),
        order=order,
    )


def isolated(job: JobSpec) -> Group:
    """A group of its own on new nodes, as the job is placed."""
    rollout = yet_to_take(job, "rollout", job.nodes[0])
    train = yet_to_take(job, "train", job.nodes[1])
    pin = Pin(job=job, rollout=rollout, train=train)
    return Group(name="", pins=(pin,), rollout_nodes=rollout, train_nodes=train)


def yet_to_take(job: JobSpec, side: str, count: int) -> tuple[str, ...]:
    """Names that stand for new nodes until they are taken from a pool."""
    return tuple(f"{NEW}{job.name} {side} {i}" for i in range(count))


def groups_without(group: Group, gone: Sequence[str]) -> Iterator[Group]:
    """What is left when jobs go: nodes that nobody is pinned to are dropped, and jobs that no longer share a node,
    directly or through others, are groups of their own (all under the old name). Nobody moves."""
    pins = [pin for pin in group.pins if pin.job.name not in gone]
    rollout, train = pairs_of_pins(pins)
    for members in connected(rollout | train, len(pins)):
        yield _restricted(group, tuple(pins[i] for i in members))


def _restricted(group: Group, pins: tuple[Pin, ...]) -> Group:
    rollout = {node for pin in pins for node in pin.rollout}
    train = {node for pin in pins for node in pin.train}
    return Group(
        name=group.name,
        pins=pins,
        rollout_nodes=tuple(n for n in group.rollout_nodes if n in rollout),
        train_nodes=tuple(n for n in group.train_nodes if n in train),
        order=group.order,
    )


def pairs_of_pins(pins: Sequence[Pin]) -> tuple[Pairs, Pairs]:
    """Pairs of jobs that share rollout nodes, and training nodes."""
    return _pairs([pin.rollout for pin in pins]), _pairs([pin.train for pin in pins])


def _pairs(on: Sequence[tuple[str, ...]]) -> Pairs:
    number: dict[str, int] = {}
    return pairs_of_nodes([sum(1 << number.setdefault(node, len(number)) for node in nodes) for nodes in on])


# All groups as rows of numbers, so that one decision looks at thousands of them at once.

EMPTY = np.inf  # the share of time promised on a node that a group does not have: never room for anybody


class GroupTable:
    """Groups in the order in which they were set up; `replace` keeps a group's place in it."""

    def __init__(self) -> None:
        self._row: dict[str, int] = {}
        self._groups: list[Group | None] = []
        self._unused: list[int] = []
        self._turns = itertools.count()
        self._turn = np.zeros(0, dtype=np.int64)
        self._jobs = np.zeros(0, dtype=np.int64)
        self._fullness = np.zeros(0)
        self._used = {"rollout": np.full((0, 1), EMPTY), "train": np.full((0, 1), EMPTY)}

    def add(self, group: Group) -> None:
        if not self._unused:
            self._grow()
        row = self._unused.pop()
        self._row[group.name] = row
        self._turn[row] = next(self._turns)
        self._fill(row, group)

    def replace(self, group: Group) -> None:
        """Other numbers for a group that is there under the same name."""
        self._fill(self._row[group.name], group)

    def remove(self, name: str) -> None:
        row = self._row.pop(name)
        self._groups[row] = None
        self._fullness[row] = EMPTY
        self._unused.append(row)
        for used in self._used.values():
            used[row] = EMPTY

    def openings(
        self, need: tuple[int, int], cap: int, room: tuple[float, float], usd: tuple[float, float], below: float, best_fit: bool
    ) -> Iterator[tuple[float, Group]]:
        """(least USD per hour it could ask, group) of the groups with fewer than `cap` jobs that share a node with a job
        that needs so many for less than `below`, the cheapest first; of equally cheap ones the fullest (`best_fit`), then
        the oldest.

        A node can be shared that promised no more than `room`; `usd`: of a node the group would have to add. Pairs are
        (rollout, training).
        """
        sides = zip(("rollout", "train"), need, room, strict=True)
        shared = [np.minimum((self._used[side] <= most).sum(axis=1), asked) for side, asked, most in sides]
        new = [asked - held for asked, held in zip(need, shared, strict=True)]
        least = new[0] * usd[0] + new[1] * usd[1]
        rows = np.flatnonzero((self._jobs < cap) & (least < below) & (shared[0] + shared[1] > 0))
        second = -self._fullness[rows] if best_fit else np.zeros(len(rows))
        ordered = rows[np.lexsort((self._turn[rows], second, least[rows]))]
        return ((float(least[row]), self._groups[row]) for row in ordered)

    def emptiest(self, count: int) -> list[Group]:
        """So many groups, the least full first, then the oldest."""
        count = min(count, len(self._row))
        if not count:
            return []
        # All that are as full as the last one counted, so that it is the oldest of them that is taken.
        most = np.partition(self._fullness, count - 1)[count - 1]
        rows = np.flatnonzero(self._fullness <= most)
        ordered = rows[np.lexsort((self._turn[rows], self._fullness[rows]))]
        return [self._groups[row] for row in ordered[:count]]

    def _fill(self, row: int, group: Group) -> None:
        self._groups[row] = group
        self._jobs[row] = len(group.pins)
        self._fullness[row] = group.fullness
        for side, shares in (("rollout", group.rollout_used), ("train", group.train_used)):
            if missing := max(len(shares) - self._used[side].shape[1], 0):
                self._used[side] = np.pad(self._used[side], ((0, 0), (0, missing)), constant_values=EMPTY)
            self._used[side][row] = EMPTY
            self._used[side][row, : len(shares)] = shares

    def _grow(self) -> None:
        """Twice as many rows."""
        old, more = len(self._groups), max(len(self._groups), 16)
        self._groups += [None] * more
        self._unused = list(range(old + more - 1, old - 1, -1))
        self._turn = np.pad(self._turn, (0, more))
        self._jobs = np.pad(self._jobs, (0, more))
        self._fullness = np.pad(self._fullness, (0, more), constant_values=EMPTY)
        for side, used in self._used.items():
            self._used[side] = np.pad(used, ((0, more), (0, 0)), constant_values=EMPTY)


# Which co-execution groups there are, and which nodes they hold. Every change is one `replace`, so no node is lost.

SIDES = (lambda group: group.rollout_nodes, lambda group: group.train_nodes)


class Groups(Mapping[str, Group]):
    """The co-execution groups by name. table: the same as numbers. home: job name -> group name. named: groups that were ever
    given a name. touched: names of those that changed, came or went, for whoever empties it."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._by_name: dict[str, Group] = {}
        from verl_mux.placement.groups import GroupTable  # numpy: a coordinator that places nobody does without it

        self.table = GroupTable()
        self.home: dict[str, str] = {}
        self._rollout = Nodes(cluster.rollout, cluster.closed, cluster.spot, cluster.spot_usd)
        self._train = Nodes(cluster.train, cluster.closed, cluster.spot, cluster.spot_usd)
        self._held = [0, 0]
        self.named = 0
        self.touched: set[str] = set()

    def __getitem__(self, name: str) -> Group:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def free(self) -> tuple[float, float]:
        """Nodes that nobody holds: rollout, training."""
        return self._rollout.free, self._train.free

    @property
    def usd_per_hour(self) -> float:
        pools = self.cluster.rollout, self.cluster.train
        usd = sum(held * pool.kind.usd_per_hour for held, pool in zip(self._held, pools, strict=True))
        return usd - self._rollout.saved_usd - self._train.saved_usd

    def alone_usd(self, job: JobSpec) -> float:
        """Of nodes of its own as it is placed, USD per hour: of those that are free now, some of which may be cheaper."""
        usd = isolated_usd(job, self.cluster)
        if job.movable and self.cluster.spot_usd:
            rollout, train = job.nodes
            usd -= self._rollout.would_save_usd(rollout) + self._train.would_save_usd(train)
        return usd

    def group_of(self, job: str) -> Group:
        return self._by_name[self.home[job]]

    def pin_of(self, job: str) -> Pin:
        return next(pin for pin in self.group_of(job).pins if pin.job.name == job)

    def replace(self, old: Iterable[Group], new: Iterable[Group]) -> list[Group]:
        """Dissolves `old` and sets up `new`, whose nodes are those of `old` or yet to be taken. Returns the new groups
        with their nodes taken and named; a new group under the name of an old one keeps it."""
        old, new = list(old), list(new)
        for group in old:
            self._drop(group.name)
        gone = self._dropped(old, new)
        # Where there is room, take before giving back: who is moved should not end up where it was, under a new pin.
        ask = [sum(node.startswith(NEW) for group in new for node in nodes(group)) for nodes in SIDES]
        first = any(count > free for count, free in zip(ask, self.free, strict=True))
        if first:
            self._release(gone)
        names = {group.name for group in old}
        done = [self._set_up(group, names) for group in new]
        if not first:
            self._release(gone)
        return done

    def _dropped(self, old: Sequence[Group], new: Sequence[Group]) -> list[list[str]]:
        """Nodes of each side that no new group keeps."""
        kept = [{node for group in new for node in nodes(group)} for nodes in SIDES]
        return [
            [node for group in old for node in nodes(group) if node not in held] for nodes, held in zip(SIDES, kept, strict=True)
        ]

    def _release(self, gone: Sequence[Sequence[str]]) -> None:
        self._rollout.release(gone[0])
        self._train.release(gone[1])

    def _set_up(self, group: Group, names: set[str]) -> Group:
        name = group.name if group.name in names else self._next_name()
        names.discard(name)
        tied = [pin for pin in group.pins if not pin.job.movable]
        rollout = _taken(group.rollout_nodes, self._rollout, {node for pin in tied for node in pin.rollout})
        train = _taken(group.train_nodes, self._train, {node for pin in tied for node in pin.train})
        pins = tuple(
            Pin(job=p.job, rollout=tuple(rollout[n] for n in p.rollout), train=tuple(train[n] for n in p.train))
            for p in group.pins
        )
        done = Group(
            name=name,
            pins=pins,
            rollout_nodes=tuple(rollout.values()),
            train_nodes=tuple(train.values()),
            order=group.order,
        )
        self._enter(done)
        return done

    def _enter(self, group: Group) -> None:
        self._by_name[group.name] = group
        self.touched.add(group.name)
        self.table.add(group)
        self.home.update((job.name, group.name) for job in group.jobs)
        for side, nodes in enumerate(SIDES):
            self._held[side] += len(nodes(group))

    def _drop(self, name: str) -> None:
        group = self._by_name.pop(name)
        self.touched.add(name)
        self.table.remove(name)
        for job in group.jobs:
            del self.home[job.name]
        for side, nodes in enumerate(SIDES):
            self._held[side] -= len(nodes(group))

    def _next_name(self) -> str:
        self.named += 1
        return f"g{self.named}"

    def adopt(self, groups: Iterable[Group], named: int) -> None:
        """Takes over groups as they are, under their names."""
        self.named = named
        groups = list(groups)
        for group in groups:
            self._enter(group)
        for nodes, pool in zip(SIDES, (self._rollout, self._train), strict=True):
            pool.claim(node for group in groups for node in nodes(group))
        self.touched.clear()

    def reorder(self, name: str, order: str) -> None:
        """The group's waiting phases start in another order."""
        self._by_name[name] = group = msgspec.structs.replace(self._by_name[name], order=order)
        self.touched.add(name)
        self.table.replace(group)

    def update(self, job: JobSpec) -> Group:
        """The same job with other estimates, where it is and as it is placed."""
        group, pin = self.group_of(job.name), self.pin_of(job.name)
        job = msgspec.structs.replace(job, colocated=pin.job.colocated)
        pins = tuple(Pin(job=job, rollout=p.rollout, train=p.train) if p is pin else p for p in group.pins)
        self._by_name[group.name] = group = msgspec.structs.replace(group, pins=pins)
        self.touched.add(group.name)
        self.table.replace(group)
        return group


def _taken(nodes: Sequence[str], pool: Nodes, tied: Collection[str]) -> dict[str, str]:
    """Each node under its real name, taking from the pool those that are yet to be taken. tied: of jobs that nobody starts
    again."""
    pool.take_back([node for node in nodes if not node.startswith(NEW)])
    return {node: pool.take(spot=node not in tied) if node.startswith(NEW) else node for node in nodes}
