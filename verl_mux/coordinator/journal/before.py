"""What can be known of the coordinators that were at an address before: whether jobs of one may still hold leases.

Nothing of it is certain but that nobody knows a port that the system has only now chosen. A file for each port says that a
coordinator was there; where there is none, the file may have been deleted, so the coordinator does not take that for an
answer, but listens for a while (`patience.first_look`).
"""

from __future__ import annotations

import contextlib
import enum
import os
from pathlib import Path

import xxhash

from verl_mux.coordinator.bus.access.keys import is_local
from verl_mux.coordinator.bus.state_folder import state_folder
from verl_mux.coordinator.journal.frames import sync_folder


class Before(enum.Enum):
    NOBODY = "no coordinator was here"
    NOBODY_KNOWN = "none is known to have been here, and jobs of one would be on this machine"
    PERHAPS = "one may have been here"


def arrive(bind: str) -> Before:
    """What is known when a coordinator comes to listen at `bind`; from now on it is known that one was there."""
    if bind.endswith((":0", ":*")):
        return Before.NOBODY
    is_known = _is_known(bind)
    return Before.NOBODY_KNOWN if note(bind) and is_local(bind) and not is_known else Before.PERHAPS


def _is_known(address: str) -> bool:
    file = _file(address)
    return file is not None and file.exists()


def note(address: str) -> bool:
    """A coordinator is here: on disk when this returns. False: it cannot be written."""
    if (file := _file(address)) is None:
        return False
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        sync_folder(file.parent)
    except OSError:
        return False
    return True


def forget(address: str) -> None:
    """It has ended, and nobody holds a lease of it."""
    if (file := _file(address)) is not None:
        with contextlib.suppress(OSError):
            file.unlink()


def _file(address: str) -> Path | None:
    """By port: what listens on all interfaces can be reached by the loopback address too."""
    if (state := state_folder()) is None:
        return None
    port = address.rpartition(":")[2]
    name = port if address.startswith("tcp://") and port.isdigit() else xxhash.xxh3_64_hexdigest(address.encode())
    return state / "addresses" / name
