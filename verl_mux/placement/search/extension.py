"""The ways one job can join a group whose jobs all stay where they are, and a group without one of its jobs.

Between the paper's strategies (direct packing: no new node; rollout scaling: new rollout nodes, training shared;
isolated: a group of its own) lie those that it leaves out: new training nodes with rollout nodes shared, and some new
nodes beside some shared ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from verl_mux.placement.model import Cluster, Group, JobSpec, NodeKind, Pin
from verl_mux.placement.search.layouts import share
from verl_mux.placement.search.rules import Rules
from verl_mux.placement.time.conflicts import Pairs, connected, pair, pairs_of_nodes
from verl_mux.placement.time.feasibility import TOLERANCE

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
