"""What a placer may do: its rules, the orders of waiting phases, and the modes in which a job may run. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from verl_mux.errors import UserError
from verl_mux.placement.model import Cluster, JobSpec

# In which order the waiting phases of a group start. One function per order, one line each in ORDERS.
#
# An order ranks the jobs: among waiting phases the lowest rank goes first, equal ranks in order of arrival. Whatever the
# order, a phase starts when no phase before it needs one of its nodes and all of them are free: all at once or not at all.


def fifo(jobs: Sequence[JobSpec]) -> list[int]:
    """One queue per node, first come first served (the paper's runtime)."""
    return [0] * len(jobs)


def rounds(jobs: Sequence[JobSpec]) -> list[int]:
    """First come first served, but nobody begins a rollout before everybody has begun as many (the paper's
    meta-iteration). Over several nodes FIFO lets a short job overtake and then stand in a long one's way."""
    return fifo(jobs)


def longest_first(jobs: Sequence[JobSpec]) -> list[int]:
    """The longest iteration alone goes first: it sets the cycle, the others fit into its bubbles."""
    return _ranks([-job.iteration_s for job in jobs])


def tightest_first(jobs: Sequence[JobSpec]) -> list[int]:
    """The least room between the iteration alone and its SLO goes first."""
    return _ranks([job.limit_s - job.iteration_s for job in jobs])


def _ranks(keys: Sequence[float]) -> list[int]:
    ordered = sorted(keys)
    return [ordered.index(key) for key in keys]


ORDERS: dict[str, Callable[[Sequence[JobSpec]], list[int]]] = {
    "fifo": fifo,
    "rounds": rounds,
    "longest-first": longest_first,
    "tightest-first": tightest_first,
}
# Orders that GroupRun keeps in step.
IN_ROUNDS = frozenset(("rounds",))


# What a placer may do. Each part beyond the paper is a switch, so that it can be measured on its own.


class Rules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """cap: jobs in a group. rollout_scaling, training_scaling: new nodes on one side for a job that shares the other
    (the paper knows the first; with the second, also some new nodes beside shared ones on both). colocate: jobs that can run
    both phases on their training nodes may be placed so; off: only those that cannot be placed otherwise. whole_pool: every job
    trains on all training nodes of its group, as in the paper, and keeps them when others leave. prune_saturated: skip
    groups with T_load >= T_cycle. best_fit: of equally cheap places take the fullest, not the oldest. orders: tried in
    turn. guard: check a join on the group as it stands now, over the whole life of its jobs, not on its settled periods
    alone. repack: move jobs where the saving pays for the cold start. reach: most jobs that one repack looks at together.
    effort: groups simulated per decision; a repack goes on where it stopped when it is asked again. shortlist: groups
    looked at per decision. max_bypass: younger jobs that may start before a waiting one. hysteresis: a saving must pay for its
    moves so many times. moves_per_hour: in all, those that rescue an SLO apart; 0: no limit. keep: probability with which
    everybody keeps the SLO over ten iterations while phases vary together; 0: phases are taken to last as estimated.
    count_stays: places are compared by what the same work costs there, not by the hour (price.py).
    """

    cap: int = 5
    rollout_scaling: bool = True
    training_scaling: bool = True
    colocate: bool = True
    whole_pool: bool = False
    prune_saturated: bool = False
    best_fit: bool = True
    orders: tuple[str, ...] = ("fifo",)
    guard: bool = True
    repack: bool = True
    reach: int = 8
    effort: int = 16
    shortlist: int = 64
    max_bypass: int = 8
    hysteresis: float = 1.0
    moves_per_hour: int = 0
    keep: float = 0.0
    count_stays: bool = False

    def __post_init__(self) -> None:
        if self.cap < 1:
            raise UserError(f"cap is {self.cap}; a group holds at least 1 job")
        if not self.hysteresis >= 1:
            raise UserError(f"hysteresis is {self.hysteresis:g}; a saving must pay for its moves at least 1 time")
        if not 0 <= self.keep < 1:
            raise UserError(f"keep is {self.keep:g}; a probability of at least 0 and below 1 is needed")
        for order in self.orders:
            if order not in ORDERS:
                raise UserError(f"order {order!r} is not known; allowed: {', '.join(ORDERS)}")


OURS = Rules()
# What the coordinator runs, and `simulate` as `live`: moves cost what they take, phases vary, and nobody knows them beforehand.
# New training nodes beside shared rollout nodes, and the fullest group of equals, pay only where jobs are moved afterwards.
# Even odds over ten iterations (chance.py) are enough: over a job's hundreds what varies evens out, and what drifts is corrected.
LIVE = Rules(training_scaling=False, best_fit=False, effort=256, hysteresis=1.5, moves_per_hour=60, keep=0.5, count_stays=True)
PAPER = Rules(
    training_scaling=False, colocate=False, whole_pool=True, prune_saturated=True, best_fit=False, guard=False, repack=False
)


def parse_rules(cap: int, changes: Sequence[str]) -> Rules:
    """OURS with this cap and `name=value` changes: on or off, a whole number, or orders joined by +. Raises UserError."""
    fields = {field.name: field for field in msgspec.structs.fields(Rules)}
    given: dict[str, object] = {}
    for change in changes:
        name, _, value = change.partition("=")
        if name not in fields:
            raise UserError(f"rule {change!r} is not known; allowed: {', '.join(f'{known}=...' for known in fields)}")
        given[name] = _parsed(change, value, fields[name].default)
    return msgspec.structs.replace(OURS, **{"cap": cap, **given})


def _parsed(change: str, value: str, default: object) -> object:
    if isinstance(default, bool):
        if value not in ("on", "off"):
            raise UserError(f"rule {change!r} is not understood; give on or off")
        return value == "on"
    if isinstance(default, tuple):
        return tuple(value.split("+"))
    if isinstance(default, float):
        try:
            return float(value)
        except ValueError:
            raise UserError(f"rule {change!r} is not understood; give a number") from None
    if not value.isdigit():
        raise UserError(f"rule {change!r} is not understood; give a whole number")
    return int(value)


# How a job may be placed: with nodes of both pools, or colocated, with both phases on its training nodes.


def modes_of(job: JobSpec, cluster: Cluster, rules: Rules) -> list[JobSpec]:
    """The job as it may be placed, in each allowed mode in which the empty cluster could hold it."""
    return [placed for placed in allowed(job, rules) if too_large(placed, cluster) is None]


def allowed(job: JobSpec, rules: Rules) -> tuple[JobSpec, ...]:
    """The job as it may be placed, in each mode that it can run in and the rules do not rule out."""
    if rules.colocate:
        return job.in_modes
    return tuple(placed for placed in job.in_modes if not placed.colocated) or job.in_modes


def too_large(job: JobSpec, cluster: Cluster) -> str | None:
    """Why the cluster cannot hold the job, as it is placed, even alone; None: it can."""
    pools = (("rollout", cluster.rollout), ("train", cluster.train))
    for (side, pool), need, memory in zip(pools, job.nodes, job.memory_gb, strict=True):
        if need > pool.size:
            return f"job {job.name!r} needs {need} {side} nodes; pool {pool.name!r} has {pool.size}"
        if memory > pool.kind.host_memory_gb:
            return (
                f"job {job.name!r} needs {memory:g} GB of host memory per {side} node;"
                f" a node of pool {pool.name!r} has {pool.kind.host_memory_gb:g}"
            )
    return None
