"""A job that leaves its nodes to the coordinator as the placer sees it, in each pair of pools that could hold it. Pure."""

from __future__ import annotations

import msgspec

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core.settings import Config, kind_name
from verl_mux.errors import UserError
from verl_mux.placement.estimator import Bounds, bounds, job_spec, learnt, on_other_kinds
from verl_mux.placement.job_needs import find_kind
from verl_mux.placement.model import COLOCATED, SEPARATE, Cluster, JobSpec, Pool
from verl_mux.placement.planner import pair_of
from verl_mux.placement.rules import check_fits


def of_job(asked: m.Register, config: Config) -> dict[str, JobSpec]:
    """The job in each pair of pools that could hold it. What it was seen to take counts for the first of them; in the others its
    phases last as many times as long as their bounds do, and the limit of its SLO stays. Raises UserError: no pair could."""
    found: dict[str, JobSpec] = {}
    refusals: list[UserError] = []
    known: tuple[JobSpec, Bounds] | None = None
    # Colocated, it is the same in all pairs of one training pool.
    same = {tuple(pool.name for pool in pools(asked, cluster)): pair for pair, cluster in reversed(config.clusters.items())}
    for pair in [pair for pair in config.clusters if pair in same.values()]:
        cluster = config.clusters[pair]
        try:
            _check_gpus(asked, cluster, config)
            there = _bounds(asked, cluster, config)
            spec = _on(asked, there, config)
            spec = spec if known is None else _elsewhere(spec, there, *known)
            check_fits(spec, cluster, config.placing.rules())
        except UserError as error:
            refusals.append(error)
            continue
        found[pair] = spec
        known = known or (spec, there)
    if not found:
        raise refusals[0]
    return found


def pools(asked: m.Register, cluster: Cluster) -> tuple[Pool, Pool]:
    """On which it rolls out and trains."""
    return cluster.train if asked.colocated else cluster.rollout, cluster.train


def claimed_pair(asked: m.Register, config: Config) -> str:
    """The pair of pools in which a job says that it was placed, if in any."""
    rollout = [] if asked.colocated else asked.placed.get("rollout", [])
    return pair_of(rollout, asked.placed.get("train", []), config.clusters)


def _check_gpus(asked: m.Register, cluster: Cluster, config: Config) -> None:
    for side, pool in zip(m.SIDES, pools(asked, cluster), strict=True):
        gpus, least = getattr(asked.needs, f"{side}_gpus"), min(node.gpus for node in config.pools[pool.name].nodes)
        if gpus > least:
            raise UserError(
                f"job {asked.job!r} asks for {gpus} GPUs on each {side} node; those of pool {pool.name!r} have {least}"
            )


def _bounds(asked: m.Register, cluster: Cluster, config: Config) -> Bounds:
    assert asked.needs is not None
    names = [pool.name for pool in pools(asked, cluster)]
    rollout, train = (find_kind(kind_name(name, config.pools[name]), config.placing.kinds) for name in names)
    return bounds(asked.needs, rollout, train)


def _on(asked: m.Register, found: Bounds, config: Config) -> JobSpec:
    placement, needs = config.placing, asked.needs
    assert needs is not None
    slo = placement.slo if asked.slo is None else asked.slo
    spec = learnt(job_spec(asked.job, needs, found, slo), asked.profiled, "profile")
    modes = (COLOCATED if asked.colocated else SEPARATE,)
    return msgspec.structs.replace(spec, movable=asked.movable, move_s=placement.move_s, modes=modes, colocated=asked.colocated)


def _elsewhere(spec: JobSpec, there: Bounds, known: JobSpec, before: Bounds) -> JobSpec:
    """As `known` is where its phases are bound by `before`. Raises UserError: it would be later alone than its SLO allows."""
    scaled = on_other_kinds(known, before, there)
    if scaled.iteration_s > known.limit_s:
        raise UserError(
            f"job {spec.name!r} would take {scaled.iteration_s:.0f} s an iteration alone, its SLO allows {known.limit_s:.0f} s"
        )
    memory = {"rollout_memory_gb": spec.rollout_memory_gb, "train_memory_gb": spec.train_memory_gb}
    return msgspec.structs.replace(scaled, slo=known.limit_s / scaled.iteration_s, **memory)
