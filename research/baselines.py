"""Random and most-idle placement, taken literally from the paper's section 7.5: into some group that has room in host
memory and is not full, whatever that does to anybody's SLO. A job that needs more nodes than the group has brings the
missing ones. Nothing moves; nodes that nobody is pinned to any more are dropped.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from verl_mux.placement.feasibility import Progress
from verl_mux.placement.groups import Groups, groups_without, isolated, with_newcomer, yet_to_take
from verl_mux.placement.model import Cluster, Group, JobSpec, NodeKind
from verl_mux.placement.search import Decision, Move, decision_for

Choose = Callable[[Sequence[Group]], Group]


class MemoryOnly:
    """A placer that lets `choose` pick one of the groups with room in host memory."""

    pending = False

    def __init__(self, cluster: Cluster, cap: int, choose: Choose) -> None:
        self.cluster = cluster
        self.cap = cap
        self.choose = choose
        self.groups = Groups(cluster)

    def admit(self, job: JobSpec, progress: Mapping[str, Progress]) -> Decision:
        before = self.groups.usd_per_hour
        tried = [(group, joined) for group in self.groups.values() if (joined := self._joined(group, job))]
        if tried:
            chosen = self.choose([group for group, _ in tried])
            (group,) = self.groups.replace([chosen], [next(j for g, j in tried if g is chosen)])
        else:
            (group,) = self.groups.replace([], [isolated(job)])
        return decision_for(group, self.groups.usd_per_hour - before)

    def depart(self, name: str, progress: Mapping[str, Progress], now: float) -> list[Move]:
        group = self.groups.group_of(name)
        self.groups.replace([group], groups_without(group, [name]))
        return []

    def repack(self, progress: Mapping[str, Progress], now: float) -> list[Move]:
        return []

    def _joined(self, group: Group, job: JobSpec) -> Group | None:
        if len(group.pins) >= self.cap:
            return None
        rollout, train = self.cluster.rollout.kind, self.cluster.train.kind
        used = {n: sum(j.rollout_memory_gb for j in group.on_rollout(n)) for n in group.rollout_nodes}
        used_train = {n: sum(j.train_memory_gb for j in group.on_train(n)) for n in group.train_nodes}
        on = _with_room(used, job.rollout_memory_gb, rollout)[: job.rollout_nodes]
        on_train = _with_room(used_train, job.train_memory_gb, train)[: job.train_nodes]
        if not on and not on_train:
            return None
        on += yet_to_take(job, "rollout", job.rollout_nodes - len(on))
        on_train += yet_to_take(job, "train", job.train_nodes - len(on_train))
        return with_newcomer(group, job, on, on_train, group.order)


def _with_room(used_gb: Mapping[str, float], need_gb: float, kind: NodeKind) -> list[str]:
    """Emptiest first."""
    room = [node for node, used in used_gb.items() if used + need_gb <= kind.host_memory_gb]
    return sorted(room, key=lambda node: used_gb[node])


def random_choice(seed: int) -> Choose:
    return random.Random(seed).choice


def most_idle(groups: Sequence[Group]) -> Group:
    """The one whose nodes are promised the least of their time."""
    return min(groups, key=lambda group: sum(group.rollout_used) + sum(group.train_used))
