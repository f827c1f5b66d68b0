"""`verl-mux bench filler`: what a filler costs the jobs beside it, and how much of the time that they leave it uses.

Two jobs, without a filler and with one on each pool. The jobs are processes that take their leases from a real coordinator and
hold them for fixed times, but compute nothing. Runs on the command line; starts a coordinator, jobs and fillers.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.coordinator_process import CoordinatorProcess
from bench.measuring import AsJson, child, show
from verl_mux.coordinator.bus.client import connect
from verl_mux.coordinator.bus.members import UID_VARIABLE
from verl_mux.coordinator.commands import fetch_status
from verl_mux.errors import Failure, UserError
from verl_mux.profiling.eventlog import events
from verl_mux.profiling.plain.lines import read_directory

_POOLS = {"rollout": {"nodes": [{"name": "r0"}]}, "train": {"nodes": [{"name": "t0"}]}}
# Seconds of rollout and training.
_JOBS = {"a": (3.0, 1.0), "b": (2.0, 1.5)}
_ANSWER_S = 30.0
_LOOK_EVERY_S = 0.1
_LEAST_STEPS = 3


def bench_filler(
    steps: Annotated[int, typer.Option(help="Steps of each job, without fillers and with them.")] = 8,
    json: AsJson = False,
) -> None:
    """Period of two jobs without and with fillers, how long fillers took to leave, and what they used of the jobs' bubbles."""
    if steps < _LEAST_STEPS:
        raise UserError(f"--steps is {steps}; at least {_LEAST_STEPS} are needed for a median of periods")
    show(made_jobs(steps, [sys.executable, "-c", "while True: sum(range(10_000))"]), json, _in_words)


def made_jobs(steps: int, command: list[str], jobs: dict[str, tuple[float, float]] = _JOBS) -> dict[str, Any]:
    """jobs: seconds of rollout and training by job. command: of the fillers. leaving_s: seconds from asking a filler to leave
    until its node was free, the delay of a grant."""
    without, _, _ = _one_way(steps, [], jobs)
    filled, leaving_s, shares = _one_way(steps, command, jobs)
    return {
        "period_s": without,
        "period_filled_s": filled,
        "period_ratio": round(max(filled[job] / without[job] for job in without), 4),
        "times_left": len(leaving_s),
        "leaving_s": {"median": statistics.median(leaving_s), "max": max(leaving_s)} if leaving_s else None,
        "bubble_filled": shares,
    }


def _one_way(
    steps: int, command: list[str], jobs: dict[str, tuple[float, float]]
) -> tuple[dict[str, float], list[float], dict[str, float | None]]:
    """Median periods by job; seconds that fillers took to leave; by node, what share of the jobs' bubbles they used."""
    with (
        tempfile.TemporaryDirectory() as folder,
        CoordinatorProcess({"pools": _POOLS, "expect_jobs": len(jobs)}, Path(folder)) as mux,
    ):
        with _fillers(mux.address, _POOLS if command else (), command):
            periods = _run_jobs(mux.address, steps, jobs)
            shares = _shares(fetch_status(mux.address, _ANSWER_S))
        mux.stop()
        held = [line.extra for line in read_directory(Path(folder)) if line.event == events.LEASE_HELD]
        return periods, [it["leaving_s"] for it in held if it.get("leaving_s") is not None], shares


def _run_jobs(address: str, steps: int, jobs: dict[str, tuple[float, float]]) -> dict[str, float]:
    with contextlib.ExitStack() as processes:
        running = {name: processes.enter_context(child(_job, address, name, seconds, steps)) for name, seconds in jobs.items()}
        return {name: _period(name, job) for name, job in running.items()}


def _period(name: str, job: Connection) -> float:
    try:
        began: list[float] = job.recv()
        job.recv()  # it has left
    except EOFError:
        raise Failure(f"job {name!r} of the bench failed") from None
    return statistics.median(after - before for before, after in itertools.pairwise(began))


def _job(address: str, name: str, seconds: tuple[float, float], steps: int, bench: Connection) -> None:
    """Sends when each step began, and when the last one ended."""
    mux = connect(address, name, {"rollout": ["r0"], "train": ["t0"]}, uid=f"{name}:{uuid.uuid4().hex}", steps=steps)
    with mux.phase("init"):
        pass
    began = []
    for step in range(1, steps + 1):
        began.append(time.monotonic())
        for phase, lasts in zip(("rollout", "train"), seconds, strict=True):
            with mux.phase(phase, step=step):
                time.sleep(lasts)
    bench.send([*began, time.monotonic()])
    mux.close()
    bench.send("left")


@contextlib.contextmanager
def _fillers(address: str, pools: Iterable[str], command: list[str]) -> Iterator[None]:
    """One on each pool; they are known to the coordinator before anything else is done, however long a start takes here."""
    hold = [sys.executable, "-m", "verl_mux", "hold", "--coordinator", address]
    environment = {name: value for name, value in os.environ.items() if name != UID_VARIABLE}
    started = {
        f"fills-{pool}": subprocess.Popen(
            [*hold, "--pool", pool, "--name", f"fills-{pool}", "--", *command], env=environment, stderr=subprocess.DEVNULL
        )
        for pool in pools
    }
    try:
        while not started.keys() <= fetch_status(address, _ANSWER_S)["jobs"].keys():
            _check(started.values())
            time.sleep(_LOOK_EVERY_S)
        yield
        _check(started.values())
    finally:
        for process in started.values():
            process.terminate()
        for process in started.values():
            process.wait()


def _check(started: Iterable[subprocess.Popen]) -> None:
    if any(process.poll() is not None for process in started):
        raise Failure("a filler ended before the jobs did: it was ended by the coordinator, or its command failed")


def _shares(status: dict[str, Any]) -> dict[str, float | None]:
    nodes = [node for pool in status["pools"].values() for node in pool["nodes"].items()]
    return {name: seen["usage"]["bubble_filled"] for name, seen in nodes}


def _in_words(found: dict[str, Any]) -> str:
    shares = ", ".join(f"{node} {share:.0%}" for node, share in found["bubble_filled"].items() if share is not None)
    leaving = found["leaving_s"] or {"median": 0.0, "max": 0.0}
    periods = ", ".join(
        f"{job} {found['period_s'][job]:.2f} -> {found['period_filled_s'][job]:.2f} s" for job in found["period_s"]
    )
    return "\n".join(
        [
            f"step without and with fillers: {periods} (at most {found['period_ratio']:.3f}x)",
            f"fillers left {found['times_left']} times, in {leaving['median']:.2f} s (median), {leaving['max']:.2f} s (longest)",
            f"of the time that jobs left, fillers used: {shares}",
        ]
    )
