"""Where a command runs that holds nodes: which of them are part of this machine, and what the command is told of them."""

from __future__ import annotations

import contextlib
import functools
import socket

from verl_mux.coordinator.bus.client import Lease, LocalMux
from verl_mux.coordinator.bus.connect import ADDRESS_VARIABLE, JOB_VARIABLE
from verl_mux.errors import UserError

NODES, HOSTS, GPU_IDS, TOKEN = (f"VERL_MUX_LEASE_{what}" for what in ("NODES", "HOSTS", "GPU_IDS", "TOKEN"))


def reachable(mux: LocalMux, pool: str, num_nodes: int, anywhere: bool) -> list[str]:
    """The nodes on which the command can run: those of this machine, and those of which nobody says where they are.

    Raises UserError where these are fewer than are to be held.
    """
    nodes = list(dict.fromkeys(node for names in mux.nodes.values() for node in names))
    hosts = {node: mux.place(node).host for node in nodes}
    found = [node for node, host in hosts.items() if anywhere or host is None or _is_here(host)]
    if not 1 <= num_nodes <= len(found):
        places = ", ".join(f"{node} on {host}" if host else node for node, host in hosts.items())
        advice = "" if anywhere or len(nodes) == len(found) else "; with --anywhere, a command that goes to other hosts by itself"
        here = "" if anywhere else f" on {socket.gethostname()}"
        raise UserError(
            f"--nodes is {num_nodes}; {pool!r} has {len(found)} nodes{here} ({places}): 1 or more, and no more than that, can be"
            f" held{advice}"
        )
    return found


def environment(mux: LocalMux, lease: Lease) -> dict[str, str]:
    """What the command finds in its environment. CUDA_VISIBLE_DEVICES only where all nodes are on one host and say their GPUs."""
    places = [mux.place(node) for node in lease.nodes]
    hosts, gpus = [place.host or "" for place in places], [place.gpu_ids for place in places]
    told = {
        **{JOB_VARIABLE: mux.job, ADDRESS_VARIABLE: mux.address or "", TOKEN: str(lease.token)},
        **{NODES: ",".join(lease.nodes), HOSTS: ",".join(hosts)},
        GPU_IDS: ";".join(",".join(map(str, ids or [])) for ids in gpus),
    }
    known = [ids for ids in gpus if ids is not None]
    if len(known) == len(gpus) and len(set(hosts)) == 1:
        told["CUDA_VISIBLE_DEVICES"] = ",".join(str(number) for ids in known for number in ids)
    return told


def cpus(mux: LocalMux, lease: Lease) -> list[int] | None:
    """The cores of the nodes, where all of them name theirs."""
    named = [mux.place(node).cpus for node in lease.nodes]
    known = [ids for ids in named if ids is not None]
    return [number for ids in known for number in ids] if len(known) == len(named) else None


@functools.cache
def _is_here(host: str) -> bool:
    """By name, or because one of its addresses is this machine's: only such a one can be bound."""
    if host in (socket.gethostname(), socket.getfqdn()):
        return True
    with contextlib.suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.bind(address)
                return True
    return False
