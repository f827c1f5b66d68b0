"""What an address says of its port."""

from __future__ import annotations

import re

from verl_mux.errors import UserError

_PORT = re.compile(r"tcp://.*:(?P<port>[+-]?\d+)")
_MOST = 2**16 - 1


def check_port(address: str) -> None:
    """Raises UserError for a port that there is none of: ZeroMQ would take another one, by its lower bits."""
    found = _PORT.fullmatch(address)
    if found is None:  # no tcp, or nothing like it, which ZeroMQ says
        return
    port = found["port"]
    if not port.isascii() or not port.isdigit() or len(port) > 5 or int(port) > _MOST:
        raise UserError(f"{address} names port {port}; a port is a number from 0 (any free one, to listen at) to {_MOST}")
