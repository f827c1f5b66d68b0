"""What the event log costs a step of a real job.

One job of a run file trains alone, with the log on in even steps and off in odd ones (`mux.profile.every=2`). A step's seconds
are those from the coordinator's word of one step's end to the next; the coordinator's own log is on throughout. Processor time
is reported beside it, which other work on the machine lengthens much less: of all processes of the run; of the engines'
schedulers, where our hooks run, also by what they generated; and of the others that log more than a handful of events a step,
without the
engine's and the trainer's computing, which varies by more than any log costs. In steps without the log these return at once.
What the clock cannot tell, the logs add up themselves: the time their callers and their writing threads took, of all processes,
as if none of it went on beside the step's own work.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from verl_mux.errors import Failure, UserError
from verl_mux.profiling.eventlog import events
from verl_mux.profiling.eventlog.line_writer import COST_VARIABLE
from verl_mux.profiling.plain.lines import read_directory
from verl_mux.rollout.engine.record import engines

_Key = tuple[int, float]  # a process: pid and creation time
WARM_UP = 2  # steps left out: caches and allocators still grow in them
DRAWS = 2000
# An event for each turn of each request, as the engines' servers have; what else logs does so a dozen times a step.
LOGGING = ("ray::MuxAgentLoopWorker", "ray::TaskRunner")


def measure_run(file: Path, directory: Path, steps: int) -> dict[str, Any]:
    """Trains `steps` steps of the run file's first job and compares them, see `compare_steps`."""
    from verl_mux.launcher import run_file
    from verl_mux.launcher.command import run_jobs

    if steps < 8:
        raise UserError(f"--steps is {steps}; at least 8 are needed")
    run = _alone(run_file.read(file, directory), steps)
    with ProcessorTime() as processor:
        run_jobs(run)
    servers = tuple(f"ray::{engine.server.rpartition('.')[2]}" for engine in engines().values())
    schedulers = tuple(engine.scheduler_title for engine in engines().values())
    job, coordinator = Path(run.dir) / next(iter(run.jobs)) / "events", Path(run.dir) / "coordinator" / "events"
    ends = step_ends(coordinator)
    step = compare_steps(between(ends))
    logging = compare_steps(between(processor.at(ends, LOGGING + servers)))
    added_s = round(logging["on_s"] - logging["off_s"], 4)
    share = round(100 * added_s / step["off_s"], 3)
    return {
        **step,
        "own_cost": own_cost(job, between(ends)),
        "processor": compare_steps(between(processor.at(ends))),
        "engine": engine_cost(between(processor.at(ends, schedulers)), generated(coordinator, job)),
        "logging_processes": {**logging, "added_s": added_s, "percent_of_step": share},
    }


