"""`verl-mux bench filler`: what a filler costs the jobs beside it, and how much of the time that they leave it uses.

Two jobs, without a filler and with one on each pool. By default the jobs are processes that take their leases from a real
coordinator and hold them for fixed times, but compute nothing; with --file they are the real jobs of a run file.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from verl_mux.bench.coordinator_process import CoordinatorProcess
from verl_mux.coordinator.bus.connect import connect
from verl_mux.coordinator.bus.members import UID_VARIABLE
from verl_mux.coordinator.command import fetch_status
from verl_mux.errors import Failure, UserError
from verl_mux.launcher import run_file
from verl_mux.launcher.command import run_jobs
from verl_mux.launcher.run_file import FillerSpec, RunFile
from verl_mux.profiling.eventlog import events
from verl_mux.profiling.plain.lines import read_directory

_POOLS = {"rollout": {"nodes": [{"name": "r0"}]}, "train": {"nodes": [{"name": "t0"}]}}
_SIDES = {"rollout": ["r0"], "train": ["t0"]}
# Seconds of rollout and training.
_JOBS = {"a": (3.0, 1.0), "b": (2.0, 1.5)}
# A command that computes; a deaf one has to be killed.
_BUSY = "import signal\n{deaf}while True: sum(range(10_000))\n"
_DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
_ANSWER_S = 30.0
_LOOK_EVERY_S = 0.1


def bench_filler(
    steps: Annotated[int, typer.Option(help="Steps of each job, each of the two times.")] = 8,
    deaf: Annotated[bool, typer.Option(help="The fillers ignore SIGTERM.")] = False,
    file: Annotated[Path | None, typer.Option(help="Beside the real jobs of this run file instead.")] = None,
    directory: Annotated[Path, typer.Option("--dir", help="Where the runs of --file go.")] = Path("runs/bench_filler"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Period of two jobs without and with fillers, how long fillers took to leave, and what they used of the jobs' bubbles."""
    if steps < 3:
        raise UserError(f"--steps is {steps}; at least 3 are needed for a median of periods")
    command = [sys.executable, "-c", _BUSY.format(deaf=_DEAF if deaf else "")]
    found = made_jobs(steps, command) if file is None else _real_jobs(file, directory, command)
    print(json.dumps(found) if as_json else _in_words(found))


def made_jobs(steps: int, command: list[str], jobs: dict[str, tuple[float, float]] = _JOBS) -> dict[str, Any]:
    """jobs: seconds of rollout and training by job. command: of the fillers."""
    without, _, _ = _one_way(steps, [], jobs)
    filled, leaving_s, shares = _one_way(steps, command, jobs)
    return {
        "jobs": "made: they hold leases for fixed times",
        **_compare(without, filled),
        **_left(leaving_s),
        "bubble_filled": shares,
    }


def _compare(without: dict[str, float], filled: dict[str, float]) -> dict[str, Any]:
    ratio = max(filled[job] / without[job] for job in without)
    return {"period_s": without, "period_filled_s": filled, "period_ratio": round(ratio, 4)}


def _left(leaving_s: list[float]) -> dict[str, Any]:
    """From when a filler was told to leave until its node was free: for so long a grant was delayed by it."""
    leaving = {"median": statistics.median(leaving_s), "max": max(leaving_s)} if leaving_s else None
    return {"times_left": len(leaving_s), "leaving_s": leaving}


def _one_way(
    steps: int, command: list[str], jobs: dict[str, tuple[float, float]]
) -> tuple[dict[str, float], list[float], dict[str, float | None]]:
    """Median periods by job; seconds that fillers took to leave; by node, what share of the jobs' bubbles they used."""
    with (
        tempfile.TemporaryDirectory() as folder,
        CoordinatorProcess({"pools": _POOLS, "expect_jobs": len(jobs)}, Path(folder)) as mux,
    ):
        with _fillers(mux.address, command):
            periods = _run_jobs(mux.address, steps, jobs)
            shares = _shares(fetch_status(mux.address, _ANSWER_S))
        mux.stop()
        return periods, _leaving_s(Path(folder)), shares


