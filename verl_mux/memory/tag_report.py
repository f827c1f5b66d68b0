"""Bytes and seconds per tag, from the processes that hold the memory to the one that logs them.

SGLang's release and resume answers carry nothing, so each scheduler process keeps one small file in a directory that the server
names to it; the server reads them all after each sleep and wake. torch_memory_saver has no such figures either.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

DIRECTORY_VARIABLE = "VERL_MUX_TAG_DIR"


class TagReport(msgspec.Struct):
    """What one process holds. `mapped`: bytes on the device by tag; `seconds`: how long a tag's last pause or resume took."""

    pid: int
    mapped: dict[str, int] = {}
    seconds: dict[str, float] = {}

    def write(self) -> None:
        """Replace this process's file. Does nothing where no server asked for it."""
        directory = os.environ.get(DIRECTORY_VARIABLE)
        if not directory:
            return
        temporary = Path(directory) / f".{self.pid}.tmp"
        temporary.write_bytes(msgspec.json.encode(self))
        temporary.replace(Path(directory) / f"{self.pid}.json")


def read_reports(directory: Path) -> list[TagReport]:
    """The reports of all processes that write to `directory`."""
    return [msgspec.json.decode(path.read_bytes(), type=TagReport) for path in sorted(directory.glob("*.json"))]


def mapped_bytes(reports: list[TagReport]) -> dict[str, int]:
    """Bytes on the device by tag, summed over processes."""
    totals: dict[str, int] = {}
    for report in reports:
        for tag, nbytes in report.mapped.items():
            totals[tag] = totals.get(tag, 0) + nbytes
    return totals
