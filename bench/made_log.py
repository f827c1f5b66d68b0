"""Event logs of made runs, large and healthy, for timing what reads them: in our own layout, and in that of the
sglang multi-turn profiling scripts. Runs in the process of report.py or of a test; writes the log."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from verl_mux.errors import UserError

EPOCH = datetime(2025, 8, 11)
STEP_S = 100.0
TOKENS_PER_SEC = 40.0


@dataclass(frozen=True)
class Layout:
    """workers: agent loop workers; requests: of a worker and step; replicas: 0 where the log knows none."""

    workers: int
    requests: int
    replicas: int = 0
    on_node: int = 8


LAYOUTS = {"ours": Layout(workers=8, requests=128, replicas=64), "sglang": Layout(workers=8, requests=512)}


def make_log(directory: Path, events: int, layout: str = "ours") -> tuple[int, int]:
    """Steps of requests of one to three turns until there are `events`; returns events and bytes. Raises UserError."""
    rng, of = random.Random(0), LAYOUTS[layout]
    lines = nbytes = step = 0
    while lines < events:
        step += 1
        files = our_step(rng, of, step) if layout == "ours" else _sglang_step(rng, of, step)
        for path, text in files:
            count, size = _write(directory / path, text)
            lines, nbytes = lines + count, nbytes + size
            if layout == "sglang" and lines >= events:
                break
    return lines, nbytes


def _write(path: Path, text: list[str]) -> tuple[int, int]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return len(text), path.write_bytes("".join(text).encode())
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; name another --dir") from None


# ---- the sglang scripts': a worker is an engine, a turn is a call


def _sglang_step(rng: random.Random, of: Layout, step: int) -> Iterator[tuple[Path, list[str]]]:
    for worker in range(of.workers):
        logged = list(_sglang_worker(rng, of, STEP_S * step))
        tail = f'"workid": {worker}, "step": {step}'
        yield Path(f"step_{step}/worker_{worker}.jsonl"), [_line(*event, tail) for event in logged]


Event = tuple[float, str, "float | None", str]  # when it ended, its name, its seconds, what `extra` holds


def _sglang_worker(rng: random.Random, of: Layout, start: float) -> Iterator[Event]:
    yield start + 0.5, "preprocessing_duration", 0.5, ""
    last = start
    for number in range(of.requests):
        request = list(_sglang_request(f"{rng.getrandbits(128):032x}-{number}", rng, start + 0.5))
        last = max(last, request[-1][0])
        yield from request
    yield last, "async_generate_duration", last - start - 0.5, ""
    yield last + 0.1, "total_step_duration", last + 0.1 - start, ""


def _turns(rng: random.Random) -> int:
    return 1 + (rng.random() < 0.5) + (rng.random() < 0.2)


def _sglang_request(name: str, rng: random.Random, start: float) -> Iterator[Event]:
    at, turns = start, _turns(rng)
    yield at, "request_start", None, f'"request_id": "{name}", "prompt_tokens": 128'
    for turn in range(turns):
        about = f'"request_id": "{name}", "turn": {turn}'
        seconds = rng.uniform(5.0, 25.0)
        yield at + 0.01, "turn_pre_process", 0.01, about
        at += 0.01 + seconds
        yield at, "turn_engine_call", seconds, f'{about}, "generated_tokens": {int(TOKENS_PER_SEC * seconds)}'
        yield at + 0.002, "turn_post_process", 0.002, about
        yield at + 0.002, "turn_end", seconds + 0.012, about
    at += 0.01
    yield at, "reward_calculation", 0.008, f'"request_id": "{name}", "score": 1.0'
    length = int(TOKENS_PER_SEC * (at - 0.01 - start))
    done = f'"request_id": "{name}", "turns": {turns}, "finish_reason": "stop", "response_length": {length}'
    yield at, "async_rollout_request_complete", at - start, done


# ---- our own: requests of agent loop workers, their stays in replicas, the replicas' counters, the trainer


def our_step(rng: random.Random, of: Layout, step: int) -> Iterator[tuple[Path, list[str]]]:
    """The files of a step and their lines, each in the order in which its events ended, as a log's files are."""
    start = STEP_S * step
    servers: list[list[Event]] = [[] for _ in range(of.replicas)]
    last = start
    for worker in range(of.workers):
        logged: list[Event] = []
        for number in range(of.requests):
            replica = (worker * of.requests + number + step) % of.replicas
            logged += _our_request(
                f"{rng.getrandbits(128):032x}_{number % 8}", rng, start + 0.5, step, replica, of, servers[replica]
            )
        last = max(last, *(event[0] for event in logged))
        yield _of_role("rollout", step, worker, logged)
    for replica, logged in enumerate(servers):
        yield _of_role("server", step, replica, logged + list(_counters(replica, of, start + 0.5, logged)))
    yield _of_role("trainer", step, 0, list(_trainer(start, last)))


