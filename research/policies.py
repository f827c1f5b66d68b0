"""The placement policies a simulation can compare, by name, and the baselines Random, MostIdle and RollMux's Algorithm 1.

Called by simulate.py; pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from research.fluid import colocated, gavel, ideal, optimal, run_fluid
from research.optimum import Optimum
from research.outcome import Run
from research.replay import Policy, Replay
from research.workload.varying import Moments, profiled
from research.workload.workload import Arrival
from verl_mux.errors import UserError
from verl_mux.placement.feasibility import Progress
from verl_mux.placement.groups import (
    Groups,
    Place,
    Search,
    cheapest_alone,
    groups_without,
    isolated,
    with_newcomer,
    yet_to_take,
)
from verl_mux.placement.model import COLOCATED, LIVE, SEPARATE, Cluster, Group, JobSpec, NodeKind, Rules
from verl_mux.placement.planner import Answer, Arrive, Leave, Planner, Question, decision_for

Choose = Callable[[Sequence[Group]], Group]
P = TypeVar("P", bound=Planner)


class MemoryOnly:
    """A placer that lets `choose` pick one of the groups with room in host memory."""

    def __init__(self, cluster: Cluster, cap: int, choose: Choose) -> None:
        self.cluster = cluster
        self.cap = cap
        self.choose = choose
        self.groups = Groups(cluster)

    def answer(self, question: Question, progress: Mapping[str, Progress], now: float, held: frozenset[str]) -> Answer:
        if isinstance(question, Leave):
            group = self.groups.group_of(question.name)
            self.groups.replace([group], groups_without(group, [question.name]))
        if not isinstance(question, Arrive):
            return Answer()
        job, before = question.job, self.groups.usd_per_hour
        tried = [(group, joined) for group in self.groups.values() if (joined := self._joined(group, job))]
        if tried:
            chosen = self.choose([group for group, _ in tried])
            (group,) = self.groups.replace([chosen], [next(j for g, j in tried if g is chosen)])
        else:
            (group,) = self.groups.replace([], [isolated(job)])
        return Answer(decision=decision_for(group, self.groups.usd_per_hour - before))

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
        return with_newcomer(group, job, on, on_train)


def _with_room(used_gb: Mapping[str, float], need_gb: float, kind: NodeKind) -> list[str]:
    """Emptiest first."""
    room = [node for node, used in used_gb.items() if used + need_gb <= kind.host_memory_gb]
    return sorted(room, key=lambda node: used_gb[node])


def random_choice(seed: int) -> Choose:
    return random.Random(seed).choice


def most_idle(groups: Sequence[Group]) -> Group:
    """The one whose nodes are promised the least of their time."""
    return min(groups, key=lambda group: sum(group.rollout_used) + sum(group.train_used))


class PaperRules(Rules, frozen=True, kw_only=True):
    """Rules with two more, of the paper.

    whole_pool: every job trains on all training nodes of its group, and keeps them when others leave.
    prune_saturated: skip groups with T_load >= T_cycle.
    """

    whole_pool: bool = False
    prune_saturated: bool = False


PAPER = PaperRules(
    training_scaling=False, colocate=False, whole_pool=True, prune_saturated=True, best_fit=False, guard=False, repack=False
)


class PaperSearch(Search):
    """The search for a place under those two rules as well."""

    rules: PaperRules

    def shortlist(self, modes: Iterable[JobSpec], below: float) -> list[tuple[float, JobSpec, Group]]:
        found = super().shortlist(modes, below)
        return [each for each in found if not (self.rules.prune_saturated and is_saturated(each[2]))]

    def join(self, job: JobSpec, group: Group, *given: Any, **named: Any) -> Place | None:
        count = len(group.train_nodes)
        if not self.rules.whole_pool:
            return super().join(job, group, *given, **named)
        if job.train_nodes > count:
            return None
        rollout_nodes, mode = (count, COLOCATED) if job.colocated else (job.rollout_nodes, SEPARATE)
        wide = msgspec.structs.replace(job, train_nodes=count, rollout_nodes=rollout_nodes, modes=(mode,))
        place = super().join(wide, group, *given, **named)
        return place and msgspec.structs.replace(place, job=job)


def is_saturated(group: Group) -> bool:
    """T_load >= T_cycle of the paper: phase seconds per round on the busiest node, with switches where jobs share it, against
    the longest iteration alone of any job."""

    def hold_s(job: JobSpec, at: int, shared: bool) -> float:
        switches_s = (job.rollout_switch_s, job.train_switch_s + (job.rollout_switch_s if job.colocated else 0.0))
        return (job.rollout_hold_s, job.train_hold_s)[at] + (switches_s[at] if shared else 0.0)

    on = [(0, group.on_rollout(node)) for node in group.rollout_nodes] + [(1, group.on_train(node)) for node in group.train_nodes]
    load_s = max(sum(hold_s(job, at, len(jobs) > 1) for job in jobs) for at, jobs in on)
    return load_s >= max(job.iteration_s for job in group.jobs)


def by_its_rules(planner: P) -> P:
    """The planner, which from now on follows the paper's two rules too, if they are among its own."""
    placer, rules = planner.placer, planner.rules
    if isinstance(rules, PaperRules):
        kept = msgspec.structs.replace(rules, training_scaling=rules.training_scaling and not rules.whole_pool)
        placer.search = PaperSearch(placer.groups, kept, placer.feasibility)
    return planner


