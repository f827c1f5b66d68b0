"""Logs made to order, with known answers, in the plain layout: DIR/step_<N>/worker_<R>.jsonl."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from verl_mux.profiling.plain.lines import find_log_files
from verl_mux.profiling.report.input.run_log import RunLog, read_files

EPOCH = datetime(2025, 8, 11, 23, 0, 0)
SEED_LINES = [
    '{"timestamp": "2025-08-11T23:19:45.001830", "event": "aborted_request_with_cancelled_error_padding", '
    '"duration_sec": 0.002585887908935547, "extra": {"request_id": "661a96a0-35e6-4662-9fff-bf9194bd3d49"}, '
    '"workid": 2, "step": 4}',
    '{"timestamp": "2025-08-11T23:19:45.001989", "event": "aborted_request_with_cancelled_error", '
    '"duration_sec": 84.5104877948761, "extra": {"request_id": "45bb6a77-b6b2-4ed5-afde-97ccf622cdb0"}, '
    '"workid": 2, "step": 4}',
    '{"timestamp": "2025-08-11T23:19:45.004511", "event": "aborted_request_with_cancelled_error_padding", '
    '"duration_sec": 0.0025205612182617188, "extra": {"request_id": "45bb6a77-b6b2-4ed5-afde-97ccf622cdb0"}, '
    '"workid": 2, "step": 4}',
    '{"timestamp": "2025-08-11T23:19:45.005685", "event": "async_rollout_with_monitoring_duration", '
    '"duration_sec": 84.51417350769043, "extra": {"total_requests": 1024, "target_completion": 921, '
    '"completed_count": 921}, "workid": 2, "step": 4}',
]
# The seed's table, in percent of the step.
SEED_SHARES = {
    "async_generate_duration": 74.05,
    "preprocessing_duration": 18.57,
    "barrier_wait_duration": 6.39,
    "broadcast_duration": 0.52,
    "data_extraction_duration": 0.35,
    "cache_flush_duration": 0.08,
    "padding_duration": 0.04,
}


@dataclass
class Lines:
    """The lines of one worker's step."""

    worker: int
    step: int
    rows: list[tuple[float, str]] = field(default_factory=list)

    def add(self, end: float, event: str, seconds: float | None = None, extra: dict | None = None, **keys) -> None:
        line = {"timestamp": (EPOCH + timedelta(seconds=end)).isoformat(), "event": event}
        if seconds is not None:
            line["duration_sec"] = seconds
        if extra is not None:
            line["extra"] = extra
        self.rows.append((end, json.dumps(line | {"workid": self.worker, "step": self.step} | keys)))

    def write(self, directory: Path, order: bool = True) -> Path:
        path = Path(directory) / f"step_{self.step}" / f"worker_{self.worker}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = sorted(self.rows, key=lambda row: row[0]) if order else self.rows
        path.write_text("".join(line + "\n" for _, line in rows))
        return path


@dataclass
class Made:
    """How a run is made. Lengths in tokens, times in seconds.

    lengths: draws a turn's tokens. stalls: (step, worker) -> (seconds after the step's start, length): the engine stands
    still. slow_rewards, slow_turns: (step, worker, request number) -> seconds more; the slow turn is the second.
    slower: (step, worker) -> factor on the engine's time.
    """

    seed: int = 0
    steps: int = 3
    workers: int = 4
    requests: int = 64
    two_turns: float = 0.4
    lengths: Callable[[random.Random], float] = lambda rng: 150 + 350 * rng.betavariate(3, 2)
    seconds_per_token: float = 0.04
    preprocess: float = 0.5
    parts: bool = True
    tokens: bool = True
    first_step: int = 1
    stalls: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    slow_rewards: dict[tuple[int, int, int], float] = field(default_factory=dict)
    slow_turns: dict[tuple[int, int, int], float] = field(default_factory=dict)
    slower: dict[tuple[int, int], float] = field(default_factory=dict)


