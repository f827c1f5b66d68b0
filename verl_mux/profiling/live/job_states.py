"""What the growing lines of a run's event logs add up to now: jobs, replicas and their requests.

`State` reads the lines of each job's newest steps and counts them. A phase is logged when it ends, and a wait when it is over: a
job holds its lease from the end of the wait to the end of the phase. Runs in `verl-mux top`; called by top_command.py; reads
files only.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from verl_mux.errors import UserError
from verl_mux.profiling.eventlog import events
from verl_mux.profiling.plain.lines import ROLES, Line, LogFile, find_step_files, parse

QUEUED, RUNNING, IN_REWARD, PARKED, GIVEN_UP = "queued", "running", "in reward", "parked", "given up"
IN_TOOL_OR_REWARD, SCORED, DONE = "in tool or reward", "scored", "done"
STATES = (RUNNING, QUEUED, IN_TOOL_OR_REWARD, IN_REWARD, SCORED, PARKED, GIVEN_UP, DONE)

_AFTER = {
    events.REQUEST_START: QUEUED,
    events.REQUEST_REQUEUED: QUEUED,
    events.REQUEST_PARKED: QUEUED,
    events.REQUEST_MIGRATED: QUEUED,
    events.TURN_PREPROCESS: QUEUED,
    events.TOOL_EXECUTION: QUEUED,
    events.ENGINE_QUEUE: RUNNING,
    events.REWARD: SCORED,
    events.REQUEST_COMPLETE: DONE,
    events.REQUEST_PADDED: GIVEN_UP,
}


@dataclass
class Request:
    """at: the end of the line that said so, seconds since the epoch. replica: the last one that it was seen on."""

    state: str
    at: float
    replica: int | None = None


class Requests:
    """feed(line) of the newest step, from agent loops and engines in any order -> states."""

    def __init__(self) -> None:
        self._known: dict[str, Request] = {}
        self._validating: set[str] = set()
        self._has_tools: bool | None = None  # None: until a request is over

    def next_step(self) -> None:
        """What was cut off goes on; all the rest of the step before is over."""
        self._known = {name: request for name, request in self._known.items() if request.state == PARKED}
        self._validating = set()

    def feed(self, line: Line) -> None:
        name = line.extra.get("request_id")
        if not isinstance(name, str):
            return
        if line.event == events.REQUEST_START and line.extra.get("validate"):
            self._validating.add(name)
            self._known.pop(name, None)  # an engine's line may have come before
        state = self._after(line)
        if state is None or name in self._validating:
            return
        request = self._known.setdefault(name, Request(state, line.end))
        if isinstance(replica := line.extra.get("replica"), int):
            request.replica = replica
        if line.end >= request.at:  # a line of another file may come late
            request.state, request.at = state, line.end

    def count(self, replica: int | None = None) -> dict[str, int]:
        """By state, in the order of STATES; of a replica, those that were last seen on it."""
        found = Counter(one.state for one in self._known.values() if replica is None or one.replica == replica)
        return {state: found[state] for state in STATES if found[state]}

    def _after(self, line: Line) -> str | None:
        if line.event == events.TOOL_EXECUTION:
            self._has_tools = True
        elif line.event == events.REQUEST_COMPLETE:
            self._has_tools = bool(self._has_tools)
        if line.event == events.TURN_ENGINE_CALL:
            if line.extra.get("finish_reason") == "abort":
                return PARKED
            return IN_REWARD if self._has_tools is False else IN_TOOL_OR_REWARD
        if line.event == events.REQUEST_ABORTED:
            return PARKED if line.extra.get("reason") == "cut off" else GIVEN_UP
        return _AFTER.get(line.event)


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
    doing: str = ""
    nodes_of: dict[str, tuple[str, ...]] = field(default_factory=dict)
    requests: Requests = field(default_factory=Requests)  # of the newest step
    figures: dict[str, float | None] = field(default_factory=dict)
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


STEPS = 2  # the newest ones of each job are read: what began in a step may be logged in the next
MOST_BYTES = 64 * 2**20  # at once, so that a first look at a large log comes soon
_STEP = re.compile(r"step_(\d{1,9})")


class State:
    """look() again and again -> jobs, replicas. now: the end of the newest line, seconds since the epoch.

    A job that is started again begins anew, at whatever step it goes on from. Raises UserError for a directory that is none.
    """

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            fault = "is a file" if directory.exists() else "does not exist"
            raise UserError(f"{directory} {fault}: give the directory of a run, or of a job's events")
        self.jobs: dict[str, Job] = {}
        self.replicas: dict[tuple[str, int], Replica] = {}
        self.now = 0.0
        self.directory = directory
        self._read: dict[str, int] = {}  # bytes of each file
        self._starts: dict[str, tuple[str | None, float]] = {}  # the `run` of each job, and the end of its newest line

    def look(self) -> None:
        """Take what was added since the last look, in order of time as far as one look at all files shows."""
        # A job's `events`, in a run directory those of all jobs and of the coordinator.
        folders = [self.directory]
        if not _steps_in(self.directory):
            folders = sorted(folder for folder in self.directory.glob("*/events") if folder.is_dir())
        lines = [line for folder in folders for file in _newest_files(folder) for line in self._new_lines(file)]
        for line in sorted(lines, key=lambda line: line.end):
            self._take(line)
        ended = {folder.parent.name for folder in folders if (folder.parent / "exit_code").exists()}  # the launcher's word
        for job in self.jobs.values():
            job.ended = job.name in ended
            if job.ended:
                job.phase, job.asks, job.nodes = None, None, ()

    def waits_behind(self, job: Job) -> list[str]:
        """Jobs that hold a node of those that it asks for."""
        wanted = set(job.nodes_of.get(job.asks or "", ()))
        return sorted(other.name for other in self.jobs.values() if other.phase and wanted & set(other.nodes))

    def _new_lines(self, file: LogFile) -> Iterator[Line]:
        """A torn last line is left until it is whole."""
        start = self._read.get(file.path, max(0, file.size - MOST_BYTES))
        if file.size < start:  # it was rotated: a new one has its name
            start = 0
        try:
            with open(file.path, "rb") as raws:
                raws.seek(start)
                data = raws.read(MOST_BYTES)
        except OSError:
            return
        whole = data.rfind(b"\n") + 1
        self._read[file.path] = start + whole
        for raw in data[:whole].splitlines():
            if (line := parse(raw, file)) is not None:
                yield line

    def _take(self, line: Line) -> None:
        self.now = max(self.now, line.end)
        if not self._is_of_newest_start(line):
            return
        if line.role == "trainer":
            self._trainer(self._job(line), line)
        elif line.role == "rollout":
            self._request(line)
        elif line.role == "server":
            self._server(line)

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
            job.figures = {"reward": line.number("reward"), "step_sec": line.seconds}
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
            replica.at, replica.counters = line.end, {key: line.number(key) for key in COUNTERS}
            replica.retracted += int(line.number("retracted") or 0)
        elif line.event == events.ENGINE_QUEUE:
            self._request(line)
        elif line.event == events.ENGINE_GENERATE:
            replica.tokens += int(line.number("response_tokens") or 0)
            replica.done += line.extra.get("finish") != "abort"


COUNTERS = ("running", "queued", "token_usage", "tokens_per_sec")


def _newest_files(events: Path) -> Iterator[LogFile]:
    written = _steps_in(events)
    # A job that was started again goes on from an earlier step, in the folders that it filled before.
    lately = sorted(written, key=lambda step: (written[step], step))[-STEPS:]
    job = events.parent.name if events.name == "events" else ""
    for step in sorted({*sorted(written)[-STEPS:], *lately}):
        yield from (replace(file, job=file.job or job) for file in find_step_files(events, step))


def _steps_in(events: Path) -> dict[int, float]:
    """Of any role, or of the plain layout, which has no roles: when the first worker of any role last wrote there, in seconds
    since the epoch. One file a step is looked at: a long run has thousands of steps."""
    found: dict[int, float] = {}
    for path in (path for folder in (events, *(events / role for role in ROLES)) for path in folder.glob("step_*")):
        if step := _STEP.fullmatch(path.name):
            at = 0.0
            with contextlib.suppress(OSError):
                at = (path / "worker_0.jsonl").stat().st_mtime
            found[int(step[1])] = max(at, found.get(int(step[1]), 0.0))
    return found
