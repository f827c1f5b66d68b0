"""`verl-mux bench report`: what the report itself costs."""

from __future__ import annotations

import json as json_module
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from verl_mux.errors import Failure, UserError

WORKERS = 8
REQUESTS = 512  # of a worker and step
EPOCH = datetime(2025, 8, 11)
RUN_REPORT = "import typer; from verl_mux.report_command import report; typer.run(report)"


def bench_report(
    events: Annotated[int, typer.Option(help="Events of the made log, at least.")] = 10_000_000,
    directory: Annotated[Path | None, typer.Option("--dir", help="Where the made log goes and stays.")] = None,
    cores: Annotated[int, typer.Option(help="Cores that the report may use.")] = 2,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Make a log of multi-turn requests and time `verl-mux report --json` on it: seconds, and memory of all its processes."""
    if events < 1 or cores < 1:
        raise UserError(f"--events {events} --cores {cores}: both are at least 1")
    import polars  # noqa: F401  the report that is timed needs it; missed before the log is made

    with tempfile.TemporaryDirectory(dir=directory.parent if directory else None) as scratch:
        folder = directory or Path(scratch)
        written, nbytes = make_log(folder, events)
        found = {"events": written, "bytes": nbytes, "cores": cores, **time_report(folder, cores)}
    if json:
        print(json_module.dumps(found))
    else:
        told = "{events} events, {bytes} bytes: {seconds:.1f} s ({cpu_seconds:.1f} s of CPU), {peak_mib:.0f} MiB, {cores} cores"
        print(told.format(**found))


def make_log(directory: Path, events: int) -> tuple[int, int]:
    """Steps of WORKERS x REQUESTS requests of one to three turns until there are `events`; returns events and bytes."""
    rng = random.Random(0)
    lines = nbytes = 0
    step = 0
    while lines < events:
        step += 1
        folder = directory / f"step_{step}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make {folder}: {error.strerror}; name another --dir") from None
        for worker in range(WORKERS):
            text = list(_worker_step(rng, worker, step, 100.0 * step))
            lines += len(text)
            nbytes += (folder / f"worker_{worker}.jsonl").write_bytes("".join(text).encode())
            if lines >= events:
                break
    return lines, nbytes


def _worker_step(rng: random.Random, worker: int, step: int, start: float) -> Iterator[str]:
    tail = f'"workid": {worker}, "step": {step}}}\n'
    yield _line(start + 0.5, "preprocessing_duration", 0.5, "", tail)
    last = start
    for number in range(REQUESTS):
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
    stamp = (EPOCH + timedelta(seconds=end)).isoformat(timespec="microseconds")
    duration = "" if seconds is None else f'"duration_sec": {seconds:.6f}, '
    return f'{{"timestamp": "{stamp}", "event": "{event}", {duration}"extra": {{{extra}}}, {tail}'


def time_report(directory: Path, cores: int) -> dict[str, Any]:
    """Seconds and MiB of `verl-mux report --json` as a process of its own, held to `cores` cores.

    `peak_mib` is the sum of the resident sets of all its processes, shared pages counted in each: no less than what it took.
    """
    command = [sys.executable, "-c", RUN_REPORT, str(directory), "--json", "--processes", str(cores)]
    allowed = sorted(psutil.Process().cpu_affinity())[:cores]
    environment = os.environ | {"POLARS_MAX_THREADS": str(cores)}
    began, spent = time.perf_counter(), _children_seconds()
    process = psutil.Popen(command, stdout=subprocess.PIPE, env=environment)
    process.cpu_affinity(allowed)
    peak = _Peak(process)
    output = process.communicate()[0]
    seconds = time.perf_counter() - began
    if process.returncode:
        raise Failure(f"verl-mux report ended with {process.returncode}")
    summary = json_module.loads(output)
    told = {"requests": summary["requests"], "findings": len(summary["findings"]), "skipped_lines": summary["skipped_lines"]}
    cpu = round(_children_seconds() - spent, 2)
    return {"seconds": round(seconds, 2), "cpu_seconds": cpu, "peak_mib": round(peak.stop() / 2**20, 1), **told}


def _children_seconds() -> float:
    """CPU seconds of this process's ended children and theirs: what the machine did, however busy it was with others."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class _Peak:
    """The most memory that a process and its children have together, looked at ten times a second."""

    def __init__(self, process: psutil.Process) -> None:
        self._process, self._most, self._over = process, 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(0.1):
            self._most = max(self._most, self._now())

    def _now(self) -> int:
        total = 0
        try:
            for process in [self._process, *self._process.children(recursive=True)]:
                total += process.memory_info().rss
        except psutil.Error:
            pass
        return total

    def stop(self) -> int:
        """Bytes."""
        self._over.set()
        self._thread.join()
        return self._most
