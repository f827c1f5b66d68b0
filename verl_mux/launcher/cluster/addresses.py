"""Addresses of this host."""

from __future__ import annotations

import socket

import psutil


def own_address(towards: str) -> str:
    """The address by which this host reaches another. Nothing is sent. Raises OSError: no way there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))
        return probe.getsockname()[0]


def interface_of(address: str) -> str | None:
    """The network interface that has the address."""
    found = psutil.net_if_addrs()
    return next((name for name, entries in found.items() if any(entry.address == address for entry in entries)), None)
