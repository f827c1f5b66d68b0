"""What the lines of a run's logs add up to now. Lines in, rows out; pure.

A phase is logged when it ends, and a wait when it is over: a job holds its lease from the end of the wait to the end of the
phase, and waits from what it logs when it asks. Requests are counted for their job's newest step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from verl_mux.profiling.eventlog import events
from verl_mux.profiling.live.requests import Requests
from verl_mux.profiling.plain.lines import Line

# What a job asks for next, by the last thing it logged.
_ASKS_AFTER = {events.SAMPLE_READY: "train", events.STEP: "rollout"}


@dataclass
class Job:
    """step: the newest. phase, nodes, since: what it holds a lease for. asks, asked: what it waits for. doing: the last part."""

    name: str
    step: int = 0
    phase: str | None = None
    nodes: tuple[str, ...] = ()
    since: float = 0.0
    asks: str | None = None
    asked: float = 0.0
    last: float = 0.0
    doing: str = ""
    nodes_of: dict[str, tuple[str, ...]] = field(default_factory=dict)
    requests: Requests = field(default_factory=Requests)  # of the newest step
    figures: dict[str, float] = field(default_factory=dict)
    ended: bool = False


@dataclass
class Replica:
    """An engine, by its newest counters; tokens, done: of stays that ended in its newest step."""

    job: str
    number: int
    node: str = ""
    step: int = 0
    at: float = 0.0
    counters: dict[str, float | None] = field(default_factory=dict)
    tokens: int = 0
    done: int = 0
    retracted: int = 0


class State:
    """feed(line) -> jobs, replicas. now: the end of the newest line, seconds since the epoch.

    A job that is started again begins anew, at whatever step it goes on from.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.replicas: dict[tuple[str, int], Replica] = {}
        self.now = 0.0
        self._starts: dict[str, tuple[str | None, float]] = {}  # the `run` of each job, and the end of its newest line

    def feed(self, line: Line) -> None:
        self.now = max(self.now, line.end)
        if not self._is_of_newest_start(line):
            return
        if line.role == "trainer":
            self._trainer(self._job(line), line)
        elif line.role == "rollout":
            self._request(line)
        elif line.role == "server":
            self._server(line)

    def waits_behind(self, job: Job) -> list[str]:
        """Jobs that hold a node of those that it asks for."""
        wanted = set(job.nodes_of.get(job.asks or "", ()))
        return sorted(other.name for other in self.jobs.values() if other.phase and wanted & set(other.nodes))

    def end(self, jobs: set[str]) -> None:
        """These run no more, and all others do."""
        for job in self.jobs.values():
            job.ended = job.name in jobs
            if job.ended:
                job.phase, job.asks, job.nodes = None, None, ()

    def _is_of_newest_start(self, line: Line) -> bool:
        run, newest = self._starts.get(line.job, (None, -math.inf))
        if line.run is not None and line.run != run:
            if line.end < newest:
                return False
            self.jobs.pop(line.job, None)
            self.replicas = {key: replica for key, replica in self.replicas.items() if replica.job != line.job}
            run = line.run
        self._starts[line.job] = run, max(newest, line.end)
        return True

    def _job(self, line: Line) -> Job:
        job = self.jobs.setdefault(line.job, Job(line.job))
        job.last = max(job.last, line.end)
        if line.step > job.step:
            job.step = line.step
            job.requests.next_step()
        return job

    def _trainer(self, job: Job, line: Line) -> None:
        phase = str(line.extra.get("phase"))
        nodes = tuple(line.extra.get("nodes") or ())
        if line.event == events.LEASE_WAIT:
            job.phase, job.nodes, job.since, job.asks = phase, nodes, line.end, None
            job.nodes_of[phase] = nodes
        elif line.event == events.PHASE:
            left = tuple(node for node in job.nodes if node not in nodes)
            job.phase, job.nodes = (job.phase, left) if left else (None, ())
        elif line.event in _ASKS_AFTER:
            job.asks, job.asked = (_ASKS_AFTER[line.event], line.end) if job.nodes_of else (None, 0.0)
        if line.event == events.STEP:
            told = {key: line.extra.get(key) for key in ("reward", "response_length", "tokens")}
            job.figures = {key: float(value) for key, value in told.items() if isinstance(value, (int, float))}
            job.figures["step_sec"] = line.seconds
        if line.event not in (events.LOG_OPEN, events.LOG_COST):
            job.doing = line.event

    def _request(self, line: Line) -> None:
        job = self._job(line)
        if line.step == job.step:
            job.requests.feed(line)

    def _server(self, line: Line) -> None:
        number = line.extra.get("replica")
        key = line.job, number if isinstance(number, int) else line.workid
        replica = self.replicas.setdefault(key, Replica(*key))
        if line.step > replica.step:
            replica.step, replica.tokens, replica.done, replica.retracted = line.step, 0, 0, 0
        replica.node = str(line.extra.get("node") or replica.node)
        if line.event == events.ENGINE_DECODE:
            replica.at, replica.counters = line.end, {key: _number(line.extra.get(key)) for key in COUNTERS}
            replica.retracted += int(_number(line.extra.get("retracted")) or 0)
        elif line.event == events.ENGINE_QUEUE:
            self._request(line)
        elif line.event == events.ENGINE_GENERATE:
            replica.tokens += int(_number(line.extra.get("response_tokens")) or 0)
            replica.done += line.extra.get("finish") != "abort"


COUNTERS = ("running", "queued", "token_usage", "tokens_per_sec")


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None
