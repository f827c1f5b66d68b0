"""Logs of any size for `verl-mux bench report`: multi-turn requests in the layout of the sglang profiling scripts, or in ours."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from datetime import datetime, timedelta
from pathlib import Path

from verl_mux.errors import UserError

WORKERS = 8
REQUESTS = 512  # of a worker and step
REPLICAS = 8
EPOCH = datetime(2025, 8, 11)
STEP_S = 100.0


def make_log(
    directory: Path, events: int, layout: str = "ours", replicas: int = REPLICAS, requests: int = REQUESTS
) -> tuple[int, int]:
    """Steps of WORKERS x `requests` requests of one to three turns until there are `events`; returns events and bytes.

    layout: a key of LAYOUTS. Raises UserError.
    """
    rng = random.Random(0)
    lines = nbytes = step = 0
    while lines < events:
        step += 1
        for path, text in LAYOUTS[layout](rng, step, replicas, requests):
            lines += len(text)
            nbytes += _write(directory / path, "".join(text))
            if layout == "sglang" and lines >= events:
                break
    return lines, nbytes


def _write(path: Path, text: str) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.write_bytes(text.encode())
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; name another --dir") from None


def _stamp(end: float) -> str:
    return (EPOCH + timedelta(seconds=end)).isoformat(timespec="microseconds")


# ---------------------------------------------------------------- the sglang profiling scripts'


def _sglang_step(rng: random.Random, step: int, replicas: int, requests: int) -> Iterator[tuple[str, list[str]]]:
    for worker in range(WORKERS):
        yield f"step_{step}/worker_{worker}.jsonl", list(_worker_step(rng, worker, step, STEP_S * step, requests))


def _worker_step(rng: random.Random, worker: int, step: int, start: float, requests: int) -> Iterator[str]:
    tail = f'"workid": {worker}, "step": {step}}}\n'
    yield _line(start + 0.5, "preprocessing_duration", 0.5, "", tail)
    last = start
    for number in range(requests):
        turns = 1 + (rng.random() < 0.5) + (rng.random() < 0.2)
        end = yield from _request(f"{rng.getrandbits(128):032x}-{number}", rng, start + 0.5, turns, tail)
        last = max(last, end)
    yield _line(last, "async_generate_duration", last - start - 0.5, "", tail)
    yield _line(last + 0.1, "total_step_duration", last + 0.1 - start, "", tail)


def _request(name: str, rng: random.Random, start: float, turns: int, tail: str) -> Generator[str, None, float]:
    at = start
    yield _line(at, "request_start", None, f'"request_id": "{name}", "prompt_tokens": 128', tail)
    for turn in range(turns):
        about = f'"request_id": "{name}", "turn": {turn}'
        seconds = rng.uniform(5.0, 25.0)
        yield _line(at + 0.01, "turn_pre_process", 0.01, about, tail)
        at += 0.01 + seconds
        yield _line(at, "turn_engine_call", seconds, f'{about}, "generated_tokens": {int(40 * seconds)}', tail)
        yield _line(at + 0.002, "turn_post_process", 0.002, about, tail)
        yield _line(at + 0.002, "turn_end", seconds + 0.012, about, tail)
    yield _line(at + 0.01, "reward_calculation", 0.008, f'"request_id": "{name}", "score": 1.0', tail)
    done = f'"request_id": "{name}", "turns": {turns}, "finish_reason": "stop", "response_length": {int(40 * (at - start))}'
    yield _line(at + 0.01, "async_rollout_request_complete", at + 0.01 - start, done, tail)
    return at + 0.01


def _line(end: float, event: str, seconds: float | None, extra: str, tail: str) -> str:
    duration = "" if seconds is None else f'"duration_sec": {seconds:.6f}, '
    return f'{{"timestamp": "{_stamp(end)}", "event": "{event}", {duration}"extra": {{{extra}}}, {tail}'


# ---------------------------------------------------------------- ours


def _our_step(rng: random.Random, step: int, replicas: int, requests: int) -> Iterator[tuple[str, list[str]]]:
    """Requests of agent loop workers over replicas, what their servers say of each stay, their counters, the trainer's step."""
    start = STEP_S * step
    found: dict[tuple[str, int], list[str]] = defaultdict(list)

    def log(role: str, worker: int, end: float, event: str, seconds: float | None, extra: str) -> None:
        tail = f'"workid": {worker}, "step": {step}, "role": "{role}", "job": "made", "run": "0a1b2c3d"}}\n'
        found[role, worker].append(_line(end, event, seconds, extra, tail))

    last = start
    for worker in range(WORKERS):
        for number in range(requests):
            replica = (worker * requests + number) % replicas
            last = max(last, _our_request(log, rng, worker, replica, start))
    for replica in range(replicas):
        for second in range(1, int(last - start)):
            about = f'"replica": {replica}, "node": "r{replica // 8}", "running": 9, "queued": 0, "token_usage": 0.5'
            log("server", replica, start + second, "engine_decode", 1.0, about + ', "tokens_per_sec": 360.0')
    log("trainer", 0, last + 10, "update_actor", 9.0, "")
    log("trainer", 0, last + 10, "step", last + 10 - start, '"reward": 0.5')
    for (role, worker), text in found.items():
        yield f"made/events/{role}/step_{step}/worker_{worker}.jsonl", text


def _our_request(log: Callable[..., None], rng: random.Random, worker: int, replica: int, start: float) -> float:
    name, at = f"{rng.getrandbits(128):032x}_0", start
    turns = 1 + (rng.random() < 0.5) + (rng.random() < 0.2)
    log("rollout", worker, at, "request_start", None, f'"request_id": "{name}", "session": 0, "validate": false')
    for turn in range(1, turns + 1):
        seconds = rng.uniform(5.0, 25.0)
        about = f'"request_id": "{name}", "turn": {turn}'
        where = f'{about}, "stay": {turn}, "replica": {replica}, "node": "r{replica // 8}"'
        told = f'{where}, "version": 1, "prompt_tokens": 128, "response_tokens": {int(40 * seconds)}, "held_sec": 0.0'
        log("rollout", worker, at + 0.01, "turn_pre_process", 0.01, about)
        log("server", replica, at + 0.02, "engine_queue", 0.01, where)
        at += 0.01 + seconds
        times = f'"queue_sec": 0.01, "prefill_sec": 0.05, "decode_sec": {seconds - 0.06:.6f}'
        log("server", replica, at, "engine_generate", seconds - 0.001, f'{told}, {times}, "finish": "stop", "cached_tokens": 0')
        log("rollout", worker, at, "turn_engine_call", seconds, f'{told}, "finish_reason": "stop", "queue_sec": 0.01')
    log("rollout", worker, at + 0.01, "reward_calculation", 0.008, f'"request_id": "{name}", "turn": {turns}, "score": 1.0')
    done = f'"request_id": "{name}", "turns": {turns}, "stays": {turns}, "finish_reason": "stop", "parked_sec": 0.0, "score": 1.0'
    tokens = f'"response_length": {int(40 * (at - start))}, "session": 0, "validate": false'
    log("rollout", worker, at + 0.01, "async_rollout_request_complete", at + 0.01 - start, f"{done}, {tokens}")
    return at + 0.01


LAYOUTS: dict[str, Callable[[random.Random, int, int, int], Iterator[tuple[str, list[str]]]]] = {
    "ours": _our_step,
    "sglang": _sglang_step,
}
