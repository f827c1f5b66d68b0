"""Whether what works for a node runs where the node is: places by the coordinator's file, locations as processes find them.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from verl_mux.errors import UserError


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A node's. `host`: name or address of its machine, None: nobody said, and it is not bound. `gpu_ids`: which of that host's
    GPUs it is, counted as the driver counts them, None: all. `cpus`: the cores on which its work stays where there is no GPU."""

    host: str | None = None
    gpu_ids: list[int] | None = None
    cpus: list[int] | None = None

    def __str__(self) -> str:
        return f"host {self.host}" + ("" if self.gpu_ids is None else f", GPUs {_numbers(self.gpu_ids)}")


@dataclass(frozen=True)
class Location:
    """A process's. `host`: its machine's own name; `addresses`: that machine's on its networks; `devices`: ids of the GPUs that
    it may use, None where the platform has none."""

    host: str
    addresses: tuple[str, ...] = ()
    devices: tuple[str, ...] | None = None

    def __str__(self) -> str:
        where = f"{self.host} ({', '.join(self.addresses) or 'no address'})"
        return where if self.devices is None else f"{where} with GPUs {_numbers(self.devices)}"


def resource_of(node: str) -> str:
    """The custom resource of Ray, 1 of which the Ray node of this node offers."""
    return f"mux_{node}"


def is_host(name: str, at: Location) -> bool:
    """Is the machine that goes by this name or address the one at `at`? A name without its domain is enough on either side."""
    if name in at.addresses:
        return True
    one, other = name.lower(), at.host.lower()
    return one == other or (one.partition(".")[0] == other.partition(".")[0] and ("." not in one or "." not in other))


def mismatch(who: str, node: str, place: Place, at: Location) -> str | None:
    """What is wrong about `who` working for `node` at `at`, in one clause that names both; None: nothing, or it is not bound."""
    if place.host is None:
        return None
    there = is_host(place.host, at)
    if there and (place.gpu_ids is None or at.devices is None or set(at.devices) <= {str(gpu) for gpu in place.gpu_ids}):
        return None
    return f"{who} works for node {node!r} ({place}), but runs on {at}"


def check(found: Iterable[tuple[str, str, Location]], places: Mapping[str, Place]) -> None:
    """`found`: who, the node that it works for, where it runs.

    Raises:
        UserError: naming everybody that runs elsewhere than on its node.
    """
    wrong = [text for who, node, at in found if (text := mismatch(who, node, places.get(node, Place()), at))]
    if wrong:
        raise UserError(
            f"{'; '.join(wrong)}. A Ray node that offers the resource mux_NODE must run on that node's host, with its GPUs alone"
        )


def _numbers(ids: Iterable[object]) -> str:
    return ", ".join(map(str, ids)) or "none"