def _run_jobs(address: str, steps: int, jobs: dict[str, tuple[float, float]]) -> dict[str, float]:
    processes = multiprocessing.get_context("spawn")
    running = {}
    for name, seconds in jobs.items():
        ours, theirs = processes.Pipe()
        process = processes.Process(target=_job, args=(address, name, seconds, steps, theirs))
        process.start()
        theirs.close()
        running[name] = process, ours
    periods = {name: _periods(name, ours) for name, (_, ours) in running.items()}
    for process, _ in running.values():
        process.join()
    return periods


def _periods(name: str, job: Connection) -> float:
    try:
        began: list[float] = job.recv()
    except EOFError:
        raise Failure(f"job {name!r} of the bench failed") from None
    return statistics.median(after - before for before, after in itertools.pairwise(began))


def _job(address: str, name: str, seconds: tuple[float, float], steps: int, bench: Connection) -> None:
    """Tells when each step began, and the last one ended."""
    mux = connect(address, name, _SIDES, uid=f"{name}:{uuid.uuid4().hex}", steps=steps)
    with mux.phase("init"):
        pass
    began = []
    for step in range(1, steps + 1):
        began.append(time.monotonic())
        for phase, length in zip(("rollout", "train"), seconds, strict=True):
            with mux.phase(phase, step=step):
                time.sleep(length)
    bench.send([*began, time.monotonic()])
    mux.close()


@contextlib.contextmanager
def _fillers(address: str, command: list[str]) -> Iterator[None]:
    """One on each pool, if there is a command; they are there before anybody else, however long a start takes here."""
    hold = [sys.executable, "-m", "verl_mux", "hold", "--coordinator", address]
    environment = {name: value for name, value in os.environ.items() if name != UID_VARIABLE}
    started = [
        subprocess.Popen(
            [*hold, "--pool", pool, "--name", f"fills-{pool}", "--", *command], env=environment, stderr=subprocess.DEVNULL
        )
        for pool in (_POOLS if command else ())
    ]
    try:
        while len(fetch_status(address, _ANSWER_S)["jobs"]) < len(started):
            _check(started)
            time.sleep(_LOOK_EVERY_S)
        yield
        _check(started)
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait()


def _check(started: list[subprocess.Popen]) -> None:
    if any(process.poll() is not None for process in started):
        raise Failure("a filler ended before the jobs did: it was ended by the coordinator, or its command failed")


def _leaving_s(log: Path) -> list[float]:
    held = [line for line in read_directory(log) if line.event == events.LEASE_HELD]
    return [line.extra["leaving_s"] for line in held if line.extra.get("leaving_s") is not None]


def _shares(status: dict[str, Any]) -> dict[str, float | None]:
    nodes = [node for pool in status["pools"].values() for node in pool["nodes"].items()]
    return {name: seen["usage"]["bubble_filled"] for name, seen in nodes}


def _real_jobs(file: Path, directory: Path, command: list[str]) -> dict[str, Any]:
    run = run_file.read(file, directory / "without")
    fillers = {f"fills-{pool}": FillerSpec(pool=pool, command=command) for pool in run.coordinator_config().pools}
    without = run_jobs(msgspec.structs.replace(run, fillers={}))
    filled_run: RunFile = msgspec.structs.replace(run, dir=str(directory / "filled"), fillers=fillers)
    filled = run_jobs(filled_run)
    periods = [{name: job["period_mux_s"] for name, job in result["jobs"].items()} for result in (without, filled)]
    leaving_s = _leaving_s(filled_run.directory / "coordinator" / "events")
    return {"jobs": str(file), **_compare(*periods), **_left(leaving_s), "bubble_filled": filled["bubble_filled"]}


def _in_words(found: dict[str, Any]) -> str:
    shares = ", ".join(f"{node} {share:.0%}" for node, share in found["bubble_filled"].items() if share is not None)
    leaving = found["leaving_s"] or {"median": 0.0, "max": 0.0}
    periods = ", ".join(
        f"{job} {found['period_s'][job]:.2f} -> {found['period_filled_s'][job]:.2f} s" for job in found["period_s"]
    )
    return "\n".join(
        [
            f"two jobs ({found['jobs']})",
            f"step without and with fillers: {periods} (at most {found['period_ratio']:.3f}x)",
            f"fillers left {found['times_left']} times, in {leaving['median']:.2f} s (median), {leaving['max']:.2f} s (longest)",
            f"of the time that jobs left, fillers used: {shares}",
        ]
    )
