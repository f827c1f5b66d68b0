"""What a host of a job gets to know, and the `ray start` of each node there.

Written by on_hosts.py on the launcher's machine, read by host_end.py on each host. Pure.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import msgspec

from verl_mux.platform.device_ledger import NODE_VARIABLE

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
