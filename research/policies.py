"""The placement policies a simulation can compare, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from research.baselines import MemoryOnly, most_idle, random_choice
from research.fluid import colocated, optimal, run_fluid
from research.fractions import gavel, ideal
from research.ledger import Run
from research.optimum.optimum import Optimum
from research.replay import Policy, Replay
from research.workload.moments import Moments
from research.workload.noise import profiled
from research.workload.workload import Arrival
from verl_mux.errors import UserError
from verl_mux.placement.layouts import cheapest_alone
from verl_mux.placement.model import Cluster
from verl_mux.placement.planner import Planner
from verl_mux.placement.rules import LIVE, PAPER, Rules


class Case(msgspec.Struct, frozen=True):
    """One workload on one cluster. moments: of its jobs, by name. optimum: of jobs as they are in those, by what the same work
    costs. rules: of `ours`; their cap holds for every policy, and for `live` and `optimum` whether jobs are colocated. movable:
    under `live` whoever started running jobs starts them again elsewhere."""

    arrivals: Sequence[Arrival]
    moments: Mapping[str, Moments]
    cluster: Cluster
    rules: Rules
    seed: int
    optimum: Optimum
    movable: bool = False
    on_finish: Callable[[], None] = lambda: None


def _replayed(make: Callable[[Case], Policy]) -> Callable[[Case], Run]:
    return lambda case: Replay(case.arrivals, make(case), case.cluster).run(case.on_finish)


def _live(case: Case) -> Run:
    """Jobs are profiled first, on the cheapest nodes of their own; the placer is told how long phases really take."""
    rules = _limited(LIVE, case)
    placer = Planner.of_one(case.cluster, rules)
    alone = [msgspec.structs.replace(a, job=cheapest_alone(a.job, case.cluster, rules)) for a in case.arrivals]
    return Replay([profiled(a, case.movable) for a in alone], placer, case.cluster, placer).run(case.on_finish)


def _limited(rules: Rules, case: Case) -> Rules:
    return msgspec.structs.replace(rules, cap=case.rules.cap, colocate=rules.colocate and case.rules.colocate)


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
    "rollmux": _replayed(lambda case: Planner.of_one(case.cluster, _limited(PAPER, case))),
    # What the coordinator does: its placer with its rules, and all that it pays for.
    "live": _live,
    # This project's placer, to which phases are known beforehand and last as long as it thinks.
    "ours": _replayed(lambda case: Planner.of_one(case.cluster, case.rules)),
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
