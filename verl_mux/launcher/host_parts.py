"""Which part of a job runs on which host of a run file, how a command gets there, and the `ray start` of each node.

Runs in `verl-mux run` and in on_hosts.py on the launcher's machine, and in host_end.py on each host. Pure.
"""

from __future__ import annotations

import json
import random
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Literal

import msgspec

from verl_mux.coordinator.core.settings import Node
from verl_mux.errors import UserError
from verl_mux.platform.device_ledger import NODE_VARIABLE

Way = Literal["ssh", "srun", "kubectl", "local"]
# A host that does not answer for two minutes is lost; a link that comes back before is not noticed.
_SSH = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=8"]
# Blocks of ports: above Ray's own default worker ports (10002 to 19999), below those that Linux gives to outgoing connections.
FIRST_PORT, LAST_PORT, BLOCK_SIZE = 20_000, 30_000, 50
_PER_RAYLET = 10
MOST_RAYLETS = (BLOCK_SIZE - 1) // _PER_RAYLET  # on one host
# Ray's services and their place among a raylet's ports. The first three exist on the head alone.
_HEAD = ("port", "dashboard-port", "ray-client-server-port")
_EVERYWHERE = (
    "node-manager-port", "object-manager-port", "dashboard-agent-listen-port", "dashboard-agent-grpc-port",
    "runtime-env-agent-port", "metrics-export-port",
)  # fmt: skip


class HostSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A host of a run file.

    `via`: what starts a command there; a list of words is put before the command as it is. `target`: what ssh, srun or kubectl
    call the host, default: its name. `address`: at which the other hosts reach it, default: that by which it reaches the
    coordinator. `python`: the interpreter that has verl and verl_mux, default: the launcher's path.
    """

    via: Way | list[str] = "ssh"
    target: str | None = None
    address: str | None = None
    python: str | None = None


class RayOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `ray start` on each node of a job; None: Ray's own default. `num_cpus`: how many tasks and actors may run
    there, not cores; `object_store_memory`: bytes."""

    num_cpus: int | None = None
    object_store_memory: int | None = None


class Raylet(msgspec.Struct, frozen=True, kw_only=True):
    """Ray on one node of the job. `gpu_ids` None: all GPUs that are seen there."""

    node: str
    gpus: int
    gpu_ids: list[int] | None = None


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A job, or an agent, on one host. `command`: starts host_end.py there."""

    host: str
    command: list[str]
    python: str
    raylets: list[Raylet] = []
    address: str | None = None


class OnHosts(msgspec.Struct, frozen=True, kw_only=True):
    """What on_hosts.py starts; the first part's host runs the command. Holds no secret: it stands in a command line.

    `towards`: the coordinator's host; `keys`: the folder of its keys on the launcher's machine, of which the hosts get those of
    `role`; `forward`: variables of the environment that all hosts get; `again`: start the command again when it ends.
    """

    parts: list[Part]
    folder: str
    towards: str
    keys: str | None = None
    role: str
    forward: list[str] = []
    ray: RayOptions = RayOptions()
    again: bool = False


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """The first line to host_end.py. Holds secrets, so it comes by stdin.

    `uid`: the mark in the environment of all that belongs to the job, "": none; `keys`: contents of key files by name;
    `ray_folder`: for Ray's sockets and logs; `head`: address of the job's Ray cluster, None: this host starts it;
    `again`: start the command again when it ends.
    """

    uid: str
    ray_token: str
    environment: dict[str, str]
    keys: dict[str, str]
    folder: str
    ray_folder: str
    towards: str
    part: Part
    ray: RayOptions
    head: str | None = None
    again: bool = False


def uid_on_hosts(mark: str) -> str:
    """The job's mark on its hosts, from the mark of its process on the launcher's machine.

    Another one, so that a coordinator on that machine does not take that process, which ends what is left on the hosts, for one
    of those that have outlived the job.
    """
    return blake2b(mark.encode(), digest_size=16, person=b"verl_mux hosts").hexdigest()


def words(name: str, host: HostSpec, command: list[str]) -> list[str]:
    """The command line that runs `command` on the host `name`, its stdin and stdout connected."""
    target = host.target or name
    if isinstance(host.via, list):
        return [*host.via, *command]
    return {
        "local": command,
        # ssh hands one line to the shell over there.
        "ssh": [*_SSH, "--", target, shlex.join(command)],
        "srun": ["srun", "--overlap", "--nodes=1", "--ntasks=1", "--quiet", f"--nodelist={target}", "--", *command],
        "kubectl": ["kubectl", "exec", "--stdin", target, "--", *command],
    }[host.via]


def part_on(name: str, host: HostSpec, raylets: Sequence[Raylet] = ()) -> Part:
    python = host.python or sys.executable
    command = words(name, host, [python, "-m", "verl_mux.launcher.host_end"])
    return Part(host=name, command=command, python=python, raylets=list(raylets), address=host.address)


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
        if len(raylets) > MOST_RAYLETS:
            raise UserError(f"host {host!r} has {len(raylets)} nodes of one job; at most {MOST_RAYLETS} are allowed")
    return [part_on(host, hosts[host], raylets) for host, raylets in by_host.items()]


def ray_commands(setup: Setup, block: int, address: str) -> list[tuple[list[str], dict[str, str]]]:
    """`ray start` for each raylet of a host, with the variables of its own. Where `setup` names no head the first is the head."""
    commands = []
    for place, raylet in enumerate(setup.part.raylets):
        head = place == 0 and setup.head is None
        joined = setup.head or head_address(block, address)
        where = ["--head", "--include-dashboard=false", f"--temp-dir={setup.ray_folder}"] if head else [f"--address={joined}"]
        options = {
            "node-ip-address": address,
            "num-gpus": raylet.gpus,
            "resources": json.dumps({f"mux_{raylet.node}": 1}),
            "num-cpus": setup.ray.num_cpus,
            "object-store-memory": setup.ray.object_store_memory,
            # The kernel chooses: a port that is free when it is taken.
            "min-worker-port": 0,
            "max-worker-port": 0,
            **ports_of(block, place, head),
        }
        environment = {NODE_VARIABLE: raylet.node}
        if raylet.gpu_ids is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, raylet.gpu_ids))
        set_options = [f"--{name}={value}" for name, value in options.items() if value is not None]
        start = [setup.part.python, "-m", "ray.scripts.scripts", "start", *where, *set_options]
        commands.append(([*start, "--disable-usage-stats", "--log-color=false"], environment))
    return commands


def blocks(seed: str) -> Iterator[int]:
    """All blocks of ports, each once, in an order of this seed's own: jobs that start together try different ones."""
    order = list(range((LAST_PORT - FIRST_PORT) // BLOCK_SIZE))
    random.Random(seed).shuffle(order)
    yield from order


def ports_of(block: int, place: int, head: bool) -> dict[str, int]:
    """The port of each of Ray's services, by the name of its option. `place`: which of its host's raylets it is."""
    first = FIRST_PORT + block * BLOCK_SIZE + 1 + place * _PER_RAYLET
    names = (*_HEAD, *_EVERYWHERE)
    return {name: first + number for number, name in enumerate(names) if head or name not in _HEAD}


def head_address(block: int, address: str) -> str:
    return f"{address}:{ports_of(block, 0, head=True)['port']}"
