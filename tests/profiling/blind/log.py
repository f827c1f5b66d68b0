"""Where a made run's lines go, and what its coordinator says in them."""

from __future__ import annotations

from collections import defaultdict
from datetime import datetime, timedelta
from typing import Any

import msgspec

from tests.profiling.blind.shapes import Run

BEGAN = datetime(2026, 3, 2, 9, 0, 0)


class Lines:
    """The lines of a run by file. Seconds: `own`, of each job's steps, waits for leases left out; `held`, of phases, times their
    nodes. quiet: these alone."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.files: dict[tuple[str, str, int, int], list[tuple[float, bytes]]] = defaultdict(list)
        self.own: dict[str, dict[int, float]] = defaultdict(dict)
        self.held: dict[str, float] = defaultdict(float)

    def say(self, job: str, role: str, worker: int, step: int, at: float, event: str, took: float | None = None, /, **extra):
        if self.quiet:
            return
        line: dict = {"timestamp": (BEGAN + timedelta(seconds=at)).isoformat(timespec="microseconds"), "event": event}
        if took is not None:
            line["duration_sec"] = round(took, 6)
        if extra:
            line["extra"] = extra
        line |= {"workid": worker, "step": step, "role": role, "job": job}
        line |= {} if job == "coordinator" else {"run": f"{job}1f3a9c2"}
        self.files[job, role, step, worker].append((at, msgspec.json.encode(line)))


class Cluster:
    """Who has which nodes: first come, first served. Says what the coordinator says, where there is more than one job."""

    def __init__(self, run: Run, lines: Lines) -> None:
        self.lines = lines
        self.free: dict[str, float] = defaultdict(float)
        self.asks: dict[str, tuple[float, list[str]]] = {}
        self.token, self.told = 4294967296, len(run.jobs) > 1

    def say(self, step: int, at: float, event: str, took: float | None = None, /, **extra) -> None:
        if self.told:
            self.lines.say("coordinator", "coordinator", 0, step, at, event, took, **extra)

    def waited_for(self, now: float) -> list[str]:
        return [node for at, nodes in self.asks.values() if at <= now for node in nodes]

    def grant(self, job: Any, phase: str, nodes: list[str], step: int, asked: float) -> int:
        self.token += 1
        self.say(step, job.at, "lease_wait", job.at - asked, job=job.name, phase=phase, nodes=nodes, token=self.token)
        return self.token

    def release(self, job: Any, phase: str, nodes: list[str], step: int, since: float) -> None:
        for node in nodes:
            self.free[node] = job.at
        self.lines.held[phase] += len(nodes) * (job.at - since)
        self.say(step, job.at, "lease_held", job.at - since, job=job.name, phase=phase, nodes=nodes, token=job.token)

    def step_report(self, job: Any, step: int, figures: dict) -> None:
        self.say(step, job.at, "step_report", job=job.name, **figures)