class ProcessorTime:
    """Within its block, reads now and then how much processor time this process and each of its descendants have used."""

    def __init__(self, every_s: float = 1.0) -> None:
        self._every_s = every_s
        self._samples: list[tuple[float, dict[_Key, float]]] = []
        self._titles: dict[_Key, set[str]] = {}
        self._seen: dict[_Key, float] = {}  # what ended keeps what it had used
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> ProcessorTime:
        self._look()  # what is used before the thread first runs counts
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def at(self, moments: dict[int, float], titles: tuple[str, ...] = ("",)) -> dict[int, float]:
        """Seconds of processor time used until each moment (epoch seconds), interpolated; by processes that ever had a title
        beginning with one of `titles` (all): Ray renames its processes as they work."""
        chosen = {key for key, had in self._titles.items() if any(title.startswith(titles) for title in had)}
        times = [moment for moment, _ in self._samples]
        used = [sum(spent for key, spent in sample.items() if key in chosen) for _, sample in self._samples]
        return {step: float(np.interp(moment, times, used)) for step, moment in moments.items()}

    def _read(self) -> None:
        while not self._over.wait(self._every_s):
            self._look()

    def _look(self) -> None:
        own = psutil.Process()
        for process in (own, *own.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                key, spent = (process.pid, process.create_time()), process.cpu_times()
                self._titles.setdefault(key, set()).add(" ".join(process.cmdline()))
                self._seen[key] = spent.user + spent.system
        self._samples.append((time.time(), dict(self._seen)))


def _alone(run: Any, steps: int) -> Any:
    """The run file's first job by itself."""
    overrides = [*run.overrides, f"trainer.total_training_steps={steps}", "mux.profile.every=2"]
    name, job = next(iter(run.jobs.items()))
    settings = {key: value for key, value in run.coordinator.items() if key not in ("schedule", "expect_jobs")}
    prepare = [command for command in run.prepare if "--job" not in command or name in command]
    environment = {**run.environment, COST_VARIABLE: "1"}
    return msgspec.structs.replace(
        run, coordinator=settings, jobs={name: job}, overrides=overrides, prepare=prepare, environment=environment
    )


def step_ends(directory: Path) -> dict[int, float]:
    """When each step ended, in epoch seconds, from a coordinator's event log of one job."""
    return {line.step: line.end for line in read_directory(directory) if line.event == events.STEP_REPORT}


def own_cost(directory: Path, seconds: dict[int, float]) -> dict[str, Any]:
    """What the logs under `directory` say they took themselves in a step, medians over the steps that were logged.

    `seconds`: how long each step lasted. `lines`, `cost_s` and `percent_of_step` are of all processes together.
    """
    lines: dict[int, int] = defaultdict(int)
    cost: dict[int, float] = defaultdict(float)
    for line in read_directory(directory):
        if line.event == events.LOG_COST:
            lines[line.step] += line.extra["lines"]
            cost[line.step] += line.extra["caller_sec"] + line.extra["writer_cpu_sec"]
    steps = [step for step in cost if step > WARM_UP and step in seconds]
    if not steps:
        raise Failure(f"no process logged what its log took: no {events.LOG_COST} under {directory}")
    return {
        "steps": len(steps),
        "lines": statistics.median(lines[step] for step in steps),
        "cost_s": round(statistics.median(cost[step] for step in steps), 6),
        "percent_of_step": round(statistics.median(100 * cost[step] / seconds[step] for step in steps), 4),
    }


def engine_cost(seconds: dict[int, float], tokens: dict[int, float]) -> dict[str, Any]:
    """Of the schedulers, by step: processor seconds, and beside them (`per_1000_tokens`) those for 1,000 generated tokens."""
    by_tokens = {step: 1000 * seconds[step] / tokens[step] for step in seconds if tokens.get(step)}
    return {**compare_steps(seconds), "per_1000_tokens": compare_steps(by_tokens)}


def generated(coordinator: Path, job: Path) -> dict[int, float]:
    """Tokens of all responses of each step, from the event logs of a coordinator and of its job.

    Lengths are reported for every step; how many responses a step has, of those that were logged, and all have as many.
    """
    done = Counter(line.step for line in read_directory(job) if line.event == events.REQUEST_COMPLETE)
    responses = statistics.median(done.values()) if done else 0
    reports = [line for line in read_directory(coordinator) if line.event == events.STEP_REPORT]
    return {line.step: responses * line.extra["response_length"] for line in reports}


def between(marks: dict[int, float]) -> dict[int, float]:
    """From each step's predecessor to it. The first step has none."""
    return {step: marks[step] - marks[step - 1] for step in sorted(marks) if step - 1 in marks}


def compare_steps(seconds: dict[int, float]) -> dict[str, Any]:
    """Even steps (on) against odd ones (off), from medians.

    `interval_percent`: the bootstrap's 95 % interval of `overhead_percent`.
    """
    on = [value for step, value in seconds.items() if step > WARM_UP and step % 2 == 0]
    off = [value for step, value in seconds.items() if step > WARM_UP and step % 2]
    if min(len(on), len(off)) < 2:
        raise Failure(f"{len(on)} steps with the log and {len(off)} without: too few to compare")
    rng = random.Random(0)
    drawn = sorted(_percent(rng.choices(on, k=len(on)), rng.choices(off, k=len(off))) for _ in range(DRAWS))
    return {
        "steps_on": len(on),
        "steps_off": len(off),
        "on_s": round(statistics.median(on), 4),
        "off_s": round(statistics.median(off), 4),
        "overhead_percent": round(_percent(on, off), 3),
        "interval_percent": [round(drawn[int(part * DRAWS)], 3) for part in (0.025, 0.975)],
    }


def _percent(on: list[float], off: list[float]) -> float:
    return 100 * (statistics.median(on) / statistics.median(off) - 1)
