"""`verl-mux bench filler`: what a filler costs the jobs beside it, and how much of the time that they leave it uses.

Two jobs, without a filler and with one on each pool. By default the jobs are processes that take their leases from a real
coordinator and hold them for fixed times, but compute nothing. With --file they are the real jobs of a run file, in one run in
which fillers come and go: what else slows the machine down meets the steps with and without them alike. Runs on the command line;
starts a coordinator, jobs and fillers.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from bench.coordinator_process import CoordinatorProcess
from bench.measuring import AsJson, child, show
from verl_mux.coordinator.bus.client import connect
from verl_mux.coordinator.bus.members import UID_VARIABLE
from verl_mux.coordinator.commands import fetch_status
from verl_mux.errors import Failure, UserError
from verl_mux.launcher import run_file, run_intervals
from verl_mux.launcher.command import run_jobs
from verl_mux.launcher.run_file import COORDINATOR, RunFile
from verl_mux.launcher.run_intervals import Timeline
from verl_mux.profiling.eventlog import events
from verl_mux.profiling.plain.lines import Interval, Line, clip, length, read_directory

_POOLS = {"rollout": {"nodes": [{"name": "r0"}]}, "train": {"nodes": [{"name": "t0"}]}}
# Seconds of rollout and training.
_JOBS = {"a": (3.0, 1.0), "b": (2.0, 1.5)}
# A command that computes; a deaf one has to be killed.
_BUSY = "import signal\n{deaf}while True: sum(range(10_000))\n"
_DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
_ANSWER_S = 30.0
_LOOK_EVERY_S = 0.1
# Beside real jobs: steps that each of them does in a turn with fillers, and in one without. The first and the last are cut.
_TURN_STEPS = 4
_LEAST_STEPS = {"made": 3, "real": 3 * _TURN_STEPS}
_DEFAULT_STEPS = {"made": 8, "real": 8 * _TURN_STEPS}


def bench_filler(
    steps: Annotated[
        int | None,
        typer.Option(help="Steps of each job: each of the two times (8), with --file in all (32).", show_default=False),
    ] = None,
    deaf: Annotated[bool, typer.Option(help="The fillers ignore SIGTERM.")] = False,
    file: Annotated[Path | None, typer.Option(help="Beside the real jobs of this run file instead.")] = None,
    directory: Annotated[Path, typer.Option("--dir", help="Where the runs of --file go.")] = Path("runs/bench_filler"),
    json: AsJson = False,
) -> None:
    """Period of two jobs without and with fillers, how long fillers took to leave, and what they used of the jobs' bubbles."""
    kind = "made" if file is None else "real"
    steps = _DEFAULT_STEPS[kind] if steps is None else steps
    if steps < _LEAST_STEPS[kind]:
        raise UserError(f"--steps is {steps}; at least {_LEAST_STEPS[kind]} are needed for a median of periods")
    command = [sys.executable, "-c", _BUSY.format(deaf=_DEAF if deaf else "")]
    show(made_jobs(steps, command) if file is None else _real_jobs(file, directory, command, steps), json, _in_words)


def made_jobs(steps: int, command: list[str], jobs: dict[str, tuple[float, float]] = _JOBS) -> dict[str, Any]:
    """jobs: seconds of rollout and training by job. command: of the fillers."""
    without, _, _ = _one_way(steps, [], jobs)
    return _figures("made: they hold leases for fixed times", without, *_one_way(steps, command, jobs))


