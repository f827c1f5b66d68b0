"""Check that the processes of a node run on it: places come from the coordinator's file, locations from the processes.

Runs in the coordinator and in the processes of a job. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from verl_mux.errors import UserError

LOOPBACK = "localhost", "127.0.0.1", "::1"


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """The place of a node. `host`: name or address of its machine, None: not bound. `gpu_ids`: which of that host's GPUs it is,
    in the driver's numbers, None: all. `cpus`: the cores on which its work stays where there is no GPU."""

    host: str | None = None
    gpu_ids: list[int] | None = None
    cpus: list[int] | None = None

    def __str__(self) -> str:
        return f"host {self.host}" + ("" if self.gpu_ids is None else f", GPUs {_numbers(self.gpu_ids)}")


@dataclass(frozen=True)
class Location:
    """Where a process runs. `host`: its machine's own name; `addresses`: the machine's; `devices`: ids of the GPUs that the
    process may use, None where the platform has none."""

    host: str
    addresses: tuple[str, ...] = ()
    devices: tuple[str, ...] | None = None

    def __str__(self) -> str:
        where = f"{self.host} ({', '.join(self.addresses) or 'no address'})"
        return where if self.devices is None else f"{where} with GPUs {_numbers(self.devices)}"


def resource_of(node: str) -> str:
    """The custom Ray resource that only the Ray node of this node offers, 1 of it."""
    return f"mux_{node}"


def is_host(name: str, at: Location) -> bool:
    """Is `name`, a name or an address, the machine at `at`? A name without its domain is enough on either side. A loopback name
    stands for the only machine that there is."""
    if name in at.addresses or name in LOOPBACK:
        return True
    one, other = name.lower(), at.host.lower()
    return one == other or (one.partition(".")[0] == other.partition(".")[0] and ("." not in one or "." not in other))


def mismatch(process: str, node: str, place: Place, at: Location) -> str | None:
    """Why `process` must not work for `node` at `at`, as a clause that names both; None: it may, or the node is not bound."""
    if place.host is None:
        return None
    there = is_host(place.host, at)
    if there and (place.gpu_ids is None or at.devices is None or set(at.devices) <= {str(gpu) for gpu in place.gpu_ids}):
        return None
    return f"{process} works for node {node!r} ({place}), but runs on {at}"


def check(located: Iterable[tuple[str, str, Location]], places: Mapping[str, Place]) -> None:
    """Raise UserError naming every process of `located` (name, its node, where it runs) that does not run on its node."""
    wrong = [text for process, node, at in located if (text := mismatch(process, node, places.get(node, Place()), at))]
    if wrong:
        raise UserError(
            f"{'; '.join(wrong)}. A Ray node that offers the resource mux_NODE must run on that node's host, with its GPUs alone"
        )


def _numbers(ids: Iterable[object]) -> str:
    return ", ".join(map(str, ids)) or "none"
