"""`python -m verl_mux.launcher.cluster.look`: says what a host is like, one JSON object a line. For `verl-mux doctor --cluster`.

Each line of stdin is answered with the time here; the first answer tells everything else as well. Ends with its stdin.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
import socket
import subprocess
import sys
import time
from typing import Any

import psutil

from verl_mux.launcher.cluster import ports
from verl_mux.launcher.cluster.addresses import own_address
from verl_mux.launcher.cluster.ports import Block

PACKAGES = ("verl-mux", "verl", "sglang", "ray", "torch")


def about(towards: str) -> dict[str, Any]:
    """`towards`: address of another host, by which this one's own is found."""
    address = _address(towards)
    return {
        "host_name": socket.gethostname(),
        "address": address,
        "name_is": _name_is(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "gpus": _gpus(),
        "interfaces": _interfaces(),
        "free_blocks": sum(_is_free(block) for block in ports.blocks("doctor")),
    }


def _address(towards: str) -> str | None:
    try:
        return own_address(towards)
    except OSError:
        return None


def _name_is() -> str | None:
    """What this host's own name stands for."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpus() -> list[str]:
    """Their names, as the driver's own command tells them."""
    if shutil.which("nvidia-smi") is None:
        return []
    found = subprocess.run(
        ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip().splitlines() if found.returncode == 0 else []


def _interfaces() -> dict[str, dict[str, Any]]:
    """Those that are up and have an address: IPv4 address and Mbit/s, 0 where the driver does not say."""
    addresses, states = psutil.net_if_addrs(), psutil.net_if_stats()
    found = {}
    for name, state in states.items():
        own = [entry.address for entry in addresses.get(name, ()) if entry.family == socket.AF_INET]
        if state.isup and own and not own[0].startswith("127."):
            found[name] = {"address": own[0], "mbit_per_s": state.speed}
    return found


def _is_free(block: int) -> bool:
    holder = Block()
    taken = holder.hold(block)
    holder.release()
    return taken is None


def main() -> None:
    first = True
    for line in sys.stdin:
        print(json.dumps({"time": time.time(), **(about(line.strip()) if first else {})}), flush=True)
        first = False


if __name__ == "__main__":
    main()
