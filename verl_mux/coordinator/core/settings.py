"""The coordinator's configuration as data: pools, nodes, the schedule of segments, placement, and times.

Runs in the coordinator and in every process that reads its file (`coordinator/config.py` does the reading); pure. Bounds stand at
the fields, where msgspec checks them; `check` holds what concerns several keys.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from verl_mux.coordinator.bus.messages import SIDES, Name
from verl_mux.errors import UserError
from verl_mux.placement.estimator import GpuKind, find_kind
from verl_mux.placement.model import Cluster, NodeKind
from verl_mux.placement.model import Pool as SchedulingPool
from verl_mux.places.place import Place

_WHERE = "coordinator configuration"
# Thirty years, or a price beyond all prices: what is larger, or not a number, is a mistake.
_MOST = 1e9
Seconds = Annotated[float, Meta(gt=0, le=_MOST)]
Bytes = Annotated[int, Meta(ge=0, le=2**60)]
Index = Annotated[int, Meta(ge=0)]
Mode = Literal["sequential", "uncoordinated", "interleaved"]
MODES: tuple[Mode, ...] = get_args(Mode)
# A job that is silent for this long beyond its lease is over, though no other job waits for its nodes.
SILENT_TIMEOUT_S = 60.0
# A filler that has not left this long after a job asked for its nodes is ended.
FILLER_GRACE_S = 2.0
# Where the configuration names no host memory, it is no limit.
_PLENTY_GB = 1e6


class Node(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    host: Name | None = None  # name or address of the machine that it is part of; None: unknown, and leases bind no place
    gpu_ids: list[Index] | None = None  # which of that host's GPUs it is; None: all
    gpus: Annotated[int, Meta(ge=0, le=10_000)] = 1
    cpus: list[Index] | None = None  # cores on which processes of this node should stay
    device_bytes: Bytes | None = None  # this and the next two: None where unknown
    host_bytes: Bytes | None = None
    usd_per_hour: Annotated[float, Meta(ge=0, le=_MOST)] | None = None
    drain: bool = False  # no job is given the node any more; a job that holds it keeps it to the end of its phase

    @property
    def place(self) -> Place:
        return Place(host=self.host, gpu_ids=self.gpu_ids, cpus=self.cpus)


class Pool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    nodes: Annotated[list[Node], Meta(min_length=1)]
    kind: str | None = None  # of its GPUs, a name in GPU_KINDS: needed where jobs are placed on it


class Segment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    mode: Mode
    steps: Annotated[int, Meta(ge=1)] | None = None  # of every job; None, allowed in the last segment only: all that are left


class PlacementConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`placement: scheduler`, or this. A job is placed in a pair of pools; seconds of its phases that a profile gives are of the
    first pair that can hold it."""

    rollout: str | list[str] = "rollout"  # names of pools, here and in `train`
    train: str | list[str] = "train"
    slo: Annotated[float, Meta(ge=1, le=_MOST)] = 2.0  # of jobs that name none
    # Steps of every job of a group that are seen before its periods are predicted from them.
    observe: Annotated[int, Meta(ge=1)] = 5
    move_s: Annotated[float, Meta(ge=0, le=_MOST)] = 900.0  # seconds that a job's first move is expected to last

    def pools(self, side: str) -> list[str]:
        """Names of the side's pools."""
        names = getattr(self, side)
        return [names] if isinstance(names, str) else list(names)


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):  # dict: for what is cached
    """Times in seconds."""

    pools: Annotated[dict[str, Pool], Meta(min_length=1)]
    schedule: Annotated[list[Segment], Meta(min_length=1)] = msgspec.field(default_factory=lambda: [Segment(mode="interleaved")])
    expect_jobs: Annotated[int, Meta(ge=0)] = 0  # steps begin when this many jobs have finished init
    # A job without a sign of life for this long is silent; clients send one every second.
    lease_timeout: Annotated[float, Meta(gt=1, le=_MOST)] = 20.0
    kill: bool = True  # end processes of dead jobs
    kill_grace: Seconds = 2.0  # after the death
    # After this time a dead job's processes on hosts without an agent count as gone; None: never.
    remote_grace: Seconds | None = None
    metrics_port: int | None = None  # where Prometheus finds /metrics; 0: a free port; None: nowhere
    placement: PlacementConfig | None = None  # of jobs that leave their nodes to the coordinator; None: every job names its nodes

    @functools.cached_property
    def nodes(self) -> dict[str, Node]:
        return {node.name: node for pool in self.pools.values() for node in pool.nodes}

    @functools.cached_property
    def draining(self) -> frozenset[str]:
        return frozenset(node.name for node in self.nodes.values() if node.drain)

    @functools.cached_property
    def clusters(self) -> dict[str, Cluster]:
        """Each pair of pools as the scheduler sees it, where jobs are placed."""
        both = itertools.product(self.placing.pools("rollout"), self.placing.pools("train"))
        return {
            f"{rollout}+{train}": Cluster(rollout=_pool(rollout, self.pools[rollout]), train=_pool(train, self.pools[train]))
            for rollout, train in both
        }

    def node(self, name: str) -> Node | None:
        return self.nodes.get(name)

    def pool_of(self, node: str) -> Pool:
        return next(pool for pool in self.pools.values() if any(member.name == node for member in pool.nodes))

    @property
    def placing(self) -> PlacementConfig:
        """`placement`, which every configuration has under which a job was placed."""
        assert self.placement is not None
        return self.placement

    def describe_pools(self) -> str:
        """All pools and nodes in one line, for refusals: `rollout (r0), train (t0, t1)`."""
        return ", ".join(f"{name} ({', '.join(n.name for n in pool.nodes)})" for name, pool in self.pools.items())


