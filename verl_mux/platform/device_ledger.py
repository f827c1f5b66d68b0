"""What device memory processes hold on a machine whose device is host memory: no driver knows it, so each says it itself.

One small file for each process, in a folder of its user that lies in memory; an agent reads them, and sees for itself whether
the process lives. So the account of a process that was killed ends with it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Hashable, Mapping
from pathlib import Path

import msgspec

DIRECTORY_VARIABLE = "VERL_MUX_DEVICE_LEDGER"
# The node whose device this process uses; empty where its host is one node.
NODE_VARIABLE = "VERL_MUX_NODE"
_IN_MEMORY = Path("/dev/shm")
_PREFIX = "verl_mux_devices-"


class Account(msgspec.Struct, frozen=True):
    """Of process `pid` of a PID namespace (`space`), which began `started` clock ticks after the boot: bytes by tag."""

    pid: int
    started: int
    space: str
    node: str
    tags: dict[str, int]


_decode = msgspec.json.Decoder(Account).decode


def hold(tags: Mapping[Hashable, int]) -> None:
    """This process holds so many bytes now, by tag; what it said before is replaced. Never raises: an account stops no work."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        folder = _own_directory()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        space = os.readlink("/proc/self/ns/pid").removeprefix("pid:").strip("[]")
        node = os.environ.get(NODE_VARIABLE, "")
        made = folder / f".{space}.{os.getpid()}"
        by_tag = {_word(tag): held for tag, held in tags.items()}
        made.write_bytes(msgspec.json.encode(Account(os.getpid(), _started(), space, node, by_tag)))
        made.replace(folder / f"{space}.{os.getpid()}")


def accounts(space: str) -> list[tuple[Path, Account]]:
    """Of processes in this PID namespace, living or not, as far as this user may read them; with the file of each."""
    found = []
    for folder in _directories():
        for path in folder.glob(f"{space}.*"):
            with contextlib.suppress(OSError, msgspec.DecodeError):  # gone meanwhile, or not ours
                found.append((path, _decode(path.read_bytes())))
    return found


def _own_directory() -> Path:
    named = os.environ.get(DIRECTORY_VARIABLE)
    return Path(named) if named else _IN_MEMORY / f"{_PREFIX}{os.getuid()}"


def _directories() -> list[Path]:
    named = os.environ.get(DIRECTORY_VARIABLE)
    return [Path(named)] if named else list(_IN_MEMORY.glob(f"{_PREFIX}*"))


def _word(tag: Hashable) -> str:
    return "/".join(map(str, tag)) if isinstance(tag, tuple) else str(tag)


def _started() -> int:
    return int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19])
