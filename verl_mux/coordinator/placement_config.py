"""The coordinator's configuration where it places jobs itself, and what placement sees of its pools."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from verl_mux.errors import UserError
from verl_mux.scheduling.gpukinds import GpuKind, find_kind
from verl_mux.scheduling.model import Cluster, NodeKind
from verl_mux.scheduling.model import Pool as SchedulingPool
from verl_mux.scheduling.rules import OURS, Rules

# Where the configuration names no host memory, it is no limit.
_PLENTY_GB = 1e6


class PlacementConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`placement: scheduler`, or this. rollout, train: names of the pools. cap: jobs in a co-execution group. slo: of jobs
    that name none. kinds: GPU kinds of one's own, by name. observe: steps of every job of a group that are seen before
    its period is predicted from them."""

    rollout: str = "rollout"
    train: str = "train"
    cap: int = 5
    slo: float = 2.0
    kinds: dict[str, GpuKind] = {}
    observe: int = 5

    def rules(self) -> Rules:
        """Running jobs are not moved: a move is a restart of its processes elsewhere, which is their owner's to do."""
        return msgspec.structs.replace(OURS, cap=self.cap, repack=False)


def check_placement(placement: PlacementConfig, pools: Mapping[str, object]) -> None:
    """Raises UserError with the key, what was given and what is allowed."""
    where = "coordinator configuration: placement"
    for side in ("rollout", "train"):
        if (name := getattr(placement, side)) not in pools:
            raise UserError(f"{where}.{side} is {name!r}; it must be a pool: {', '.join(pools)}")
        check_pool(name, pools[name], placement)
    if placement.rollout == placement.train:
        raise UserError(f"{where}: rollout and train are both {placement.rollout!r}; two pools are needed")
    if placement.slo < 1:
        raise UserError(f"{where}.slo is {placement.slo:g}; an SLO is a factor of at least 1")
    if placement.observe < 1:
        raise UserError(f"{where}.observe is {placement.observe}; at least 1 step is needed")
    placement.rules()


def check_pool(name: str, pool, placement: PlacementConfig) -> None:
    """The scheduler takes a pool's nodes for alike."""
    if pool.kind is None:
        raise UserError(f"coordinator configuration: pool {name!r} has no kind; jobs are placed on it, so give one (`kind: H20`)")
    kind = find_kind(pool.kind, placement.kinds)
    for key in ("gpus", "usd_per_hour"):
        values = {getattr(node, key) for node in pool.nodes}
        if len(values) > 1:
            raise UserError(
                f"coordinator configuration: pool {name!r} has nodes with different {key} ({', '.join(map(str, values))});"
                " jobs are placed on pools of nodes that are alike"
            )
    if not kind.usd_per_gpu_hour and any(node.usd_per_hour is None for node in pool.nodes):
        raise UserError(
            f"coordinator configuration: pool {name!r} ({pool.kind}) has no price, by which places are compared; give its nodes"
            " usd_per_hour, or the kind usd_per_gpu_hour"
        )


def cluster(placement: PlacementConfig, pools: Mapping[str, object]) -> Cluster:
    """The two pools as the scheduler sees them."""
    return Cluster(
        rollout=_pool(placement.rollout, pools[placement.rollout], placement),
        train=_pool(placement.train, pools[placement.train], placement),
    )


def _pool(name: str, pool, placement: PlacementConfig) -> SchedulingPool:
    first = pool.nodes[0]
    price = find_kind(pool.kind, placement.kinds).usd_per_gpu_hour
    if first.usd_per_hour is not None:
        price = first.usd_per_hour / max(first.gpus, 1)
    memory = min((node.host_bytes / 1e9 for node in pool.nodes if node.host_bytes is not None), default=_PLENTY_GB)
    kind = NodeKind(name=pool.kind, gpus=max(first.gpus, 1), usd_per_gpu_hour=price, host_memory_gb=memory)
    return SchedulingPool(name=name, kind=kind, nodes=tuple(node.name for node in pool.nodes))
