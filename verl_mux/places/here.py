"""Where the process runs that asks."""

from __future__ import annotations

import ipaddress
import os
import socket

import psutil
import ray
from verl.plugin.platform import get_platform

from verl_mux.places.place import Location


def here() -> Location:
    """Of a worker or a server of a job."""
    return Location(socket.gethostname(), _addresses(), _devices())


def this_host() -> Location:
    """Of a process that uses no device."""
    return Location(socket.gethostname(), _addresses())


def _addresses() -> tuple[str, ...]:
    """The one by which Ray knows this machine, and all others of it but those that every machine has."""
    given = [it.address.partition("%")[0] for card in psutil.net_if_addrs().values() for it in card
             if it.family in (socket.AF_INET, socket.AF_INET6)]  # fmt: skip
    others = [address for address in given if not ipaddress.ip_address(address).is_loopback]
    return tuple(dict.fromkeys([ray.util.get_node_ip_address().strip("[]"), *others]))


def _devices() -> tuple[str, ...] | None:
    """Those that Ray gave this process; of a server, which asks Ray for none, those of its workers, which verl sets."""
    platform = get_platform()
    if platform.device_name == "cpu":
        return None
    given = ray.get_runtime_context().get_accelerator_ids().get(platform.ray_resource_name()) or []
    visible = os.environ.get(platform.visible_devices_envvar(), "")
    return tuple(given) or tuple(word.strip() for word in visible.split(",") if word.strip())
