"""How a job may be placed: with nodes of both pools, or colocated, with both phases on its training nodes."""

from __future__ import annotations

from verl_mux.placement.model import Cluster, JobSpec
from verl_mux.placement.search.rules import Rules


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
