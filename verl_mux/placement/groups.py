"""The co-execution groups and the nodes they hold, and the ways in which one job can join a group.

Pure; held by a Placer (placer.py) and by the baselines in research/. Every change of the groups is one `replace`, so that no node
is lost.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import msgspec

from verl_mux.placement.feasibility import TOLERANCE, Pairs, connected, pair, pairs_of_nodes
from verl_mux.placement.layouts import share
from verl_mux.placement.model import Cluster, Group, JobSpec, NodeKind, Pin, Pool
from verl_mux.placement.rules import Rules

# --- joining and leaving one group; all other jobs of it stay where they are ---
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
    room = _room(cluster.open(group.rollout_nodes), members, job.rollout_share, job.memory_gb[0], cluster.rollout.kind)
    return _sides(room, len(members), job.nodes[0])


def _train_sides(group: Group, job: JobSpec, cluster: Cluster, whole_pool: bool) -> list[Side]:
    members = [(pin.job.train_share, pin.job.memory_gb[1], pin.train) for pin in group.pins]
    room = _room(cluster.open(group.train_nodes), members, job.train_share, job.memory_gb[1], cluster.train.kind)
    if not whole_pool:
        return _sides(room, len(members), job.train_nodes)
    if sum(map(len, room.values())) < len(group.train_nodes) or job.train_nodes > len(group.train_nodes):
        return []
    return [Side(group.train_nodes, 0, sum(pair(i, len(members)) for i in range(len(members))))]


def _room(
    nodes: Sequence[str], members: Sequence[tuple], share_of_time: float, memory_gb: float, kind: NodeKind
) -> dict[int, list[str]]:
    """Nodes with room for the newcomer, by the members on them (bits)."""
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
        rollout_nodes=tuple(dict.fromkeys((*group.rollout_nodes, *rollout))),
        train_nodes=tuple(dict.fromkeys((*group.train_nodes, *train))),
        order=order,
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
        self._number = {name: i for i, name in enumerate(pool.nodes or ())}
        self._names = list(pool.nodes or ())
        self._closed = {name for name in closed if name in self._number}
        self._free = [number for name, number in self._number.items() if name not in self._closed]

    @property
    def free(self) -> float:
        return math.inf if self.pool.nodes is None else len(self._names) - len(self.taken | self._closed)

    def take(self) -> str:
        """Take a free node."""
        assert self.free >= 1
        if not self._free:
            name = f"{self.pool.name}-{len(self._names)}"
            heapq.heappush(self._free, len(self._names))
            self._number[name] = len(self._names)
            self._names.append(name)
        name = self._names[heapq.heappop(self._free)]
        self.taken.add(name)
        return name

    def claim(self, names: Iterable[str]) -> None:
        """Take nodes by name, as far as this pool names them and they are not taken."""
        if claimed := {name for name in names if name in self._number} - self.taken:
            self.taken |= claimed
            self._free = [number for number in self._free if self._names[number] not in claimed]
            heapq.heapify(self._free)

    def release(self, names: Iterable[str]) -> None:
        for name in names:
            self.taken.remove(name)
            if name not in self._closed:
                heapq.heappush(self._free, self._number[name])


SIDES = (lambda group: group.rollout_nodes, lambda group: group.train_nodes)


class Groups(Mapping[str, Group]):
    """The co-execution groups by name, in the order in which they were set up. home: job name -> group name. named: groups that
    were ever given a name. touched: names of groups that changed, came or went since the caller last emptied it."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._by_name: dict[str, Group] = {}
        self.home: dict[str, str] = {}
        self._rollout = Nodes(cluster.rollout, cluster.closed)
        self._train = Nodes(cluster.train, cluster.closed)
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
        """Free nodes: rollout, training."""
        return self._rollout.free, self._train.free

    @property
    def usd_per_hour(self) -> float:
        pools = self.cluster.rollout, self.cluster.train
        held = [sum(len(nodes(group)) for group in self._by_name.values()) for nodes in SIDES]
        return sum(count * pool.kind.usd_per_hour for count, pool in zip(held, pools, strict=True))

    def group_of(self, job: str) -> Group:
        return self._by_name[self.home[job]]

    def pin_of(self, job: str) -> Pin:
        return self.group_of(job).pin_of(job)

    def openings(
        self, job: JobSpec, cap: int, room: tuple[float, float], below: float, best_fit: bool
    ) -> list[tuple[float, Group]]:
        """(least USD per hour it could ask, group) of the groups with fewer than `cap` jobs that could share a node with the job
        for less than `below`, the cheapest first; of equally cheap ones the fullest (`best_fit`), then the oldest. A rollout or
        training node can be shared that has promised no more of its time than `room`."""
        usd = self.cluster.rollout.kind.usd_per_hour, self.cluster.train.kind.usd_per_hour
        found = []
        for group in self._by_name.values():
            if len(group.pins) >= cap:
                continue
            shared = [
                min(sum([used <= most for used in shares]), need)
                for shares, most, need in zip((group.rollout_used, group.train_used), room, job.nodes, strict=True)
            ]
            least = (job.nodes[0] - shared[0]) * usd[0] + (job.nodes[1] - shared[1]) * usd[1]
            if least < below and any(shared):
                found.append((least, group))
        return sorted(found, key=lambda each: (each[0], -each[1].fullness if best_fit else 0.0))

    def emptiest(self, count: int) -> list[Group]:
        """The `count` least full groups, the least full first, then the oldest."""
        return sorted(self._by_name.values(), key=lambda group: group.fullness)[:count]

    def replace(self, old: Iterable[Group], new: Iterable[Group]) -> list[Group]:
        """Dissolve `old` and set up `new`, whose nodes are those of `old` or yet to be taken. Returns the new groups
        with their nodes taken and named; a new group under the name of an old one keeps it."""
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
        self._rollout.release(gone[0])
        self._train.release(gone[1])

    def _set_up(self, group: Group, names: set[str]) -> Group:
        name = group.name
        if name not in names:
            self.named += 1
            name = f"g{self.named}"
        names.discard(name)
        rollout, train = _taken(group.rollout_nodes, self._rollout), _taken(group.train_nodes, self._train)
        pins = tuple(
            Pin(job=p.job, rollout=tuple(rollout[n] for n in p.rollout), train=tuple(train[n] for n in p.train))
            for p in group.pins
        )
        nodes = {"rollout_nodes": tuple(rollout.values()), "train_nodes": tuple(train.values())}
        done = Group(name=name, pins=pins, order=group.order, **nodes)
        self._enter(done)
        return done

    def _enter(self, group: Group) -> None:
        self._by_name[group.name] = group
        self.touched.add(group.name)
        self.home.update((job.name, group.name) for job in group.jobs)

    def _drop(self, name: str) -> None:
        group = self._by_name.pop(name)
        self.touched.add(name)
        for job in group.jobs:
            del self.home[job.name]

    def adopt(self, groups: Iterable[Group], named: int) -> None:
        """Take over groups as they are, under their names."""
        self.named = named
        groups = list(groups)
        for group in groups:
            self._enter(group)
        for nodes, pool in zip(SIDES, (self._rollout, self._train), strict=True):
            pool.claim(node for group in groups for node in nodes(group))
        self.touched.clear()

    def reorder(self, name: str, order: str) -> None:
        """Let the waiting phases of the group start in another order."""
        self._enter(msgspec.structs.replace(self._by_name[name], order=order))

    def update(self, job: JobSpec) -> Group:
        """The same job with other estimates, where it is and as it is placed."""
        group, pin = self.group_of(job.name), self.pin_of(job.name)
        job = msgspec.structs.replace(job, colocated=pin.job.colocated)
        pins = tuple(Pin(job=job, rollout=p.rollout, train=p.train) if p is pin else p for p in group.pins)
        self._enter(msgspec.structs.replace(group, pins=pins))
        return self._by_name[group.name]


def _taken(nodes: Sequence[str], pool: Nodes) -> dict[str, str]:
    """Each node under its real name; those that are yet to be taken are taken from the pool, and so are those that were released
    meanwhile."""
    pool.claim(node for node in nodes if not node.startswith(NEW))
    return {node: pool.take() if node.startswith(NEW) else node for node in nodes}
