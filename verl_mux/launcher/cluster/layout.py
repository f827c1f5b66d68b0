"""Which raylets a job has on which hosts, and the commands that start them. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import msgspec

from verl_mux.coordinator.core.settings import Node
from verl_mux.errors import UserError
from verl_mux.launcher.cluster import ports
from verl_mux.launcher.cluster.messages import Raylet
from verl_mux.launcher.cluster.reach import HostSpec, python_of, words
from verl_mux.platform.device_ledger import NODE_VARIABLE

_KEEPER = "verl_mux.launcher.cluster.keeper"


class RayOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What Ray is told of each node of a job; None: it looks itself. `num_cpus`: how many tasks and actors may run there, not
    cores; `object_store_memory`: bytes."""

    num_cpus: int | None = None
    object_store_memory: int | None = None


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A job on one host. `command`: starts the keeper there."""

    host: str
    command: list[str]
    python: str
    raylets: list[Raylet]
    address: str | None = None


class ClusterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A job's cluster; the first part is its head. Holds no secret: it stands in a command line.

    `towards`: the coordinator's host; `keys`: the folder of its keys, on the launcher's machine; `forward`: variables of the
    job's environment that all hosts get.
    """

    parts: list[Part]
    folder: str
    towards: str
    keys: str | None = None
    forward: list[str] = []
    ray: RayOptions = RayOptions()


def parts(nodes: Sequence[Node], hosts: Mapping[str, HostSpec]) -> list[Part]:
    """One for each host of the job's nodes, in the order of the nodes: the first node's host is the head's.

    Raises:
        UserError: a node names no host, or one that is not there, or a host has too many of the job's nodes.
    """
    by_host: dict[str, list[Raylet]] = {}
    for node in nodes:
        if node.host is None or node.host not in hosts:
            raise UserError(f"node {node.name!r} has host {node.host}; under `hosts` there are {', '.join(hosts)}")
        raylet = Raylet(node=node.name, gpus=node.gpus, gpu_ids=node.gpu_ids)
        by_host.setdefault(node.host, []).append(raylet)
    for host, raylets in by_host.items():
        if len(raylets) > ports.MOST_RAYLETS:
            raise UserError(f"host {host!r} has {len(raylets)} nodes of one job; at most {ports.MOST_RAYLETS} are allowed")
    return [_part(host, hosts[host], raylets) for host, raylets in by_host.items()]


def _part(name: str, host: HostSpec, raylets: list[Raylet]) -> Part:
    python = python_of(host)
    command = words(name, host, [python, "-m", _KEEPER])
    return Part(host=name, command=command, python=python, raylets=raylets, address=host.address)


def ray_commands(
    part: Part, ray: RayOptions, block: int, address: str, head_address: str | None, folder: str
) -> list[tuple[list[str], dict[str, str]]]:
    """`ray start` for each raylet of a host, with the variables that it has besides. `head_address` None: the first is the head,
    and all of the cluster keep their files in `folder`."""
    commands = []
    for place, raylet in enumerate(part.raylets):
        head = place == 0 and head_address is None
        joined = head_address or f"{address}:{ports.of_services(block, 0, head=True)['port']}"
        where = ["--head", "--include-dashboard=false", f"--temp-dir={folder}"] if head else [f"--address={joined}"]
        options = {
            "node-ip-address": address,
            "num-gpus": raylet.gpus,
            "resources": json.dumps({f"mux_{raylet.node}": 1}),
            "num-cpus": ray.num_cpus,
            "object-store-memory": ray.object_store_memory,
            # The kernel chooses: a port that is free when it is taken.
            "min-worker-port": 0,
            "max-worker-port": 0,
            **ports.of_services(block, place, head),
        }
        given = [f"--{name}={value}" for name, value in options.items() if value is not None]
        given_to_all = {NODE_VARIABLE: raylet.node}
        if raylet.gpu_ids is not None:
            given_to_all["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, raylet.gpu_ids))
        start = [part.python, "-m", "ray.scripts.scripts", "start", *where, *given, "--disable-usage-stats", "--log-color=false"]
        commands.append((start, given_to_all))
    return commands
