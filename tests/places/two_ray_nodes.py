"""`python -m tests.places.two_ray_nodes`: one Ray cluster whose two nodes with GPUs are different hosts, as far as Ray knows.

Prints where pools and the ranks of a worker group land, as one JSON object.

Run with VERL_PLATFORM=cpu and RAY_TMPDIR.
"""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from unittest import mock

import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table, remove_placement_group
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from verl.single_controller.ray.base import RayResourcePool

from verl_mux.errors import UserError
from verl_mux.places import ray_nodes as ray_nodes_module
from verl_mux.places.place import Location, Place
from verl_mux.places.ray_nodes import PlacedPool, RayNode, check_cluster, here, in_rank_order, ray_node_of, ray_nodes
from verl_mux.trainer.job_hosts import check_ranks
from verl_mux.worker_settings import WorkerSettings

HOSTS = {"big": "127.0.0.3", "small": "127.0.0.2"}
HEAD = {"num_cpus": 4, "num_gpus": 0, "include_dashboard": False, "object_store_memory": 80_000_000}
# One has much more room than the other.
ROOM = {"big": {"num_cpus": 64, "num_gpus": 8}, "small": {"num_cpus": 8, "num_gpus": 2}}


class Seat(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def where(self):
        return here()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def devices(self):
        return os.environ["CUDA_VISIBLE_DEVICES"], *ray.get_runtime_context().get_accelerator_ids()["GPU"]


def landed(pool: RayResourcePool) -> list[str]:
    """The addresses of the Ray nodes on which Ray puts the bundles of this pool; they are given back."""
    groups = pool.get_placement_groups(device_name="cpu")
    address = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    found = [address[node] for group in groups for node in placement_group_table(group)["bundles_to_node_id"].values()]
    for group in groups:
        remove_placement_group(group)
    return found


def seen(places: dict[str, Place], cluster: list[RayNode]) -> dict[str, list[str]]:
    """The GPUs of nodes of which the coordinator's file says none, as on a platform with GPUs."""
    cuda = SimpleNamespace(device_name="cuda", visible_devices_envvar=lambda: "CUDA_VISIBLE_DEVICES")
    with mock.patch.object(ray_nodes_module, "get_platform", return_value=cuda):
        found = {name: ray_node_of(name, place, cluster) for name, place in places.items()}
        resources = {"big": "mux_big", "small": f"node:{HOSTS['small']}"}
        return {name: ray_nodes_module._devices_of(places[name], at, resources[name]) for name, at in found.items()}


def found_out(ranks: list[Location], nodes: list[str], places: dict[str, Place]) -> str:
    """What a job on these training nodes learns about where its ranks are."""
    try:
        check_ranks(ranks, WorkerSettings(train_nodes=tuple(nodes), places=places))
    except UserError as error:
        return str(error)
    return "right"


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args=HEAD)
    for name, address in HOSTS.items():
        # One goes by its resource, and shows its processes GPUs 10 to 17; the other goes by its address.
        resources = {"mux_big": 1} if name == "big" else {}
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(10, 18) if name == "big" else range(2)))
        cluster.add_node(node_ip_address=address, resources=resources, object_store_memory=80_000_000, **ROOM[name])
    ray.init(address=cluster.address, log_to_driver=False)
    places = {name: Place(host=address) for name, address in HOSTS.items()}
    check_cluster(places, {"big": 8, "small": 2}, ray_nodes())
    nodes = in_rank_order(["big", "small"], places, ray_nodes())
    own = {"small": (places["small"], 1), "big": (Place(host=HOSTS["big"], gpu_ids=[4, 5]), 0)}
    pool = PlacedPool({name: own[name] for name in nodes}, 1, 3, "global_pool")
    # Several jobs have theirs there at once: more than Ray counts GPUs of.
    others = [PlacedPool({"small": (places["small"], 0)}, 2, 1, f"other_{at}") for at in range(2)]
    for other in others:
        other.get_placement_groups()
    group = RayWorkerGroup(pool, RayClassWithInitArgs(cls=ray.remote(Seat)), device_name="cpu")
    ranks = group.where()
    found = {
        "unbound": landed(RayResourcePool([1], max_colocate_count=3)),
        "small": [at for other in others for at in landed(other)],
        "big": landed(PlacedPool({"big": (places["big"], 2)}, 2, 3, "big")),
        "devices": group.devices(),
        "seen": seen(places, ray_nodes()),
        "order": nodes,
        "right": found_out(ranks, nodes, places),
        # As if each label were on the other host.
        "swapped": found_out(ranks, nodes, {"big": places["small"], "small": places["big"]}),
    }
    print(json.dumps(found))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
