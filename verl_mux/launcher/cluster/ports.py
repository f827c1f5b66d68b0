"""Blocks of ports. A job has one block on all its hosts, for the services of its Ray cluster; what else listens takes ports that
the kernel chooses.

A block is a job's on a host for as long as its keeper there listens on the block's first port: the kernel lets only one do that,
whoever runs it, and takes it back when the keeper dies.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator

# Above Ray's own default worker ports (10002 to 19999), below those that Linux gives to outgoing connections.
FIRST, LAST = 20_000, 30_000
SIZE = 50
_PER_RAYLET = 10
MOST_RAYLETS = (SIZE - 1) // _PER_RAYLET  # on one host

# Ray's services and their place among a raylet's ports. The first three exist on the head alone.
_HEAD = ("port", "dashboard-port", "ray-client-server-port")
_EVERYWHERE = (
    "node-manager-port", "object-manager-port", "dashboard-agent-listen-port", "dashboard-agent-grpc-port",
    "runtime-env-agent-port", "metrics-export-port",
)  # fmt: skip


def blocks(seed: str) -> Iterator[int]:
    """All blocks, each once, in an order of this seed's own: jobs that start together ask for different ones."""
    order = list(range((LAST - FIRST) // SIZE))
    random.Random(seed).shuffle(order)
    yield from order


def range_of(block: int) -> str:
    first = FIRST + block * SIZE
    return f"{first} to {first + SIZE - 1}"


def of_services(block: int, place: int, head: bool) -> dict[str, int]:
    """The port of each of Ray's services, by the name of its option. `place`: which of its host's raylets it is."""
    first = FIRST + block * SIZE + 1 + place * _PER_RAYLET
    names = (*_HEAD, *_EVERYWHERE)
    return {name: first + number for number, name in enumerate(names) if head or name not in _HEAD}


class Block:
    """`hold` -> `release`."""

    def __init__(self) -> None:
        self._lock: socket.socket | None = None

    def hold(self, block: int) -> int | None:
        """Take it here. Returns None, or a port of it that another uses, and then nothing is held."""
        self.release()
        first = FIRST + block * SIZE
        lock = socket.socket()
        try:
            lock.bind(("0.0.0.0", first))
            lock.listen(1)
        except OSError:
            lock.close()
            return first
        for port in range(first + 1, first + SIZE):
            if not _is_free(port):
                lock.close()
                return port
        self._lock = lock
        return None

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True