def _of_role(role: str, step: int, worker: int, logged: list[Event]) -> tuple[Path, list[str]]:
    tail = f'"workid": {worker}, "step": {step}, "role": "{role}", "job": "big", "run": "1f3a9c20"'
    return Path(f"big/events/{role}/step_{step}/worker_{worker}.jsonl"), [_line(*event, tail) for event in sorted(logged)]


def _our_request(
    name: str, rng: random.Random, start: float, step: int, replica: int, of: Layout, server: list[Event]
) -> Iterator[Event]:
    at, turns, tokens = start, _turns(rng), 0
    own = f'"request_id": "{name}"'
    who = f'{own}, "batch_data_id": "{step}", "session": 0, "validate": false'
    yield at, "request_start", None, who
    for turn in range(1, turns + 1):
        seconds, queue = rng.uniform(5.0, 25.0), rng.uniform(0.002, 0.05)
        generated = int(TOKENS_PER_SEC * seconds)
        place = f'{own}, "turn": {turn}, "stay": {turn}, "replica": {replica}, "node": "r{replica // of.on_node}"'
        both = f'{place}, "prompt_tokens": {128 + tokens}, "response_tokens": {generated}, "version": {step - 1}'
        both += f', "queue_sec": {queue:.6f}, "held_sec": 0.0'
        yield at + 0.01, "turn_pre_process", 0.01, f'{own}, "turn": {turn}'
        at += 0.01 + queue + seconds
        tokens += generated
        yield at, "turn_engine_call", queue + seconds, f'{both}, "finish_reason": "stop"'
        server.append((at - seconds, "engine_queue", queue, f'{place}, "priority": null'))
        figures = f'"finish": "stop", "priority": 0, "prefill_sec": 0.05, "decode_sec": {seconds - 0.05:.6f}, "retractions": 0'
        server.append((at - 0.001, "engine_generate", queue + seconds - 0.001, f'{both}, {figures}, "cached_tokens": 0'))
        if turn < turns:
            tool = rng.uniform(0.2, 0.6)
            at += tool
            yield at, "tool_execution", tool, f'{own}, "turn": {turn}, "tool": "search"'
    at += 0.01
    yield at, "reward_calculation", 0.008, f'{own}, "score": 1.0'
    yield at, "finalization", 0.009, own
    done = f'{who}, "turns": {turns}, "stays": {turns}, "finish_reason": "stop", "response_length": {tokens}, "score": 1.0'
    yield at, "async_rollout_request_complete", at - start, f'{done}, "parked_sec": 0.0'


def _counters(replica: int, of: Layout, start: float, logged: list[Event]) -> Iterator[Event]:
    """One a second while a request is in the engine."""
    stays = [(end - seconds, end) for end, event, seconds, _ in logged if event == "engine_generate" and seconds is not None]
    for second in range(1, int(max((end for _, end in stays), default=start) - start) + 1):
        running = sum(begin <= start + second < end for begin, end in stays)
        where = f'"replica": {replica}, "node": "r{replica // of.on_node}"'
        rate = f'"tokens_per_sec": {TOKENS_PER_SEC * running:.1f}, "prefill_tokens_per_sec": 12.0'
        counted = f'"running": {running}, "queued": 0, "token_usage": {0.02 * running:.4f}, "retracted": 0, "evicted_tokens": 0'
        if running:
            yield start + second, "engine_decode", 1.0, f"{where}, {rate}, {counted}"


def _trainer(start: float, last: float) -> Iterator[Event]:
    yield start + 0.4, "sync", 0.4, '"version": 1, "bytes": 15000000000.0'
    yield last, "generate", last - start - 0.4, ""
    yield last + 4.0, "old_log_prob", 4.0, ""
    yield last + 16.0, "update_actor", 12.0, ""
    yield last + 16.1, "step", last + 16.1 - start, '"reward": 0.5, "response_length": 700.0, "tokens": 700000'


def _line(end: float, event: str, seconds: float | None, extra: str, tail: str) -> str:
    stamp = (EPOCH + timedelta(seconds=end)).isoformat(timespec="microseconds")
    duration = "" if seconds is None else f'"duration_sec": {seconds:.6f}, '
    return f'{{"timestamp": "{stamp}", "event": "{event}", {duration}"extra": {{{extra}}}, {tail}}}\n'