def _figures(
    jobs: str, without: dict[str, float], filled: dict[str, float], leaving_s: list[float], shares: dict[str, float | None]
) -> dict[str, Any]:
    """leaving_s: seconds from asking a filler to leave until its node was free, the delay of a grant."""
    return {
        "jobs": jobs,
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
        return periods, _leaving_s(_held(Path(folder))), shares


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
def _fillers(address: str, pools: Iterable[str], command: list[str], keys: Path | None = None) -> Iterator[None]:
    """One on each pool; they are known to the coordinator before anything else is done, however long a start takes here."""
    hold = [sys.executable, "-m", "verl_mux", "hold", "--coordinator", address, *(["--keys", str(keys)] if keys else [])]
    environment = {name: value for name, value in os.environ.items() if name != UID_VARIABLE}
    started = {
        f"fills-{pool}": subprocess.Popen(
            [*hold, "--pool", pool, "--name", f"fills-{pool}", "--", *command], env=environment, stderr=subprocess.DEVNULL
        )
        for pool in pools
    }
    try:
        while not started.keys() <= fetch_status(address, _ANSWER_S, keys)["jobs"].keys():
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


def _held(log: Path) -> list[Line]:
    """A line for each lease that came back."""
    return [line for line in read_directory(log) if line.event == events.LEASE_HELD]


def _leaving_s(held: list[Line]) -> list[float]:
    return [line.extra["leaving_s"] for line in held if line.extra.get("leaving_s") is not None]


def _shares(status: dict[str, Any]) -> dict[str, float | None]:
    nodes = [node for pool in status["pools"].values() for node in pool["nodes"].items()]
    return {name: seen["usage"]["bubble_filled"] for name, seen in nodes}


def _real_jobs(file: Path, directory: Path, command: list[str], steps: int) -> dict[str, Any]:
    run = _without_segments(run_file.read(file, directory), steps)
    with _coming_and_going(run, command) as turns:
        run_jobs(run)
    spans, held = run_intervals.read(run.directory, list(run.jobs)), _held(run.directory / COORDINATOR / "events")
    without, filled = ({job: _median_step(spans, job, turns[there]) for job in run.jobs} for there in (False, True))
    nodes = [node.name for pool in run.coordinator_config().pools.values() for node in pool.nodes]
    return _figures(
        str(file), without, filled, _leaving_s(held), {node: _share_filled(held, node, turns[True]) for node in nodes}
    )


def _without_segments(run: RunFile, steps: int) -> RunFile:
    """Its jobs interleave from the first step on, and do `steps` steps. Raises UserError where they are on other hosts."""
    if any(job.ray for job in run.jobs.values()):
        raise UserError(
            "--file: its jobs run on hosts; fillers of this bench run on this machine, so a file without `ray` is needed"
        )
    jobs = {
        name: msgspec.structs.replace(job, overrides=[*job.overrides, f"trainer.total_training_steps={steps}"])
        for name, job in run.jobs.items()
    }
    coordinator = {key: value for key, value in run.coordinator.items() if key != "schedule"}
    return msgspec.structs.replace(run, jobs=jobs, coordinator=coordinator, fillers={})


@contextlib.contextmanager
def _coming_and_going(run: RunFile, command: list[str]) -> Iterator[dict[bool, list[Interval]]]:
    """When fillers were there (True) and when not, in seconds since the epoch, while all jobs of the run had begun and none had
    ended. Complete when the context has been left."""
    turns: dict[bool, list[Interval]] = {False: [], True: []}
    over = threading.Event()
    thread = threading.Thread(target=_take_turns, args=(run, command, turns, over))
    thread.start()
    try:
        yield turns
    finally:
        over.set()
        thread.join()


def _take_turns(run: RunFile, command: list[str], turns: dict[bool, list[Interval]], over: threading.Event) -> None:
    address = run.directory / COORDINATOR / "address"
    # A request that is under way when the coordinator ends with the run raises.
    with contextlib.suppress(UserError, Failure):
        while not over.is_set() and not (address.exists() and _steps_done(run, address.read_text())):
            over.wait(_LOOK_EVERY_S)
        for there in itertools.cycle((False, True)):
            first = _steps_done(run, address.read_text())
            if over.is_set() or first is None:
                return
            with _fillers(address.read_text(), run.coordinator_config().pools if there else (), command, run.keys_folder()):
                began = time.time()
                while not over.is_set() and (now := _steps_done(run, address.read_text())) is not None:
                    if now >= first + _TURN_STEPS:
                        break
                    over.wait(_LOOK_EVERY_S)
                turns[there].append((began, time.time()))


def _steps_done(run: RunFile, address: str) -> int | None:
    """Steps that every job has done; None before all jobs are there, and after the first has ended."""
    jobs = fetch_status(address, _ANSWER_S, run.keys_folder())["jobs"]
    known = [jobs[name] for name in run.jobs if name in jobs]
    alive = len(known) == len(run.jobs) and all(job["steps_done"] < job["steps"] for job in known)
    return min(job["steps_done"] for job in known) if alive else None


def _median_step(spans: Timeline, job: str, turns: list[Interval]) -> float:
    """Median seconds from one step's end to the next, of those that lie within one of the turns."""
    ends = [span.end for span in spans.of(job, "steps")]
    inside = [after - before for before, after in itertools.pairwise(ends) if any(a <= before and after <= b for a, b in turns)]
    if not inside:
        raise Failure(f"job {job!r} did no whole step in the turns with fillers, or in those without: give more --steps")
    return round(statistics.median(inside), 4)


def _share_filled(held: list[Line], node: str, turns: list[Interval]) -> float | None:
    """Of the time in these turns in which no job held the node, what share fillers did; None where jobs always held it."""

    def seconds(filler: bool) -> float:
        there = [line for line in held if node in line.extra["nodes"] and bool(line.extra.get("filler")) == filler]
        spans = [(line.end - (line.duration_sec or 0.0), line.end) for line in there]
        return sum(length(clip(spans, turn)) for turn in turns)

    left = sum(end - start for start, end in turns) - seconds(filler=False)
    return round(seconds(filler=True) / left, 4) if left > 0 else None


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
