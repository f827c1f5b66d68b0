"""What device memory processes hold on a machine whose device is host memory: no driver knows it, so each process notes it
itself.

Runs in every process of a job on the CPU platform, and in agents, which read the notes: one small file a process, in a folder of
its user that lies in memory. An agent checks by itself whether the process lives, so a killed process holds nothing. With a
budget (BUDGET_VARIABLE) the node's device has that many bytes: `reserve` and `charge` fail past it, as an allocation on a GPU
does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path

import msgspec

from verl_mux.errors import Failure

DIRECTORY_VARIABLE = "VERL_MUX_DEVICE_LEDGER"
# The node whose device this process uses; empty where its host is one node.
NODE_VARIABLE = "VERL_MUX_NODE"
# Bytes of one device of the node; none: as much as there is.
BUDGET_VARIABLE = "VERL_MUX_DEVICE_BUDGET"
# Which device of the node, and whose process it is: the message that there is no room names both.
DEVICE_VARIABLE = "VERL_MUX_DEVICE"
JOB_VARIABLE = "VERL_MUX_DEVICE_JOB"
_IN_MEMORY = Path("/dev/shm")
_PREFIX = "verl_mux_devices-"


class DeviceFull(Failure):
    """The device has no room for what was asked; nothing has changed."""


class Account(msgspec.Struct, frozen=True):
    """Of process `pid` of a PID namespace (`space`), which began `started` clock ticks after the boot: bytes by tag.

    `charges`: of these, what it keeps besides its tensors.
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


_decode = msgspec.json.Decoder(Account).decode
_tags: dict[str, int] = {}
_charges: dict[str, int] = {}


def hold(tags: Mapping[Hashable, int]) -> None:
    """This process holds these bytes now, by tag; what it said before is replaced. Never raises: an account stops no work."""
    global _tags
    _tags = {_word(tag): held for tag, held in tags.items()}
    with contextlib.suppress(OSError, ValueError, IndexError):
        _write()


def reserve(tags: Mapping[Hashable, int]) -> None:
    """As `hold`, before the bytes are there. Raises DeviceFull where the budget has no room for them."""
    global _tags
    wanted = {_word(tag): held for tag, held in tags.items()}
    if budget() is None:
        return
    with _alone():
        _check(sum(wanted.values()) - sum(_tags.values()))
        _tags = wanted
        _write()


def charge(kinds: Mapping[str, int]) -> None:
    """This process keeps these bytes besides its tensors, by kind; other kinds stay as they are. Nothing where there is no
    budget.

    Raises DeviceFull where that has no room for it.
    """
    global _charges
    if budget() is None:
        return
    with _alone():
        wanted = {kind: num_bytes for kind, num_bytes in {**_charges, **kinds}.items() if num_bytes}
        _check(sum(wanted.values()) - sum(_charges.values()))
        _charges = wanted
        _write()


def budget() -> int | None:
    """Bytes of one device of this process's node; None: no budget."""
    given = os.environ.get(BUDGET_VARIABLE)
    return int(given) if given else None


def free() -> int | None:
    """Bytes of the budget that no living process holds on this process's device; None: no budget."""
    size = budget()
    return None if size is None else size - sum(account.total for account in _on_this_device())


def holders() -> str:
    """Who holds what on this process's device, in words."""
    shares = [f"{a.job or 'a process'} (pid {a.pid}) {a.total / 1e9:.2f} GB" for a in _on_this_device() if a.total]
    return ", ".join(shares) or "no process"


def accounts(space: str) -> list[tuple[Path, Account]]:
    """Of processes in this PID namespace, living or not, as far as this user may read them; with the file of each."""
    found = []
    for folder in _directories():
        for path in folder.glob(f"{space}.*"):
            with contextlib.suppress(OSError, msgspec.DecodeError):  # gone meanwhile, or not ours
                found.append((path, _decode(path.read_bytes())))
    return found


def _on_this_device() -> list[Account]:
    node, device = os.environ.get(NODE_VARIABLE, ""), _device()
    known = (account for _, account in accounts(_space()))
    return [a for a in known if (a.node, a.device) == (node, device) and _lives(a)]


def _lives(account: Account) -> bool:
    """A zombie does not, unless threads of it still run."""
    try:
        stat = _stat(account.pid)
        return int(stat[19]) == account.started and (stat[0] != "Z" or int(stat[17]) > 1)
    except (OSError, IndexError, ValueError):
        return False


def _check(more: int) -> None:
    size, left = budget(), free()
    if size is not None and left is not None and more > max(left, 0):
        node = os.environ.get(NODE_VARIABLE) or "this node"
        raise DeviceFull(
            f"out of memory on {node}: {more / 1e9:.2f} GB are needed, {max(left, 0) / 1e9:.2f} of {size / 1e9:.2f} GB are free; "
            f"held by {holders()}"
        )


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """No other process looks and takes at the same time."""
    with (_own_directory() / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write() -> None:
    folder, space, pid = _own_directory(), _space(), os.getpid()
    made = folder / f".{space}.{pid}"
    node, job = os.environ.get(NODE_VARIABLE, ""), os.environ.get(JOB_VARIABLE, "")
    made.write_bytes(msgspec.json.encode(Account(pid, _started(), space, node, _tags, _charges, _device(), job)))
    made.replace(folder / f"{space}.{pid}")


def _own_directory() -> Path:
    named = os.environ.get(DIRECTORY_VARIABLE)
    folder = Path(named) if named else _IN_MEMORY / f"{_PREFIX}{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _directories() -> list[Path]:
    named = os.environ.get(DIRECTORY_VARIABLE)
    return [Path(named)] if named else list(_IN_MEMORY.glob(f"{_PREFIX}*"))


def _device() -> int:
    return int(os.environ.get(DEVICE_VARIABLE) or 0)


def _space() -> str:
    return os.readlink("/proc/self/ns/pid").removeprefix("pid:").strip("[]")


def _word(tag: Hashable) -> str:
    return "/".join(map(str, tag)) if isinstance(tag, tuple) else str(tag)


def _started(pid: int | str = "self") -> int:
    return int(_stat(pid)[19])


def _stat(pid: int | str) -> list[str]:
    """From the state on; the name before it may hold anything."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
