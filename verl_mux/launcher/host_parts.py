"""Which part of a job runs on which host of a run file, and how a command gets there.

Runs in `verl-mux run` and in on_hosts.py on the launcher's machine. Pure.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Literal

import msgspec

from verl_mux.coordinator.core.settings import Node
from verl_mux.errors import UserError
from verl_mux.launcher.host_setup import MOST_RAYLETS, Part, Raylet, RayOptions

Way = Literal["ssh", "srun", "kubectl", "local"]
# A host that does not answer for two minutes is lost; a link that comes back before is not noticed.
_SSH = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=8"]


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
