"""Bytes on the device by tag, from the processes of an engine that hold them to the server that logs them.

An engine's answers to sleep and wake carry no figures, and neither has torch_memory_saver, so each of its processes keeps one
small file in a directory that the server names to it; the server reads them all after each sleep and wake.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import msgspec

DIRECTORY_VARIABLE = "VERL_MUX_TAG_DIR"


def write(mapped: dict[str, int], pid: int) -> None:
    """Replace process `pid`'s file: bytes that it has on the device, by tag. Does nothing where no server asked for it."""
    directory = os.environ.get(DIRECTORY_VARIABLE)
    if not directory:
        return
    temporary = Path(directory) / f".{pid}.tmp"
    temporary.write_bytes(msgspec.json.encode(mapped))
    temporary.replace(Path(directory) / f"{pid}.json")


def mapped_bytes(directory: Path) -> dict[str, int]:
    """Bytes on the device by tag, summed over the processes that write to `directory`."""
    totals: Counter[str] = Counter()
    for path in directory.glob("*.json"):
        totals.update(msgspec.json.decode(path.read_bytes(), type=dict[str, int]))
    return dict(totals)
