"""What device memory processes hold on a machine whose device is host memory: no driver knows it, so each process notes it
itself.

Runs in every process of a job on the CPU platform, and in agents, which read the notes; verl_mux asks for it by the entry point
`ledger`. One small file a process, in a folder of its user that lies in memory. A process that is gone holds nothing, whatever
its file says. With a budget (BUDGET_VARIABLE) the node's device has that many bytes: `reserve` and `charge` fail past it, as an
allocation on a GPU does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Hashable, Mapping
from pathlib import Path

import msgspec

from verl_mux.coordinator.bus import members
from verl_mux.errors import Failure
from verl_mux.platform.charges import BUDGET_VARIABLE, DEVICE_VARIABLE, JOB_VARIABLE, NODE_VARIABLE

DIRECTORY_VARIABLE = "VERL_MUX_DEVICE_LEDGER"
_IN_MEMORY = Path("/dev/shm")
_PREFIX = "verl_mux_devices-"


class DeviceFull(Failure):
    """The device has no room for what was asked; nothing has changed."""


class Account(msgspec.Struct, frozen=True):
    """Of process `pid` of a PID namespace (`space`), which began `started` clock ticks after the boot: bytes by tag.

    `charges`: what it keeps besides its tensors, by kind.
    """

    pid: int
    started: int
    space: str
    node: str
    tags: dict[str, int]
    charges: dict[str, int] = {}
    device: int = 0
    job: str = ""

    @property
    def total(self) -> int:
        return sum(self.tags.values()) + sum(self.charges.values())

    @property
    def lives(self) -> bool:
        return members.is_alive(members.Member(members.HOST, self.pid, self.started, members.BOOT, self.space))


_decode = msgspec.json.Decoder(Account).decode
_tags: dict[str, int] = {}
_charges: dict[str, int] = {}


def hold(tags: Mapping[Hashable, int]) -> None:
    """This process holds these bytes now, by tag; what it said before is replaced. Never raises: an account stops no work."""
    global _tags
    _tags = _by_word(tags)
    with contextlib.suppress(OSError):
        _write()


def reserve(tags: Mapping[Hashable, int]) -> None:
    """As `hold`, before the bytes are there. Raises DeviceFull where the budget has no room for them."""
    _take(_by_word(tags), _charges)


def charge(kinds: Mapping[str, int]) -> None:
    """This process keeps these bytes besides its tensors, by kind; other kinds stay as they are. Nothing where there is no
    budget. Raises DeviceFull where that has no room for it."""
    _take(_tags, {kind: num_bytes for kind, num_bytes in {**_charges, **kinds}.items() if num_bytes})


def budget() -> int | None:
    """Bytes of one device of this process's node; None: no budget."""
    given = os.environ.get(BUDGET_VARIABLE)
    return int(given) if given else None


def free() -> int | None:
    """Bytes of the budget that no living process holds on this process's device; None: no budget."""
    size = budget()
    return None if size is None else size - sum(account.total for account in _on_this_device())


def holders() -> str:
    """Which processes hold what on this process's device, in words."""
    shares = [f"{a.job or 'a process'} (pid {a.pid}) {a.total / 1e9:.2f} GB" for a in _on_this_device() if a.total]
    return ", ".join(shares) or "no process"


def accounts() -> list[tuple[Path, Account]]:
    """Of processes in this PID namespace, living or not, as far as this user may read them; with the file of each."""
    named, found = os.environ.get(DIRECTORY_VARIABLE), []
    for folder in [Path(named)] if named else _IN_MEMORY.glob(f"{_PREFIX}*"):
        for path in folder.glob(f"{members.SPACE}.*"):
            with contextlib.suppress(OSError, msgspec.DecodeError):  # gone meanwhile, or not ours
                found.append((path, _decode(path.read_bytes())))
    return found


def _on_this_device() -> list[Account]:
    here = os.environ.get(NODE_VARIABLE, ""), _device()
    return [account for _, account in accounts() if (account.node, account.device) == here and account.lives]


def _take(tags: dict[str, int], charges: dict[str, int]) -> None:
    global _tags, _charges
    if (size := budget()) is None:
        return
    more = sum((*tags.values(), *charges.values())) - sum((*_tags.values(), *_charges.values()))
    with (_own_directory() / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # no other process looks and takes at the same time
        left = max(free() or 0, 0)
        if more > left:
            raise DeviceFull(
                f"out of memory on {os.environ.get(NODE_VARIABLE) or 'this node'}: {more / 1e9:.2f} GB are needed, "
                f"{left / 1e9:.2f} of {size / 1e9:.2f} GB are free; held by {holders()}"
            )
        _tags, _charges = tags, charges
        _write()


def _write() -> None:
    folder, me = _own_directory(), members.this_process()
    made, node, job = folder / f".{me.space}.{me.pid}", os.environ.get(NODE_VARIABLE, ""), os.environ.get(JOB_VARIABLE, "")
    made.write_bytes(msgspec.json.encode(Account(me.pid, me.started, me.space, node, _tags, _charges, _device(), job)))
    made.replace(folder / f"{me.space}.{me.pid}")


def _own_directory() -> Path:
    named = os.environ.get(DIRECTORY_VARIABLE)
    folder = Path(named) if named else _IN_MEMORY / f"{_PREFIX}{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _device() -> int:
    return int(os.environ.get(DEVICE_VARIABLE) or 0)


def _by_word(tags: Mapping[Hashable, int]) -> dict[str, int]:
    return {"/".join(map(str, tag)) if isinstance(tag, tuple) else str(tag): held for tag, held in tags.items()}
