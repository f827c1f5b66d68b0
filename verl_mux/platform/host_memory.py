"""Host memory that a process holds, as the kernel divides it: a page that several share counts for each of them in part.
Runs in trainer and rollout workers, servers and agents; reads /proc."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

# What cannot be dropped: pages of files come back from where they were read, so they count for no process.
_KINDS = {"private": "Pss_Anon", "shared": "Pss_Shmem"}


def process_bytes(pid: int | str = "self") -> dict[str, int]:
    """Bytes by kind: `private` (heaps, copies of states), `shared` (shared memory, and what a driver pins). Empty: the process is
    gone, or this user may not look. The kernel goes through all pages for it: up to a second for hundreds of GB."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        table = _table(Path(f"/proc/{pid}/smaps_rollup").read_text())
        return {kind: table[name] for kind, name in _KINDS.items()}
    return {}


def _table(text: str) -> Mapping[str, int]:
    """`name: number kB` lines, in bytes; the first line is a heading."""
    rows = (line.split() for line in text.splitlines()[1:])
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3}
