"""Find where a process of a job runs, and bind a job's pools to the Ray nodes and GPUs of its mux nodes.

Runs in the processes of a job; called by trainer/ and rollout/engine/; asks Ray. The Ray node of mux node N offers the custom
resource `mux_N`, 1 of it, or else is the only one on N's host. Each bundle of a placement group for N asks for CPUs and for a
fraction of that resource, or of the one by which Ray names a node's address. It asks for no GPU: all jobs whose turns alternate
there have their workers on the same ones, and each worker is shown those of its node.
"""

from __future__ import annotations

import functools
import ipaddress
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
import ray
from ray._private.state import available_resources_per_node
from ray.runtime_context import RuntimeContext
from ray.util.placement_group import PlacementGroup, placement_group
from verl.plugin.platform import get_platform
from verl.single_controller.ray.base import RayClassWithInitArgs, RayResourcePool

from verl_mux.errors import UserError
from verl_mux.places.place import Location, Place, is_host, resource_of

# Of a resource that binds to a Ray node and is never used up.
_FRACTION = 1e-4
# Names a worker's GPU in its environment.
_SHOWN = "VERL_MUX_GPU"
# By default old versions of Ray hide all GPUs from what asks for none.
_UNHIDDEN = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


def here() -> Location:
    """The location of this worker or server of a job."""
    return Location(socket.gethostname(), _addresses(), _devices())


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
    its raylet; `host`: its machine's own name; `taken`: GPUs that Ray has given away."""

    address: str
    gpus: int
    resources: Mapping[str, float] = field(default_factory=dict)
    port: int = 0
    host: str = ""
    taken: float = 0.0


def ray_nodes() -> list[RayNode]:
    """The live nodes of the cluster that this process is connected to."""
    name, free = get_platform().ray_resource_name(), available_resources_per_node()
    found = []
    for it in (it for it in ray.nodes() if it["Alive"]):
        has = it["Resources"]
        gpus, left = has.get(name, 0), free.get(it["NodeID"], has).get(name, 0)
        at = (it["NodeManagerAddress"], int(gpus), has, it["NodeManagerPort"], it["NodeManagerHostname"])
        found.append(RayNode(*at, gpus - left))
    return found


def ray_node_of(node: str, place: Place, cluster: Sequence[RayNode]) -> RayNode:
    """Where a node with a host is: the Ray node that offers its resource, or else the only one on its host. Raises UserError."""
    offering = [it for it in cluster if it.resources.get(resource_of(node))]
    found = offering or [it for it in cluster if is_host(place.host or "", Location(it.host, (it.address,)))]
    if not found:
        raise UserError(
            f"node {node!r} ({place}): no Ray node is on that host or offers the resource {resource_of(node)!r}; start Ray there"
            f" with `ray start ... {_option(node)}`"
        )
    if len(found) > 1:
        what = f"offer the resource {resource_of(node)!r}" if offering else "are on that host"
        raise UserError(
            f"node {node!r} ({place}): {len(found)} Ray nodes {what} ({', '.join(it.address for it in found)}); start the one"
            f" that is this node, and no other, with {_option(node)}"
        )
    return found[0]


def check_cluster(places: Mapping[str, Place], gpus: Mapping[str, int], cluster: Sequence[RayNode]) -> None:
    """Check that Ray can put the job's `gpus` (by node) where its nodes are. Raises UserError: a Ray node is missing, doubled,
    too small, or has given GPUs to a job that asks Ray for them; or nodes have no host, and Ray has several to choose from or too
    few GPUs."""
    unbound = {node: asked for node, asked in gpus.items() if places[node].host is None}
    with_gpus = [it for it in cluster if it.gpus]
    if unbound and len(with_gpus) > 1:
        raise UserError(
            f"Ray has {len(with_gpus)} nodes with GPUs ({', '.join(it.address for it in with_gpus)}), but the coordinator's file "
            f"gives no host for {', '.join(unbound)}: Ray would choose where the job runs, whatever nodes it holds. Give each "
            "node a `host`"
        )
    if unbound and (free := sum(it.gpus - it.taken for it in with_gpus)) < (wanted := sum(unbound.values())):
        raise UserError(
            f"the job asks Ray for {wanted} GPUs, and {free:g} are free. To share GPUs with other jobs in one Ray cluster, give "
            f"{', '.join(unbound)} a `host` in the coordinator's file"
        )
    for node, asked in gpus.items():
        if places[node].host is not None:
            _check_node(node, places[node], asked, ray_node_of(node, places[node], cluster))


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
    if (found := sum(it.gpus - it.taken for it in offering)) < asked:
        raise UserError(
            f"a reward model or teacher asks for {asked} GPUs of its own, and Ray has {found:g}: start Ray with {_option(OWN)} "
            "on GPUs that are no node of the coordinator's file"
        )


