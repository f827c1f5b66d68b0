"""A run's event log written by hand, with round times, so that every figure can be worked out on paper."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path

ORIGIN = datetime(2026, 1, 5, 9, 0, 0)


class MadeRun:
    """Writes `<directory>/<job>/events/<role>/step_<N>/worker_<W>.jsonl`. Times in seconds since ORIGIN."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def event(self, job: str, name: str, step: int, start: float, end: float, /, role: str = "trainer", worker: int = 0, **extra):
        line = {"timestamp": (ORIGIN + timedelta(seconds=end)).isoformat(), "event": name, "duration_sec": end - start}
        line |= {"workid": worker, "step": step, **({"extra": extra} if extra else {})}
        self.raw(job, role, step, worker, json.dumps(line))

    def raw(self, job: str, role: str, step: int, worker: int, line: str) -> None:
        path = self.directory / job / "events" / role / f"step_{step}" / f"worker_{worker}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(line + "\n")

    def phase(self, job: str, phase: str, step: int, start: float, end: float, *nodes: str) -> None:
        self.event(job, "phase", step, start, end, phase=phase, nodes=list(nodes), token=1)

    def wait(self, job: str, phase: str, step: int, start: float, end: float, *nodes: str) -> None:
        self.event(job, "lease_wait", step, start, end, phase=phase, nodes=list(nodes), token=1)

    def steps(self, job: str, ends: list[float], tokens: int = 0, rewards: list[float | None] | None = None) -> None:
        for step, end in enumerate(ends, start=1):
            reward = rewards[step - 1] if rewards else 0.0
            self.event(job, "step", step, end - 1, end, reward=reward, tokens=tokens)

    def start(self, job: str, at: float) -> None:
        """It came to the coordinator."""
        self.coordinator(at, "job_registered", job=job)

    def coordinator(self, at: float, name: str, seconds: float = 0.0, /, **extra) -> None:
        self.event("coordinator", name, 0, at - seconds, at, role="coordinator", **extra)
