"""Find where a process of a job runs, and bind a job's pools to the Ray nodes of its mux nodes.

Runs in the processes of a job; called by trainer/, rollout/engine/ and config/preflight.py; asks Ray. The Ray node of mux node N
is started with the custom resource `mux_N`, 1 of it; each bundle of a placement group for N asks for a fraction of that beside
its GPU, so Ray can put it nowhere else.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import psutil
import ray
from ray.util.placement_group import PlacementGroup
from verl.plugin.platform import get_platform
from verl.single_controller.ray.base import RayResourcePool

from verl_mux.errors import UserError
from verl_mux.places.place import Location, Place, resource_of


def here() -> Location:
    """The location of this worker or server of a job."""
    return Location(socket.gethostname(), _addresses(), _devices())


def this_host() -> Location:
    """The location of this process, which uses no device."""
    return Location(socket.gethostname(), _addresses())


def _addresses() -> tuple[str, ...]:
    """The address by which Ray knows this machine, then its others but for loopback."""
    given = [it.address.partition("%")[0] for card in psutil.net_if_addrs().values() for it in card
             if it.family in (socket.AF_INET, socket.AF_INET6)]  # fmt: skip
    others = [address for address in given if not ipaddress.ip_address(address).is_loopback]
    return tuple(dict.fromkeys([ray.util.get_node_ip_address().strip("[]"), *others]))


def _devices() -> tuple[str, ...] | None:
    """The GPUs that Ray gave this process; a server asks Ray for none and has those of its workers, which verl sets."""
    platform = get_platform()
    if platform.device_name == "cpu":
        return None
    given = ray.get_runtime_context().get_accelerator_ids().get(platform.ray_resource_name()) or []
    visible = os.environ.get(platform.visible_devices_envvar(), "")
    return tuple(given) or tuple(word.strip() for word in visible.split(",") if word.strip())


@dataclass(frozen=True)
class RayNode:
    """A live Ray node. `resources`: all that it offers, used or not; `gpus`: those that the platform counts as GPUs; `port`: of
    its raylet."""

    address: str
    gpus: int
    resources: Mapping[str, float] = field(default_factory=dict)
    port: int = 0


def ray_nodes() -> list[RayNode]:
    """The live nodes of the cluster that this process is connected to."""
    name, alive = get_platform().ray_resource_name(), [(it, it["Resources"]) for it in ray.nodes() if it["Alive"]]
    return [RayNode(it["NodeManagerAddress"], int(has.get(name, 0)), has, it["NodeManagerPort"]) for it, has in alive]


def check_cluster(places: Mapping[str, Place], gpus: Mapping[str, int], cluster: Sequence[RayNode]) -> None:
    """Check that Ray can put the job's `gpus` (by node) where its nodes are. Raises UserError: a Ray node is missing, doubled or
    too small; or nodes have no host where Ray could choose among several."""
    unbound = [node for node in gpus if places[node].host is None]
    with_gpus = [it for it in cluster if it.gpus]
    if unbound and len(with_gpus) > 1:
        raise UserError(
            f"Ray has {len(with_gpus)} nodes with GPUs ({', '.join(it.address for it in with_gpus)}), but the coordinator's file "
            f"gives no host for {', '.join(unbound)}: Ray would choose where the job runs, whatever nodes it holds. Give each "
            f"node a `host`, and start Ray there with {_option(unbound[0])}"
        )
    for node, asked in gpus.items():
        if places[node].host is not None:
            _check_node(node, places[node], asked, cluster)


# In place of a mux node's name: GPUs that no lease covers.
OWN = "own"


def check_own(asked: int, bound: bool, cluster: Sequence[RayNode]) -> None:
    """Check that a job's reward model and teachers get `asked` GPUs of their own. bound: the job's nodes have hosts. Raises
    UserError: there are too few, or they might be GPUs that a lease gives to other jobs."""
    if not bound:
        if get_platform().device_name != "cpu":
            raise UserError(
                "a reward model or teacher has GPUs of its own, but the coordinator's file gives its nodes no host: Ray would "
                "choose among the GPUs that leases cover. Give each node a `host`"
            )
        return
    offering = [it for it in cluster if it.resources.get(resource_of(OWN))]
    for it in offering:
        if shared := [name for name in it.resources if name.startswith(resource_of("")) and name != resource_of(OWN)]:
            raise UserError(f"the Ray node {it.address} offers {resource_of(OWN)} and {shared[0]}, whose GPUs leases cover")
    if (found := sum(it.gpus for it in offering)) < asked:
        raise UserError(
            f"a reward model or teacher asks for {asked} GPUs of its own, and Ray has {found}: start Ray with {_option(OWN)} on "
            "GPUs that are no node of the coordinator's file"
        )


def _check_node(node: str, place: Place, asked: int, cluster: Sequence[RayNode]) -> None:
    offering = [it for it in cluster if it.resources.get(resource_of(node))]
    if not offering:
        raise UserError(
            f"node {node!r} ({place}): no Ray node offers the resource {resource_of(node)!r}; start Ray on that host with "
            f"`ray start ... {_option(node)}`"
        )
    if len(offering) > 1:
        raise UserError(
            f"node {node!r} ({place}): {len(offering)} Ray nodes offer the resource {resource_of(node)!r} "
            f"({', '.join(it.address for it in offering)}); only the one on that host may"
        )
    if offering[0].gpus < asked:
        raise UserError(
            f"node {node!r} ({place}): the job asks for {asked} GPUs there, but its Ray node {offering[0].address} offers "
            f"{offering[0].gpus}"
        )


def _option(node: str) -> str:
    return f"""--resources='{{"{resource_of(node)}": 1}}'"""


def in_rank_order(nodes: Sequence[str], places: Mapping[str, Place], cluster: Sequence[RayNode]) -> list[str]:
    """Sort nodes as verl numbers ranks: by their hosts' addresses, as texts. Raises UserError: some of the nodes have a host and
    others none, so the ranks of a node are unknown."""
    bound = [node for node in nodes if places[node].host is not None]
    if bound and len(bound) < len(nodes):
        lacking = next(node for node in nodes if node not in bound)
        raise UserError(
            f"node {bound[0]!r} has a host and node {lacking!r} has none; the nodes of one side of a job all need one, or none"
        )
    if not bound:
        return list(nodes)
    address = {node: it.address for node in nodes for it in cluster if it.resources.get(resource_of(node))}
    return sorted(nodes, key=lambda node: address[node])


class PlacedPool(RayResourcePool):
    """verl's pool, each of its placement groups on the Ray node of its mux node. `nodes`: in the order of ranks;
    `gpus`: bundles on each; `max_colocate_count`: processes that share a bundle."""

    def __init__(self, nodes: Sequence[str], gpus: int, max_colocate_count: int, name_prefix: str) -> None:
        super().__init__([gpus] * len(nodes), name_prefix=name_prefix, max_colocate_count=max_colocate_count)
        self._nodes = list(nodes)
        self.pgs: list[PlacementGroup] | None = None

    def get_placement_groups(
        self, strategy: str = "STRICT_PACK", name: str | None = None, device_name: str = "cuda"
    ) -> list[PlacementGroup]:
        if self.pgs is None:
            self.pgs = []
            for node, gpus in zip(self._nodes, self.store, strict=True):
                # What verl offers for a kind of accelerator is a custom resource like any other.
                pool = RayResourcePool([gpus], max_colocate_count=self.max_colocate_count, accelerator_type=resource_of(node))
                self.pgs += pool.get_placement_groups(strategy, f"{name or self.name_prefix}_{node}:", device_name)
        return self.pgs
