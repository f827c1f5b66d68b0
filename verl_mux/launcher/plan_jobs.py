"""A file of jobs to plan: YAML with `jobs`, and optionally `pools`, `kinds` and `rules`.

Runs on the command line; called by plan_command.py; reads the file and models' `config.json`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec

from verl_mux.errors import UserError
from verl_mux.memory.model_files import local_model_config
from verl_mux.placement.estimator import Bounds, GpuKind, JobNeeds, bounds, find_kind, model_size, with_given
from verl_mux.placement.model import COLOCATED, OURS, SEPARATE, TESTBED, Cluster, Estimate, JobSpec, NodeKind, Pool, Rules
from verl_mux.yaml_file import Mistakes, read_as, read_yaml

_MAX_POOL = 100_000


class JobsFile(msgspec.Struct, frozen=True):
    """What the file says. kinds: all that are known, by name."""

    jobs: list[JobSpec]
    cluster: Cluster
    rules: Rules
    kinds: dict[str, GpuKind]


class _Job(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """As JobSpec, with phase times as plain seconds, on the pools' kinds. computes: what a step computes, in the words of
    JobNeeds, with `model` a folder with its `config.json`, or what of that counts; bounds from it take the place of times and
    memory that are left out."""

    name: str
    rollout_s: float | None = None
    train_s: float | None = None
    sync_s: float | None = None
    tail_s: float = 0.0
    rollout_switch_s: float = 0.0
    train_switch_s: float = 0.0
    cold_start_s: float = 0.0
    rollout_nodes: int = 1
    train_nodes: int = 1
    rollout_memory_gb: float | None = None
    train_memory_gb: float | None = None
    slo: float = 2.0
    solo_s: float | None = None
    modes: tuple[str, ...] = (SEPARATE,)
    computes: dict[str, Any] | None = None

    def needs(self, cluster: Cluster, folder: Path) -> JobNeeds | None:
        """Raises UserError."""
        if self.computes is None:
            return None
        of_nodes = {"rollout_nodes": self.rollout_nodes, "train_nodes": self.train_nodes, "train_gpus": cluster.train.kind.gpus}
        of_nodes["rollout_gpus"] = (cluster.train if self.modes == (COLOCATED,) else cluster.rollout).kind.gpus
        allowed = [name for name in JobNeeds.__struct_fields__ if name not in of_nodes]
        try:
            if unknown := [name for name in self.computes if name not in allowed]:
                raise UserError(f"unknown field `{unknown[0]}`; allowed: {', '.join(allowed)}")
            given = model = self.computes.get("model")
            if isinstance(model, str):
                model = local_model_config(str(folder / Path(model).expanduser()))
            if not isinstance(model, dict):
                raise UserError(f"model is {given!r}; a folder with a config.json, or its sizes, are needed")
            return msgspec.convert({**self.computes, "model": model_size(model), **of_nodes}, JobNeeds)
        except (UserError, msgspec.ValidationError) as error:
            raise UserError(f"job {self.name!r}: computes: {error}") from None

    def spec(self, bound: Bounds | None) -> JobSpec:
        """Raises UserError."""
        if not self.name.strip():
            raise UserError("a job has no name")
        given = {**msgspec.structs.asdict(self), "colocated": self.modes == (COLOCATED,)}
        del given["computes"]
        for side in ("rollout", "train"):
            given[side] = self._phase(side, given.pop(f"{side}_s"), bound)
        for key in ("sync_s", "rollout_memory_gb", "train_memory_gb"):
            if given[key] is None:
                given[key] = 0.0 if bound is None else getattr(bound, key)
        return JobSpec(**given)

    def _phase(self, side: str, seconds: float | None, bound: Bounds | None) -> Estimate:
        if seconds is None and bound is not None:
            return Estimate(seconds=getattr(bound, f"{side}_s"), source="bound")
        if seconds is None:
            raise UserError(f"job {self.name!r}: {side}_s is missing; give it, or what a step computes (`computes`)")
        if not (seconds >= 0 and math.isfinite(seconds)):
            raise UserError(f"job {self.name!r}: {side}_s is {seconds:g}; it must be at least 0 and finite")
        return Estimate(seconds=seconds)


class _Pool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Unset: as the paper's testbed has it. kind: its name; unset, the price is the kind's. nodes: a number, a list of names, or
    unset for as many as needed."""

    kind: str | None = None
    gpus_per_node: int | None = None
    usd_per_gpu_hour: float | None = None
    host_memory_gb: float | None = None
    nodes: int | list[str] | None = None

    def pool(self, default: Pool, kinds: dict[str, GpuKind]) -> Pool:
        kind = default.kind
        name = kind.name if self.kind is None else self.kind
        usd = self.usd_per_gpu_hour
        if usd is None and not (usd := kinds[name].usd_per_gpu_hour if name in kinds else 0.0):
            raise UserError(f"pools.{default.name} has no price: of kind {name!r} none is known; give usd_per_gpu_hour")
        if isinstance(self.nodes, int) and not 1 <= self.nodes <= _MAX_POOL:
            raise UserError(f"pools.{default.name}.nodes is {self.nodes}; it must be from 1 to {_MAX_POOL}, or a list of names")
        gpus = kind.gpus if self.gpus_per_node is None else self.gpus_per_node
        memory = kind.host_memory_gb if self.host_memory_gb is None else self.host_memory_gb
        names = [f"{default.name}-{i}" for i in range(self.nodes)] if isinstance(self.nodes, int) else self.nodes
        made = NodeKind(name=name, gpus=gpus, usd_per_gpu_hour=usd, host_memory_gb=memory)
        return Pool(name=default.name, kind=made, nodes=None if names is None else tuple(names))


class _Pools(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    rollout: _Pool = msgspec.field(default_factory=_Pool)
    train: _Pool = msgspec.field(default_factory=_Pool)


class _File(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    jobs: list[_Job]
    pools: _Pools = msgspec.field(default_factory=_Pools)
    kinds: dict[str, dict[str, float]] = {}
    rules: Rules = OURS


def read_jobs(path: str | Path) -> JobsFile:
    """Raises UserError that names the key, what was given and what is allowed."""
    try:
        found = read_as(read_yaml(path), _File)
    except Mistakes as mistakes:
        raise mistakes.in_file(Path(path)) from None
    if not found.jobs:
        raise UserError(f"{path}: jobs is empty; at least one job is needed")
    kinds = with_given(found.kinds)
    cluster = Cluster(
        rollout=found.pools.rollout.pool(TESTBED.rollout, kinds), train=found.pools.train.pool(TESTBED.train, kinds)
    )
    folder = Path(path).parent
    return JobsFile([job.spec(_bound(job, cluster, folder, kinds)) for job in found.jobs], cluster, found.rules, kinds)


def _bound(job: _Job, cluster: Cluster, folder: Path, kinds: dict[str, GpuKind]) -> Bounds | None:
    if (needs := job.needs(cluster, folder)) is None:
        return None
    train = find_kind(cluster.train.kind.name, kinds)
    return bounds(needs, train if job.modes == (COLOCATED,) else find_kind(cluster.rollout.kind.name, kinds), train)
