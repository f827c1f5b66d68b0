"""How many cores a run keeps busy: the processor time of all its processes over the clock, part by part, from /proc.

    Account.look() every few seconds -> <dir>/cores.jsonl, a line an interval -> busy(...) of a window of the run

An interval's processor time is what the processes used that were there at its end; what one used after the last look before its
end is lost. Runs in the launcher; called by watch.py, run_summary.py and bench/; reads /proc, writes the file.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from verl_mux.coordinator.core.settings import Config

EVERY_S = 5.0
FILE = "cores.jsonl"


class Interval(NamedTuple):
    """start, end: seconds since the epoch. cpu: seconds of processor time."""

    start: float
    end: float
    cpu: float


class Account:
    """`look` as often as `due` says: it writes what the processes used since the look before, but for the first."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        self._at = 0.0
        self._used: dict[tuple[int, float], float] = {}

    @property
    def due(self) -> bool:
        return time.time() - self._at >= EVERY_S

    def look(self, processes: Iterable[psutil.Process]) -> None:
        now, used, cpu = time.time(), {}, 0.0
        for process in processes:
            with contextlib.suppress(psutil.Error, OSError):
                key, times = (process.pid, process.create_time()), process.cpu_times()
                used[key] = times.user + times.system
                # A process that has come since the last look used all of its time since then.
                cpu += used[key] - self._used.get(key, 0.0)
        if self._at:
            line = {"start": self._at, "end": now, "cpu": round(cpu, 3)}
            with contextlib.suppress(OSError), self._path.open("a") as file:  # a full disk costs figures, not the run
                file.write(json.dumps(line) + "\n")
        # A process that could not be read now may be there again at the next look, and has not used all of its time since then.
        self._at, self._used = now, {**self._used, **used}


def read(directory: Path) -> list[Interval]:
    """What `Account` wrote; torn lines are passed over."""
    found = []
    with contextlib.suppress(OSError):
        for text in (directory / FILE).read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError, TypeError):
                found.append(Interval(**json.loads(text)))
    return found


def busy(intervals: Iterable[Interval], windows: Sequence[tuple[float, float]]) -> float | None:
    """Cores busy in the windows. None where no interval lies in them. An interval counts by the part of it that does."""
    seconds = cpu = 0.0
    for interval in intervals:
        inside = sum(max(0.0, min(interval.end, end) - max(interval.start, start)) for start, end in windows)
        if inside > 0 and interval.end > interval.start:
            seconds += inside
            cpu += interval.cpu * inside / (interval.end - interval.start)
    return cpu / seconds if seconds else None


def cores_of(config: Config) -> int:
    """Of all nodes: those they are bound to, each counted once; where one is bound to none, this machine's."""
    nodes = config.nodes.values()
    if any(node.cpus is None for node in nodes):
        return os.cpu_count() or 1
    return len({(node.host, core) for node in nodes for core in node.cpus or ()})


def figures(
    intervals: Sequence[Interval], config: Config, alone: Sequence[tuple[float, float]], together: tuple[float, float] | None
) -> dict[str, object]:
    """cores_alone, cores_mux: busy while one job ran alone, and while all took turns. limit: an estimate of what
    the throughput ratio can reach: all cores of the pools over cores_alone. A run may come out above it, as the two are measured
    in other steps. None where the run has no such part, or no look fell into it."""
    one, both = busy(intervals, alone), busy(intervals, [together] if together else [])
    return {
        "cores_alone": None if one is None else round(one, 4),
        "cores_mux": None if both is None else round(both, 4),
        "limit": round(cores_of(config) / one, 4) if one else None,
    }


def sentences(mux: dict) -> list[str]:
    """What a summary's `mux` says of cores, for people."""
    alone, together, limit = (mux[key] for key in ("cores_alone", "cores_mux", "limit"))
    if not alone or not together:
        return ["cores busy: not measured"]
    reached = f": {mux['throughput_ratio'] / limit:.0%} of that" if mux["throughput_ratio"] else ""
    return [f"cores busy: {alone:.2f} alone, {together:.2f} together, so these cores allow about {limit:.2f}x{reached}"]
