"""Which co-execution groups there are, and which nodes they hold. Every change is one `replace`, so no node is lost."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import msgspec

from verl_mux.placement.model import Cluster, Group, JobSpec, Pin
from verl_mux.placement.search.cheapest_nodes import isolated_usd
from verl_mux.placement.search.extension import NEW
from verl_mux.placement.search.nodes import Nodes

SIDES = (lambda group: group.rollout_nodes, lambda group: group.train_nodes)


class Groups(Mapping[str, Group]):
    """The co-execution groups by name. table: the same as numbers. home: job name -> group name. named: groups that were ever
    given a name. touched: names of those that changed, came or went, for whoever empties it."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._by_name: dict[str, Group] = {}
        from verl_mux.placement.search.group_table import GroupTable  # numpy: a coordinator that places nobody does without it

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
