"""Host memory: what a process holds, as the kernel divides it (a page that several share counts for each of them in part); and
how much there is for the processes here, of the machine's or of what their control groups allow.

Runs in trainer and rollout workers, servers, agents and `doctor`; reads /proc and /sys/fs/cgroup.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

# What cannot be dropped: pages of files come back from where they were read, so they count for no process.
_KINDS = {"private": "Pss_Anon", "shared": "Pss_Shmem"}


def process_bytes(pid: int | str = "self") -> dict[str, int]:
    """Bytes by kind: `private` (heaps, copies of states), `shared` (shared memory, and what a driver pins). Empty: the process is
    gone, or this user may not look. The kernel goes through all pages for it: up to a second for hundreds of GB."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        table = _table(Path(f"/proc/{pid}/smaps_rollup").read_text())
        return {kind: table[name] for kind, name in _KINDS.items()}
    return {}


class Room(NamedTuple):
    """Bytes of host memory in all and available, and what sets the first: the machine, or the folder of a control group."""

    total: int
    available: int
    source: str


class _Files(NamedTuple):
    """Of a version of control groups: its limit, what is used of it, and which of that the kernel takes back when it needs to."""

    limit: str
    used: str
    reclaimable: tuple[str, ...]


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
_V2 = _Files("memory.max", "memory.current", ("inactive_file", "active_file", "slab_reclaimable"))


def room(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> Room:
    """For this process. In a container the machine has more than the container may use, and whatever takes more is killed."""
    machine = psutil.virtual_memory()
    found = [Room(machine.total, machine.available, "the machine"), *_limits(proc, groups)]
    tightest = min(found, key=lambda each: each.total)
    return tightest._replace(available=max(min(each.available for each in found), 0))


def _limits(proc: Path, groups: Path) -> Iterator[Room]:
    """Of the control group of this process and of all above it, as far as they are to be seen from here."""
    with contextlib.suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds and "memory" not in kinds.split(","):
                continue
            top, files = (groups / "memory", _V1) if kinds else (groups, _V2)
            own = top / path.lstrip("/")
            for folder in (own, *(above for above in own.parents if above.is_relative_to(top))):
                with contextlib.suppress(OSError, ValueError):  # another container's folder, or `max`
                    limit, used = (int((folder / name).read_text()) for name in (files.limit, files.used))
                    rows = (row.split() for row in (folder / "memory.stat").read_text().splitlines())
                    back = sum(int(row[1]) for row in rows if row[0] in files.reclaimable)
                    yield Room(limit, limit - used + back, str(folder))


def _table(text: str) -> Mapping[str, int]:
    """`name: number kB` lines, in bytes; the first line is a heading."""
    rows = (line.split() for line in text.splitlines()[1:])
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3}