def _check_node(node: str, place: Place, asked: int, found: RayNode) -> None:
    if found.gpus < asked:
        raise UserError(
            f"node {node!r} ({place}): the job asks for {asked} GPUs there, but its Ray node {found.address} offers {found.gpus}"
        )
    if found.taken:
        raise UserError(
            f"node {node!r} ({place}): Ray has given {found.taken:g} GPUs of its Ray node {found.address} to a job that takes no "
            "turns; verl's own trainer modes need Ray nodes of their own"
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
    return sorted(nodes, key=lambda node: ray_node_of(node, places[node], cluster).address) if bound else list(nodes)


class PlacedPool(RayResourcePool):
    """verl's pool, each of its placement groups on the Ray node of its mux node.

    nodes: in the order of ranks; of each its place, and which of its GPUs is the first one's. gpus: bundles on each.
    max_colocate_count: processes that share a bundle.
    """

    def __init__(self, nodes: Mapping[str, tuple[Place, int]], gpus: int, max_colocate_count: int, name_prefix: str) -> None:
        super().__init__([gpus] * len(nodes), use_gpu=False, name_prefix=name_prefix, max_colocate_count=max_colocate_count)
        self._nodes = nodes
        self.pgs: list[PlacementGroup] | None = None

    def get_placement_groups(
        self, strategy: str = "STRICT_PACK", name: str | None = None, device_name: str = "cuda"
    ) -> list[PlacementGroup]:
        if self.pgs is None:
            cluster, self.pgs = ray_nodes(), []
            for (node, (place, first)), gpus in zip(self._nodes.items(), self.store, strict=True):
                at = ray_node_of(node, place, cluster)
                where = next(it for it in (resource_of(node), f"node:{at.address}") if it in at.resources)
                bundle = {"CPU": self.max_colocate_count, where: _FRACTION}
                group = placement_group([bundle] * gpus, strategy, f"{name or self.name_prefix}_{node}")
                group.mux_devices = _devices_of(place, at, where)[first : first + gpus]
                self.pgs.append(group)
            ray.get([group.ready() for group in self.pgs])
        return self.pgs


def _devices_of(place: Place, at: RayNode, where: str) -> list[str]:
    """Ids of the GPUs of a node, as its processes are to see them: those that the file says, or all that its Ray node has."""
    if place.gpu_ids is not None:
        return [str(gpu) for gpu in place.gpu_ids]
    platform, seen = get_platform(), ""
    if platform.device_name != "cpu":
        look = ray.remote(os.getenv).options(num_cpus=0, resources={where: _FRACTION}, runtime_env={"env_vars": _UNHIDDEN})
        seen = ray.get(look.remote(platform.visible_devices_envvar())) or ""
    return [word.strip() for word in seen.split(",") if word.strip()] or [str(gpu) for gpu in range(at.gpus)]


def _showing_device(start: Callable) -> Callable:
    """verl's start of a worker, which is shown the GPU of its bundle where the bundle is one of ours; elsewhere Ray does that."""

    @functools.wraps(start)
    def started(self: Any, placement_group: PlacementGroup, placement_group_bundle_idx: int, **given: Any) -> Any:
        if devices := getattr(placement_group, "mux_devices", None):
            shown = dict.fromkeys((get_platform().visible_devices_envvar(), _SHOWN), devices[placement_group_bundle_idx])
            self._options["runtime_env"]["env_vars"].update(shown | _UNHIDDEN)
        return start(self, placement_group, placement_group_bundle_idx, **given)

    return started


def _with_shown(answer: Callable) -> Callable:
    """Ray's answer to which GPUs this process has, which verl asks for, with the one that it was shown so."""

    @functools.wraps(answer)
    def answered(self: RuntimeContext) -> dict[str, list[str]]:
        shown = os.environ.get(_SHOWN)
        return {**answer(self), **({get_platform().ray_resource_name(): [shown]} if shown else {})}

    return answered


RayClassWithInitArgs.__call__ = _showing_device(RayClassWithInitArgs.__call__)
RuntimeContext.get_accelerator_ids = _with_shown(RuntimeContext.get_accelerator_ids)
