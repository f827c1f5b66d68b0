"""A run directory of two jobs that share one rollout and one training node, as the coordinator and the jobs would log it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from verl_mux.profiling.eventlog.log import EventLog

ORIGIN = datetime(2026, 1, 5, 9, 0, 0).timestamp()
NODES = {"rollout": ["r0"], "train": ["t0"]}


@dataclass
class Shared:
    """The nodes: until when each is taken, and by whom. Phases in the order in which they were granted."""

    free: dict[str, float] = field(default_factory=lambda: {"r0": 0.0, "t0": 0.0})
    held: list[tuple[str, str, float, float]] = field(default_factory=list)  # job, phase, start, end


class Job:
    """One job's logs and its phases; `now` is its own clock in seconds since ORIGIN."""

    def __init__(self, directory: Path, name: str, shared: Shared, coordinator: EventLog, seed: int) -> None:
        events = directory / name / "events"
        self.trainer = EventLog(events, role="trainer", job=name)
        self.rollout = EventLog(events, role="rollout", job=name)
        self.server = EventLog(events, role="server", job=name)
        self.name, self.shared, self.coordinator = name, shared, coordinator
        self.rng = random.Random(seed)
        self.now = 0.0
        self.step = 0

    def phase(self, phase: str, seconds: float) -> float:
        """Waits for the node, holds it for `seconds`; returns when it began."""
        (node,) = NODES[phase]
        asked, granted = self.now, max(self.now, self.shared.free[node])
        end = granted + seconds
        self.shared.free[node] = end
        self.shared.held.append((self.name, phase, granted, end))
        about = {"job": self.name, "phase": phase, "nodes": [node], "token": len(self.shared.held)}
        told = {key: about[key] for key in ("phase", "nodes", "token")}
        self._log(self.coordinator, "lease_wait", granted, granted - asked, about)
        self._log(self.coordinator, "lease_held", end, seconds, about)
        self._log(self.trainer, "lease_wait", granted, granted - asked, told)
        self._log(self.trainer, "phase", end, seconds, told)
        self.now = end
        return granted

    def one_step(self, requests: int = 32) -> None:
        self.step += 1
        began = self.now
        spread = [self.rng.uniform(0.5, 1.0) for _ in range(requests)]
        generate = 4.0 * max(spread)
        start = self.phase("rollout", generate + 0.4)
        self._log(self.server, "wake", start + 0.05, 0.05, self._moved("weights", 40_000_000, "rollout"))
        self._log(self.trainer, "sync", start + 0.25, 0.2, {"bytes": 40_000_000, "version": self.step - 1})
        self._log(self.server, "wake", start + 0.3, 0.05, self._moved("kv_cache", 25_000_000, "rollout"))
        for number, part in enumerate(spread):
            self._request(start + 0.3, 4.0 * part, f"{self.name}-{self.step}-{number}")
        self._log(self.trainer, "generate", start + 0.3 + generate, generate, None)
        self._log(self.server, "sleep", start + 0.4 + generate, 0.1, self._moved("weights", 40_000_000, "rollout"))
        train = 3.4 * self.rng.uniform(0.95, 1.05)
        start = self.phase("train", train)
        self._log(self.trainer, "wake", start + 0.1, 0.1, self._moved("optimizer", 80_000_000, "train"))
        self._log(self.trainer, "old_log_prob", start + 0.4 * train, 0.4 * train - 0.1, None)
        self._log(self.trainer, "update_actor", start + train - 0.1, 0.6 * train - 0.1, None)
        self._log(self.trainer, "sleep", start + train, 0.1, self._moved("optimizer", 80_000_000, "train"))
        self._log(self.coordinator, "memory", self.now, None, {"job": self.name, "node": "t0", "node_bytes": 80_000_000})
        self._log(self.trainer, "step", self.now, self.now - began, {"reward": 0.1 * self.step, "response_length": 96.0})

    def _request(self, start: float, seconds: float, name: str) -> None:
        about, tokens = {"request_id": name}, int(seconds * 60)
        self._log(self.rollout, "request_start", start, None, about)
        self._log(self.rollout, "turn_engine_call", start + seconds, seconds, about | {"turn": 1, "response_tokens": tokens})
        done = about | {"turns": 1, "response_length": tokens, "finish_reason": "completed"}
        self._log(self.rollout, "async_rollout_request_complete", start + seconds + 0.01, seconds + 0.01, done)

    def _moved(self, tag: str, nbytes: int, side: str) -> dict:
        return {"tag": tag, "bytes": nbytes, "node": NODES[side][0], "side": side}

    def _log(self, log: EventLog, event: str, end: float, seconds: float | None, extra: dict | None) -> None:
        log.log(event, seconds, extra, step=self.step, timestamp=ORIGIN + end)


def make_mux_run(directory: Path, alone: int = 4, together: int = 12, seed: int = 0) -> Shared:
    """`alone` steps of each job, one job after the other, then `together` steps of each in turns. Returns what was held."""
    shared = Shared()
    coordinator = EventLog(directory / "coordinator" / "events", role="coordinator", job="coordinator")
    jobs = [Job(directory, name, shared, coordinator, seed + n) for n, name in enumerate(("fibonacci", "products"))]
    for job in jobs:
        job.now = max(shared.free.values())
        for _ in range(alone):
            job.one_step()
    begin = max(shared.free.values()) + 0.5
    coordinator.log("segment", extra={"index": 1, "mode": "interleaved"}, timestamp=ORIGIN + begin - 0.01)
    for job in jobs:
        job.now = begin
    for _ in range(together):
        for job in sorted(jobs, key=lambda job: job.now):
            job.one_step()
    for log in (coordinator, *(log for job in jobs for log in (job.trainer, job.rollout, job.server))):
        log.close()
    return shared
