"""What a process of a schedule saw, one line a time: whole in the file before anything else happens, kill -9 included.

Runs in every process of a schedule; touches one file for each.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import msgspec


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """`at`: the machine's monotonic clock, which all its processes share."""

    at: float
    what: str
    who: str = ""
    pid: int = 0
    token: int = 0
    nodes: list[str] = []
    step: int = 0
    asked_at: float = 0.0
    text: str = ""


class Ledger:
    def __init__(self, path: Path, who: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._who = who

    def write(self, what: str, **about: Any) -> None:
        line = Line(at=time.monotonic(), what=what, who=self._who, **{"pid": os.getpid(), **about})
        os.write(self._file, msgspec.json.encode(line) + b"\n")


def read(folder: Path) -> list[Line]:
    """Of all processes, in order of time."""
    decode = msgspec.json.Decoder(Line).decode
    lines = [decode(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_bytes().splitlines()]
    return sorted(lines, key=lambda line: line.at)