def _pool(name: str, pool: Pool) -> SchedulingPool:
    first, kind = pool.nodes[0], _kind_of(name, pool)
    price = kind.usd_per_gpu_hour if first.usd_per_hour is None else first.usd_per_hour / max(first.gpus, 1)
    memory = min((node.host_bytes / 1e9 for node in pool.nodes if node.host_bytes is not None), default=_PLENTY_GB)
    named = NodeKind(name=pool.kind or "", gpus=max(first.gpus, 1), usd_per_gpu_hour=price, host_memory_gb=memory)
    return SchedulingPool(name=name, kind=named, nodes=tuple(node.name for node in pool.nodes))


def _kind_of(name: str, pool: Pool) -> GpuKind:
    """Of a pool on which jobs are placed. Raises UserError."""
    if pool.kind is None:
        raise UserError(f"{_WHERE}: pool {name!r} has no kind; jobs are placed on it, so give one (`kind: H20`)")
    return find_kind(pool.kind, {})


# --- what concerns several keys ---


def check(config: Config) -> None:
    """Raises UserError with the key, what was given and what is allowed."""
    names = [node.name for pool in config.pools.values() for node in pool.nodes]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"{_WHERE}: node {twice[0]!r} is named twice; node names are unique")
    for pool, members in config.pools.items():
        if pool in names and [node.name for node in members.nodes] != [pool]:
            raise UserError(f"{_WHERE}: {pool!r} names both a pool and a node; jobs name either")
    _check_places(list(config.nodes.values()))
    for number, segment in enumerate(config.schedule[:-1], start=1):
        if segment.steps is None:
            raise UserError(
                f"{_WHERE}: schedule entry {number} ({segment.mode}) has steps None; a number of 1 or more is needed, and only"
                " the last entry may leave it out"
            )
    if config.placement is not None:
        _check_placement(config.placement, config.pools)


def _check_places(nodes: list[Node]) -> None:
    """No GPU is part of two nodes."""
    taken: dict[str, list[Node]] = {}
    for node in nodes:
        if node.gpu_ids is not None and (len(set(node.gpu_ids)) != node.gpus or not node.host):
            raise UserError(
                f"{_WHERE}: node {node.name!r} has gpu_ids {node.gpu_ids}; as many different ones as it has gpus ({node.gpus}),"
                " counted from 0 on its host, are needed, and a host"
            )
        for other in taken.setdefault(node.host, []) if node.host else ():
            if node.gpu_ids is None or other.gpu_ids is None or set(node.gpu_ids) & set(other.gpu_ids):
                raise UserError(
                    f"{_WHERE}: nodes {other.name!r} and {node.name!r} share GPUs of host {node.host!r};"
                    " nodes on one host need gpu_ids of their own"
                )
        if node.host:
            taken[node.host].append(node)


def _check_placement(placement: PlacementConfig, pools: Mapping[str, Pool]) -> None:
    for side in SIDES:
        if not placement.pools(side):
            raise UserError(f"{_WHERE}: placement.{side} names no pool; one of these is needed, or several: {', '.join(pools)}")
        for name in placement.pools(side):
            if name not in pools:
                raise UserError(f"{_WHERE}: placement.{side} is {name!r}; it must be a pool: {', '.join(pools)}")
            _check_alike(name, pools[name])
    names = [name for side in SIDES for name in placement.pools(side)]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(
            f"{_WHERE}: placement: rollout and train name pool {twice[0]!r} twice; two pools are needed, each for one of them"
        )


def _check_alike(name: str, pool: Pool) -> None:
    """The scheduler treats a pool's nodes as alike."""
    kind = _kind_of(name, pool)
    for key in ("gpus", "usd_per_hour"):
        values = {getattr(node, key) for node in pool.nodes}
        if len(values) > 1:
            raise UserError(
                f"{_WHERE}: pool {name!r} has nodes with different {key} ({', '.join(map(str, values))});"
                " jobs are placed on pools of nodes that are alike"
            )
    if not kind.usd_per_gpu_hour and pool.nodes[0].usd_per_hour is None:
        raise UserError(
            f"{_WHERE}: pool {name!r} ({pool.kind}) has no price, by which places are compared; give its nodes usd_per_hour"
        )
