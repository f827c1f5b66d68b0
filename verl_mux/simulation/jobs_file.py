"""A file of jobs to plan: YAML with `jobs`, and optionally `pools` and `rules`."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from verl_mux.errors import UserError
from verl_mux.scheduling.model import COLOCATED, SEPARATE, TESTBED, Cluster, Estimate, JobSpec, NodeKind, Pool
from verl_mux.scheduling.search.rules import OURS, Rules
from verl_mux.yaml_file import allowed_keys, read_yaml

_MAX_POOL = 100_000


class JobsFile(msgspec.Struct, frozen=True):
    jobs: list[JobSpec]
    cluster: Cluster
    rules: Rules


class _Job(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """As JobSpec, with phase times as plain seconds."""

    name: str
    rollout_s: float
    train_s: float
    sync_s: float = 0.0
    tail_s: float = 0.0
    rollout_switch_s: float = 0.0
    train_switch_s: float = 0.0
    cold_start_s: float = 0.0
    rollout_nodes: int = 1
    train_nodes: int = 1
    rollout_memory_gb: float = 0.0
    train_memory_gb: float = 0.0
    slo: float = 2.0
    solo_s: float | None = None
    owner: str = ""
    modes: tuple[str, ...] = (SEPARATE,)

    def spec(self) -> JobSpec:
        if not self.name.strip():
            raise UserError("a job has no name")
        given = {**msgspec.structs.asdict(self), "colocated": self.modes == (COLOCATED,)}
        for side in ("rollout", "train"):
            seconds = given.pop(f"{side}_s")
            if not (seconds >= 0 and math.isfinite(seconds)):
                raise UserError(f"job {self.name!r}: {side}_s is {seconds:g}; it must be at least 0 and finite")
            given[side] = Estimate(seconds=seconds)
        return JobSpec(**given)


class _Pool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Unset: as the paper's testbed has it. kind: a label; the price is `usd_per_gpu_hour`, or that of the testbed.
    nodes: a number, a list of names, or unset for as many as needed."""

    kind: str | None = None
    gpus_per_node: int | None = None
    usd_per_gpu_hour: float | None = None
    host_memory_gb: float | None = None
    nodes: int | list[str] | None = None

    def pool(self, default: Pool) -> Pool:
        kind = default.kind
        if isinstance(self.nodes, int) and not 1 <= self.nodes <= _MAX_POOL:
            raise UserError(f"pools.{default.name}.nodes is {self.nodes}; it must be from 1 to {_MAX_POOL}, or a list of names")
        made = NodeKind(
            name=kind.name if self.kind is None else self.kind,
            gpus=kind.gpus if self.gpus_per_node is None else self.gpus_per_node,
            usd_per_gpu_hour=kind.usd_per_gpu_hour if self.usd_per_gpu_hour is None else self.usd_per_gpu_hour,
            host_memory_gb=kind.host_memory_gb if self.host_memory_gb is None else self.host_memory_gb,
        )
        names = [f"{default.name}-{i}" for i in range(self.nodes)] if isinstance(self.nodes, int) else self.nodes
        return Pool(name=default.name, kind=made, nodes=None if names is None else tuple(names))


class _Pools(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    rollout: _Pool = msgspec.field(default_factory=_Pool)
    train: _Pool = msgspec.field(default_factory=_Pool)


class _File(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    jobs: list[_Job]
    pools: _Pools = msgspec.field(default_factory=_Pools)
    rules: Rules = OURS


_KINDS = {".jobs": _Job, ".rules": Rules, ".pools.": _Pool, ".pools": _Pools}


def read_jobs(path: str | Path) -> JobsFile:
    """Raises UserError that names the key, what was given and what is allowed."""
    try:
        found = msgspec.convert(read_yaml(path), _File)
    except msgspec.ValidationError as error:
        raise UserError(f"{path}: {error}{allowed_keys(error, _KINDS, _File)}") from error
    if not found.jobs:
        raise UserError(f"{path}: jobs is empty; at least one job is needed")
    cluster = Cluster(rollout=found.pools.rollout.pool(TESTBED.rollout), train=found.pools.train.pool(TESTBED.train))
    return JobsFile([job.spec() for job in found.jobs], cluster, found.rules)
