"""What a placer may do: its rules, the orders in which the waiting phases of a group start, and the modes of a job.

Pure; read by every other module of placement, by the coordinator's settings and by `verl-mux plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from verl_mux.errors import UserError
from verl_mux.placement.model import Cluster, JobSpec

# An order ranks the jobs of a group: among waiting phases the lowest rank starts first, equal ranks in order of arrival. Under
# every order a phase starts when all its nodes are free and no phase ahead of it needs one of them.


def fifo(jobs: Sequence[JobSpec]) -> list[int]:
    """One queue per node, first come first served (the runtime of the RollMux paper)."""
    return [0] * len(jobs)


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
    "longest-first": longest_first,
    "tightest-first": tightest_first,
}


class Rules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Each part beyond the paper is a switch, so that it can be measured on its own.

    cap: most jobs in a group.
    rollout_scaling, training_scaling: new nodes on one side for a job that shares the other; with the second, also some new nodes
        beside shared ones on both sides.
    colocate: jobs that can run both phases on their training nodes may be placed so; off: only jobs that have no other mode.
    whole_pool: every job trains on all training nodes of its group, as in the paper, and keeps them when others leave.
    prune_saturated: skip groups with T_load >= T_cycle.
    best_fit: among equally cheap places take the fullest, not the oldest.
    orders: tried in turn.
    guard: check a join on the group as it stands now, over the whole life of its jobs, and not only on its settled periods.
    repack: move jobs where the saving pays for the cold start.
    reach: most jobs that one repack looks at together.
    effort: groups simulated per decision; a repack resumes where it stopped when it is asked for again.
    shortlist: groups looked at per decision.
    max_bypass: younger jobs that may start before a waiting one.
    hysteresis: a saving must pay for its moves this many times.
    moves_per_hour: in all, without moves that rescue an SLO; 0: no limit.
    keep: probability with which all jobs of a group keep their SLOs over ten iterations while phases vary together; 0: phases
        last as estimated.
    count_stays: places are compared by what the same work costs there instead of by the hour (`Price` in layouts.py).
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
# The rules of the coordinator, and of the policy `live` of `simulate`: moves cost what they take, phases vary, and their lengths
# are not known beforehand. New training nodes beside shared rollout nodes, and the fullest group of equals, pay only where jobs
# are moved afterwards. Even odds over ten iterations are enough: over the hundreds of a job what varies evens out, and what
# drifts is corrected.
LIVE = Rules(training_scaling=False, best_fit=False, effort=256, hysteresis=1.5, moves_per_hour=60, keep=0.5, count_stays=True)
PAPER = Rules(
    training_scaling=False, colocate=False, whole_pool=True, prune_saturated=True, best_fit=False, guard=False, repack=False
)


def modes_of(job: JobSpec, cluster: Cluster, rules: Rules) -> list[JobSpec]:
    """The job in each allowed mode in which the empty cluster could hold it."""
    return [placed for placed in allowed(job, rules) if too_large(placed, cluster) is None]


def allowed(job: JobSpec, rules: Rules) -> tuple[JobSpec, ...]:
    """The job in each mode that it can run in and the rules do not exclude."""
    if rules.colocate:
        return job.in_modes
    return tuple(placed for placed in job.in_modes if not placed.colocated) or job.in_modes


def too_large(job: JobSpec, cluster: Cluster) -> str | None:
    """Why the empty cluster cannot hold the job in its present mode; None: it can."""
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


def check_fits(job: JobSpec, cluster: Cluster, rules: Rules) -> None:
    """Raise UserError for a job that the empty cluster could not hold in any of its modes."""
    if not modes_of(job, cluster, rules):
        raise UserError(str(too_large(allowed(job, rules)[0], cluster)))
