"""Logs in our own layout, with known faults: agent loop workers that spread their requests over replicas on nodes."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

EPOCH = datetime(2025, 8, 11, 23, 0, 0)


@dataclass
class Job:
    """How a run is made; times in seconds.

    slower: replica, or (step, replica) -> factor on its time for a token. stalled: (step, replica, seconds after the step's
    start, seconds). starved: (step, replica): its KV cache is full, requests are thrown out. slots: requests that a replica
    runs at once; seats: that it may run by its job's keys, 0 where the log does not say. slow_tools, slow_rewards: steps in
    which calls take twenty times as long. turns: of a request, with a tool call between two. over: that part more requests
    are launched than a step takes, and the rest is cut off and goes on in the next step. segment: most tokens of one round.
    away: seconds between two steps in which other jobs have the nodes. validates: requests of a validation after each step's
    training.
    """

    seed: int = 0
    steps: int = 4
    replicas: int = 4
    nodes: int = 2
    workers: int = 8
    requests: int = 96
    slots: int = 10_000
    seats: int = 0
    turns: int = 1
    over: float = 0.0
    segment: int = 10_000
    away: float = 0.0
    validates: int = 0
    prepare: float = 0.01
    slower: dict[int | tuple[int, int], float] = field(default_factory=dict)
    stalled: tuple[int, int, float, float] | None = None
    starved: set[tuple[int, int]] = field(default_factory=set)
    slow_tools: set[int] = field(default_factory=set)
    slow_rewards: set[int] = field(default_factory=set)


@dataclass
class _Request:
    name: str
    worker: int
    lengths: list[int]
    began: float = 0.0
    turn: int = 0  # turns that are done
    left: int = 0  # tokens of the turn under way
    stays: int = 0
    parked: float = 0.0
    since: float = 0.0
    fresh: bool = True
    validate: bool = False


class Made:
    """One run of a made job."""

    def __init__(self, directory: Path, job: Job, run: str = "0a1b2c3d", name: str = "a", began: float = 0.0) -> None:
        self.job, self.rng = job, random.Random(job.seed)
        self._directory, self._name, self._run = directory / name / "events", name, run
        self._lines: dict[tuple[str, int, int], list[tuple[float, str]]] = defaultdict(list)
        self._versions = 0
        if job.seats:
            keys = [f"actor_rollout_ref.rollout.max_num_seqs={job.seats}"]
            self._log("trainer", 0, 0, began, "job_keys", None, keys=keys)
        at, waiting = began, []
        for step in range(1, job.steps + 1):
            at, waiting = self._step(step, at, waiting)
        self._write()

    def node(self, replica: int) -> str:
        return f"r{replica * self.job.nodes // self.job.replicas}"

    def _log(self, role: str, worker: int, step: int, end: float, event: str, seconds: float | None, **extra) -> None:
        line = {"timestamp": (EPOCH + timedelta(seconds=end)).isoformat(timespec="microseconds"), "event": event}
        if seconds is not None:
            line["duration_sec"] = round(seconds, 6)
        line |= {"extra": extra, "workid": worker, "step": step, "role": role, "job": self._name, "run": self._run}
        self._lines[role, worker, step].append((end, json.dumps(line)))

    def _write(self) -> None:
        for (role, worker, step), lines in self._lines.items():
            path = self._directory / role / f"step_{step}" / f"worker_{worker}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.writelines(text + "\n" for _, text in sorted(lines))

    def _step(self, step: int, began: float, waiting: list[_Request]) -> tuple[float, list[_Request]]:
        job = self.job
        wanted = int(job.requests * (1 + job.over))
        new = [
            _Request(f"{step:04x}{number:04x}_0", number % job.workers, [self._length() for _ in range(job.turns)])
            for number in range(wanted - len(waiting))
        ]
        running = waiting + new
        ends = self._generate(step, began, running)
        done = sorted(ends.values())
        cut = done[job.requests - 1] if job.over else done[-1]
        left = [request for request in running if ends.get(request.name, cut + 1) > cut]
        end = self._settle(step, cut, running, left)
        train = 8 + self.rng.random()
        self._log("trainer", 0, step, end + train, "update_actor", train - 1)
        self._log("trainer", 0, step, end + train, "step", end + train - began, reward=0.5)
        self._versions += 1
        end += train
        if job.validates:
            end = self._validate(step, end)
        return end + job.away, left

    def _validate(self, step: int, began: float) -> float:
        job, stalled = self.job, self.job.stalled
        names = [f"{step:04x}{number:04x}v_0" for number in range(job.validates)]
        requests = [_Request(name, n % job.workers, [self._length()], validate=True) for n, name in enumerate(names)]
        job.stalled = None
        end = self._settle(step, max(self._generate(step, began, requests).values()), requests, [])
        job.stalled = stalled
        return end

    def _length(self) -> int:
        return int(150 + 350 * self.rng.betavariate(3, 2))

    # A plan of each request's step is made first, as (event, times); what lies after the cut is then left out.
    def _generate(self, step: int, began: float, running: list[_Request]) -> dict[str, float]:
        job, self._plan = self.job, defaultdict(list)
        free = {replica: [began] * job.slots if job.slots < 1000 else None for replica in range(job.replicas)}
        ends = {}
        for number, request in enumerate(running):
            if request.fresh:
                request.began = request.since = began
                self._log("rollout", request.worker, step, began, "request_start", None, **self._who(request))
            elif request.since < began:
                self._log("rollout", request.worker, step, began, "request_requeued", None, **self._id(request), tokens=1)
                parked = began - request.since
                request.parked += parked
                extra = {**self._id(request), "turn": request.turn + 1, "reason": "cut off"}
                self._log("rollout", request.worker, step, began, "request_parked", parked, **extra)
            replica = (number + step) % job.replicas
            ends[request.name] = self._request(step, began, began, request, replica, free[replica])
        return ends

    def _request(self, step: int, began: float, at: float, request: _Request, replica: int, free: list[float] | None) -> float:
        job, turn, left = self.job, request.turn, request.left
        while turn < job.turns:
            if not left:
                prepared = at + job.prepare * self.rng.uniform(0.8, 1.2)
                self._plan[request.name].append(("prepare", at, prepared, turn, replica, 0, {}))
                at, left = prepared, request.lengths[turn]
            tokens = min(left, job.segment)
            at, told = self._stay(step, began, at, tokens, replica, free)
            left -= tokens
            self._plan[request.name].append(("stay", told["start"], at, turn, replica, tokens, told | {"left": left}))
            if left:
                at += 0.02
                continue
            turn += 1
            if turn < job.turns:
                tool = self.rng.uniform(0.2, 0.6) * (20 if step in job.slow_tools else 1)
                self._plan[request.name].append(("tool", at, at + tool, turn - 1, replica, 0, {}))
                at += tool
        reward = self.rng.uniform(0.01, 0.05) * (400 if step in job.slow_rewards else 1)
        self._plan[request.name].append(("reward", at, at + reward, turn - 1, replica, 0, {}))
        return at + reward + 0.001

    def _stay(self, step: int, began: float, at: float, tokens: int, replica: int, free: list[float] | None):
        job, start = self.job, at
        if free is not None:
            slot = free.index(min(free))
            at = max(at, free[slot])
        queue = at - start + 0.005
        prefill = 0.05
        slower = job.slower.get((step, replica), job.slower.get(replica, 1.0))
        work = tokens * 0.04 * self.rng.uniform(0.95, 1.05) * slower + prefill
        thrown = 2 if (step, replica) in job.starved and self.rng.random() < 0.5 else 0
        work += 4.0 * thrown
        queue += 4.0 * thrown / 2
        end = at + work
        if job.stalled and job.stalled[:2] == (step, replica):
            from_ = began + job.stalled[2]
            until = from_ + job.stalled[3]
            if at < until and end > from_:
                end += until - max(at, from_)
        if free is not None:
            free[slot] = end
        figures = {"queue_sec": queue, "prefill_sec": prefill, "decode_sec": end - start - queue - prefill}
        return end, figures | {"start": start, "retractions": thrown}

    def _settle(self, step: int, cut: float, running: list[_Request], left: list[_Request]) -> float:
        """Log what happened up to `cut`. Returns when the step's rollout ended."""
        behind = {request.name for request in left}
        last = cut
        spans = []
        for request in running:
            for what, start, end, turn, replica, tokens, told in self._plan[request.name]:
                if request.name in behind and start >= cut:
                    break
                stop = min(end, cut) if request.name in behind else end
                part = tokens if stop == end else int(tokens * (stop - start) / (end - start))
                self._log_part(step, request, what, start, stop, turn, replica, part, told, end != stop)
                if what == "stay":
                    spans.append((replica, start, stop, told["queue_sec"], part))
                last = max(last, stop)
                if end != stop and what == "stay":
                    request.left = told["left"] + tokens - part
                elif what == "stay":
                    request.left, request.turn = told["left"], turn + (told["left"] == 0)
                if end != stop:
                    break
            request.fresh = False
            if request.name in behind:
                request.since = cut
                extra = self._id(request) | {"reason": "cut off", "response_length": 1}
                self._log("rollout", request.worker, step, cut, "aborted_request_with_cancelled_error", None, **extra)
        self._counters(step, spans)
        return last

    def _log_part(self, step, request, what, start, end, turn, replica, tokens, told, cut) -> None:
        who = self._id(request) | {"turn": turn + 1}
        log = lambda event, **extra: self._log("rollout", request.worker, step, end, event, end - start, **who, **extra)  # noqa: E731
        if what == "prepare":
            log("turn_pre_process")
        elif what == "tool":
            log("tool_execution", tool="search")
        elif what == "reward":
            log("reward_calculation", score=0.5)
            log("finalization")
            extra = self._who(request) | {
                "finish_reason": "stop", "turns": turn + 1, "stays": request.stays, "response_length": sum(request.lengths),
                "parked_sec": request.parked, "score": 0.5,
            }  # fmt: skip
            name = "async_rollout_request_complete"
            self._log("rollout", request.worker, step, end + 0.001, name, end + 0.001 - request.began, **extra)
        else:
            request.stays += 1
            reason = "abort" if cut else "length" if told["left"] else "stop"
            where = {"replica": replica, "node": self.node(replica), "version": self._versions}
            both = {"stay": request.stays, "prompt_tokens": 90, "response_tokens": tokens, **where, "held_sec": 0.0}
            log("turn_engine_call", finish_reason=reason, queue_sec=told["queue_sec"], **both)
            figures = {} if cut else {key: told[key] for key in ("queue_sec", "prefill_sec", "decode_sec", "retractions")}
            extra = who | both | figures | {"finish": reason, "priority": 0, "cached_tokens": 0}
            self._log("server", replica, step, end - 0.001, "engine_generate", end - start - 0.002, **extra)
            let_in = min(start + told["queue_sec"], end)
            queued = who | {"stay": request.stays, "replica": replica, "node": self.node(replica), "priority": 0}
            self._log("server", replica, step, let_in, "engine_queue", let_in - start, **queued)

    def _counters(self, step: int, spans: list[tuple[int, float, float, float, int]]) -> None:
        for replica in range(self.job.replicas):
            mine = [span for span in spans if span[0] == replica]
            if not mine:
                continue
            at, stop = min(span[1] for span in mine) + 1, max(span[2] for span in mine)
            where = {"replica": replica, "node": self.node(replica)}
            stalled, starved = self.job.stalled, (step, replica) in self.job.starved
            from_ = min(span[1] for span in mine) + stalled[2] if stalled and stalled[:2] == (step, replica) else float("inf")
            while at < stop:
                if not from_ < at < from_ + (stalled[3] if stalled else 0.0):
                    inside = [span for span in mine if span[1] <= at < span[2]]
                    queued = sum(at < span[1] + span[3] for span in inside)
                    rate = sum(span[4] / (span[2] - span[1]) for span in inside)
                    counted = {"running": len(inside) - queued, "queued": queued + 5 * starved, "tokens_per_sec": rate}
                    extra = where | counted | {"token_usage": 0.98 if starved else 0.5, "retracted": 2 * starved}
                    self._log("server", replica, step, at, "engine_decode", 1.0, **extra, evicted_tokens=0)
                    if starved:
                        thrown = where | {"requests": 2, "token_usage": 0.99}
                        self._log("server", replica, step, at, "engine_retract", None, **thrown)
                at += 1.0

    def _id(self, request: _Request) -> dict:
        return {"request_id": request.name}

    def _who(self, request: _Request) -> dict:
        return self._id(request) | {"batch_data_id": request.name[:8], "session": 0, "validate": request.validate}


def make(directory: Path, **keys) -> Path:
    Made(directory, Job(**keys))
    return directory
