"""Which processes are on one host, for the sync: those that can hand each other memory."""

from __future__ import annotations

import os
from pathlib import Path

import xxhash


def this_machine() -> str:
    """The same in all processes of one kernel and one network, in which they reach each other's local sockets; of no other.

    Ray's id of a node does not say it: a job has a Ray node for each of its nodes, several of which may be on one host.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return xxhash.xxh3_64_hexdigest(f"{boot} {os.readlink('/proc/self/ns/net')}".encode())
