"""Figures of the tests marked `gpu`: a JSON line a test in the file that VERL_MUX_GPU_RECORD names (build/gpu/record.jsonl)."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE_VARIABLE = "VERL_MUX_GPU_RECORD"
_noted: defaultdict[str, list[Any]] = defaultdict(list)


def note(**figures: Any) -> None:
    """Each value after those of the same name. Names end in their unit: `_s` (seconds), `_bytes`."""
    for name, value in figures.items():
        _noted[name].append(value)


@contextlib.contextmanager
def timed(name: str) -> Iterator[None]:
    """Notes `NAME_s`, of what fails too."""
    began = time.perf_counter()
    try:
        yield
    finally:
        note(**{f"{name}_s": round(time.perf_counter() - began, 6)})


def write(test: str, outcome: str, seconds: float) -> None:
    """What was noted since the last `write` or `drop` is this test's."""
    path = Path(os.environ.get(FILE_VARIABLE) or Path(__file__).parents[2] / "build/gpu/record.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as lines:
        lines.write(json.dumps({"test": test, "outcome": outcome, "seconds": seconds, "figures": _noted}) + "\n")
    drop()


def drop() -> None:
    _noted.clear()
