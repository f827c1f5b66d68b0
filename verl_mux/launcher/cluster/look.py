"""`python -m verl_mux.launcher.cluster.look`: says what a host is like, one JSON object a line. For `verl-mux doctor --cluster`.

Each line of stdin is a JSON object, and is answered with the time here and with what it asks for. `towards`, an address: all of
this host. `reach`, [[address, port]...]: which it cannot connect to. `sees`, a path: whether that is here. Ends with its stdin.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil

from verl_mux.launcher.cluster import ports
from verl_mux.launcher.cluster.addresses import own_address
from verl_mux.launcher.cluster.ports import Block

PACKAGES = ("verl-mux", "verl", "sglang", "ray", "torch")
_CONNECT_S = 5.0


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


def listen(address: str) -> int:
    """Takes connections for as long as this process lives, and closes them; returns the port. Raises OSError: none of this
    host's addresses."""
    listener = socket.create_server((address, 0), backlog=1024)

    def accept() -> None:
        while True:
            listener.accept()[0].close()

    threading.Thread(target=accept, daemon=True).start()
    return listener.getsockname()[1]


def unreached(targets: list[tuple[str, int]]) -> list[tuple[str, int, str]]:
    """Those that this host cannot connect to, with the reason."""
    with ThreadPoolExecutor(max_workers=32) as pool:
        reasons = list(pool.map(_connect, targets))
    return [(*target, reason) for target, reason in zip(targets, reasons, strict=True) if reason]


def _connect(target: tuple[str, int]) -> str:
    try:
        socket.create_connection((target[0], target[1]), timeout=_CONNECT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def main() -> None:
    port = listen("0.0.0.0")
    for line in sys.stdin:
        asked = json.loads(line)
        answer: dict[str, Any] = {"time": time.time()}
        if "towards" in asked:
            answer |= {**about(asked["towards"]), "port": port}
        if "reach" in asked:
            answer["unreached"] = unreached([(address, port) for address, port in asked["reach"]])
        if "sees" in asked:
            answer["sees"] = os.path.exists(asked["sees"])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