def make_run(directory: Path, made: Made) -> Path:
    rng = random.Random(made.seed)
    began = 0.0
    for step in range(made.first_step, made.first_step + made.steps):
        logs, ends = [], []
        for worker in range(made.workers):
            lines = Lines(worker, step)
            ends.append(_generate(lines, made, rng, began))
            logs.append(lines)
        last = max(ends)
        for lines, end in zip(logs, ends, strict=True):
            lines.add(end + 0.001, "sorting_duration", 0.001)
            lines.add(last + 0.01, "barrier_wait_duration", last + 0.01 - end - 0.001)
            lines.add(last + 0.2, "broadcast_duration", 0.19)
            lines.add(last + 0.3, "total_step_duration", last + 0.3 - began)
            lines.write(directory)
        began = last + 20 + rng.random()
    return Path(directory)


def _generate(lines: Lines, made: Made, rng: random.Random, began: float) -> float:
    preprocess = made.preprocess * rng.uniform(0.9, 1.1)
    start = began + preprocess
    lines.add(start, "preprocessing_duration", preprocess)
    ends = [_request(lines, made, rng, began, start, number) for number in range(made.requests)]
    lines.add(max(ends), "async_generate_duration", max(ends) - start)
    return max(ends)


def _request(lines: Lines, made: Made, rng: random.Random, began: float, start: float, number: int) -> float:
    where, place = (lines.step, lines.worker), (lines.step, lines.worker, number)
    name = f"{lines.step}-{lines.worker}-{number}"
    about = {"request_id": name}
    turns = 2 if place in made.slow_turns or rng.random() < made.two_turns else 1
    at, tokens, engine = start + 0.002 * rng.random(), 0, []
    first = at
    if made.parts:
        lines.add(at, "request_start", extra=about | {"initial_prompt_length": 100})
    for turn in range(turns):
        length = int(made.lengths(rng) / turns)
        work = length * made.seconds_per_token * rng.uniform(0.9, 1.1) * made.slower.get(where, 1.0)
        work += made.slow_turns.get(place, 0.0) if turn == 1 else 0.0
        end = _run(at, work, made.stalls.get(where), began)
        tokens += length
        engine.append(end - at)
        if made.parts:
            told = about | {"turn": turn} | ({"generated_tokens": length} if made.tokens else {})
            lines.add(at + 1e-4, "turn_pre_process", 1e-4, about | {"turn": turn})
            lines.add(end + 1e-4, "turn_engine_call", end - at, told)
            lines.add(end + 3e-4, "turn_post_process", 2e-4, about | {"turn": turn})
            lines.add(end + 3e-4, "turn_end", end + 3e-4 - at, about | {"turn": turn})
        at = end + 3e-4
    reward = rng.uniform(0.002, 0.02) + made.slow_rewards.get(place, 0.0)
    at += reward
    if made.parts:
        lines.add(at, "reward_calculation", reward, about)
        lines.add(at + 1e-3, "finalization", 1e-3, about)
    done = about | {"batch_data_id": number // 4, "turns": turns, "finish_reason": "stop"}
    done |= {"response_length": tokens} if made.tokens else {}
    lines.add(at + 1e-3, "async_rollout_request_complete", at + 1e-3 - first, done)
    return at + 1e-3


def _run(at: float, work: float, stall: tuple[float, float] | None, began: float) -> float:
    """When `work` seconds of the engine are done that stands still in `stall`."""
    if stall is None:
        return at + work
    from_, length = began + stall[0], stall[1]
    if at >= from_ + length or at + work <= from_:
        return at + work
    return max(at, from_) + length + (work - max(0.0, from_ - at))


def make_shares(directory: Path, steps: int = 5, workers: int = 4, shares: dict[str, float] | None = None) -> Path:
    """Steps of different length whose events have exactly these shares, in percent."""
    shares = shares or SEED_SHARES
    at = 0.0
    for step in range(1, steps + 1):
        whole = 80.0 + 13 * step
        for worker in range(workers):
            lines, now = Lines(worker, step), at
            for event, percent in shares.items():
                now += whole * percent / 100
                lines.add(now, event, whole * percent / 100)
            lines.add(now, "total_step_duration", whole)
            lines.write(directory)
        at += whole + 30
    return Path(directory)


def read_run(directory: Path, processes: int = 1) -> RunLog:
    return read_files(directory, find_log_files(directory), processes)