class Case(msgspec.Struct, frozen=True):
    """One workload on one cluster. moments: of its jobs, by name. optimum: of jobs as they are in those, by what the same work
    costs. rules: of `ours`; their cap holds for every policy, and for `live` and `optimum` whether jobs are colocated. movable:
    under `live` the launcher of a running job can start it again elsewhere."""

    arrivals: Sequence[Arrival]
    moments: Mapping[str, Moments]
    cluster: Cluster
    rules: Rules
    seed: int
    optimum: Optimum
    movable: bool = False


def _replayed(make: Callable[[Case], Policy]) -> Callable[[Case], Run]:
    return lambda case: Replay(case.arrivals, make(case), case.cluster).run()


def _live(case: Case) -> Run:
    """Jobs are profiled first, on the cheapest nodes of their own; the planner is given how long phases really take."""
    rules = msgspec.structs.replace(LIVE, cap=case.rules.cap, colocate=case.rules.colocate)
    placer = Planner.of_one(case.cluster, rules)
    alone = [msgspec.structs.replace(a, job=cheapest_alone(a.job, case.cluster, rules)) for a in case.arrivals]
    return Replay([profiled(a, case.movable) for a in alone], placer, case.cluster, learns=True).run()


POLICIES: dict[str, Callable[[Case], Run]] = {
    # Every job on nodes of its own, both pools.
    "solo": _replayed(lambda case: Planner.of_one(case.cluster, Rules(cap=1, colocate=False))),
    # Every job on training nodes of its own, both phases there, at the same speed.
    "colocated": lambda case: run_fluid(case.arrivals, case.moments, colocated(case.cluster)),
    # Gavel+ of the paper: GPUs of both kinds for every job alone, as many of each as are cheapest.
    "gavel": lambda case: run_fluid(case.arrivals, case.moments, gavel(case.cluster)),
    # Any group with room in host memory.
    "random": _replayed(lambda case: MemoryOnly(case.cluster, case.rules.cap, random_choice(case.seed))),
    # The idlest group with room in host memory.
    "most-idle": _replayed(lambda case: MemoryOnly(case.cluster, case.rules.cap, most_idle)),
    # Algorithm 1 of the paper, nothing moved.
    "rollmux": _replayed(
        lambda case: by_its_rules(Planner.of_one(case.cluster, msgspec.structs.replace(PAPER, cap=case.rules.cap)))
    ),
    # What the coordinator does: its placer with its rules, and all that it pays for.
    "live": _live,
    # This project's placer, to which phases are known beforehand and last as long as it thinks.
    "ours": _replayed(lambda case: by_its_rules(Planner.of_one(case.cluster, case.rules))),
    # The cheapest division of the jobs as they are at any time, moving for nothing.
    "optimum": lambda case: run_fluid(case.arrivals, case.moments, optimal(case.optimum)),
    # Phases packed without a gap.
    "ideal": lambda case: run_fluid(case.arrivals, case.moments, ideal(case.cluster, case.rules)),
}
# No division of whole nodes, so not to be held against the cheapest one.
BOUNDS = ("ideal",)


def find_policies(names: Sequence[str]) -> list[str]:
    """The names as given, if all are known. Raises UserError."""
    for name in names:
        if name not in POLICIES:
            raise UserError(f"policy {name!r} is not known; allowed: {', '.join(POLICIES)}")
    if not names:
        raise UserError(f"no policy given; allowed: {', '.join(POLICIES)}")
    return list(dict.fromkeys(names))
