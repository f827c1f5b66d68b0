"""`verl-mux bench log`: what an event costs its caller, and (`--real`) what the log costs a step of a real job.

An event: many asyncio requests at once log as the agent loops do, turn by turn, and each call is timed. A step: one job of a
run file trains alone, and every process adds up what its log takes: the time of the callers and the processor time of the
writing thread. Runs on the command line; writes a log, and with `--real` starts a job.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from bench.measuring import AsJson, quantile, show
from verl_mux.errors import Failure, UserError
from verl_mux.launcher import run_file
from verl_mux.launcher.command import run_jobs
from verl_mux.launcher.run_file import RunFile
from verl_mux.profiling.eventlog import events
from verl_mux.profiling.eventlog.log import COST_VARIABLE, EventLog, writer
from verl_mux.profiling.plain.lines import read_directory

WARM_UP = 2  # steps left out: caches and allocators still grow in them


def measure(requests: int = 1024, turns: int = 4, rounds: int = 10) -> dict[str, Any]:
    """Microseconds an event, around each call; and what was lost."""
    calls: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        log = EventLog(directory, role="rollout", job="bench")
        for number in range(rounds):
            log.step = number
            asyncio.run(_loop(log, requests, turns, calls))
            log.flush(60.0)
        refused, failed = sum(writer().refused.values()), writer().failed
        log.close()
    return {
        "requests": requests,
        "events": len(calls),
        "call_median_us": round(statistics.median(calls) * 1e6, 3),
        "call_mean_us": round(statistics.fmean(calls) * 1e6, 3),
        "call_p99_us": round(quantile(calls, 0.99) * 1e6, 3),
        "dropped": refused + failed,
    }


async def _loop(log: EventLog, requests: int, turns: int, calls: list[float]) -> None:
    await asyncio.gather(*(_request(log, number, turns, calls) for number in range(requests)))


async def _request(log: EventLog, number: int, turns: int, calls: list[float]) -> None:
    about = {"request_id": f"45bb6a77-b6b2-4ed5-afde-97ccf622cdb0-{number}"}
    for turn in range(1, turns + 1):
        await asyncio.sleep(0)  # all requests take turns in the loop
        for event in (events.TURN_PREPROCESS, events.TURN_ENGINE_CALL, events.TURN_POSTPROCESS, events.TURN_END):
            extra = about | {"turn": turn, "prompt_tokens": 128, "response_tokens": 512, "finish_reason": "stop"}
            began = time.perf_counter()
            log.log(event, 1.25, extra, step=3)
            calls.append(time.perf_counter() - began)


def measure_run(file: Path, directory: Path, steps: int) -> dict[str, Any]:
    """Trains `steps` steps of the run file's first job; what `own_cost` finds."""
    if steps < WARM_UP + 2:
        raise UserError(f"--steps is {steps}; at least {WARM_UP + 2} are needed")
    run = _alone(run_file.read(file, directory), steps)
    run_jobs(run)
    return own_cost(Path(run.dir) / next(iter(run.jobs)) / "events", step_seconds(Path(run.dir) / "coordinator" / "events"))


def _alone(run: RunFile, steps: int) -> RunFile:
    """The run file's first job by itself."""
    name, job = next(iter(run.jobs.items()))
    return msgspec.structs.replace(
        run,
        coordinator={key: value for key, value in run.coordinator.items() if key not in ("schedule", "expect_jobs")},
        jobs={name: job},
        overrides=[*run.overrides, f"trainer.total_training_steps={steps}"],
        prepare=[command for command in run.prepare if "--job" not in command or name in command],
        environment={**run.environment, COST_VARIABLE: "1"},
    )


def step_seconds(directory: Path) -> dict[int, float]:
    """From each step's predecessor to it, from a coordinator's event log of one job. The first step has none."""
    ends = {line.step: line.end for line in read_directory(directory) if line.event == events.STEP_REPORT}
    return {step: ends[step] - ends[step - 1] for step in sorted(ends) if step - 1 in ends}


def own_cost(directory: Path, seconds: dict[int, float]) -> dict[str, Any]:
    """What the logs under `directory` say they took themselves in a step, medians over the steps.

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


def bench_log(
    requests: Annotated[int, typer.Option(help="Concurrent asyncio requests.", min=1)] = 1024,
    turns: Annotated[int, typer.Option(help="Turns a request; four events each.", min=1)] = 4,
    rounds: Annotated[int, typer.Option(help="How often all of them do.", min=1)] = 10,
    real: Annotated[bool, typer.Option("--real", help="Train a real job, too.")] = False,
    file: Annotated[Path, typer.Option(help="With --real: the run file; its first job runs.")] = Path("examples/demo.yaml"),
    directory: Annotated[Path, typer.Option("--dir", help="With --real: where the run goes.")] = Path("runs/bench_log"),
    steps: Annotated[int, typer.Option(help="With --real: steps; the first two are left out.")] = 20,
    json: AsJson = False,
) -> None:
    """Measure what an event costs its caller; with --real, what the log costs a step."""
    found = measure(requests, turns, rounds)
    if real:
        found["real"] = {"own_cost": measure_run(file, directory, steps)}
    show(found, json, _in_words)


def _in_words(found: dict[str, Any]) -> str:
    text = "an event: {call_median_us:.1f} us at the median, {call_p99_us:.1f} us at p99, {dropped} dropped".format(**found)
    if "real" in found:
        text += "\na step: {lines:.0f} lines, {cost_s:.4f} s, {percent_of_step:.3f} % of it".format(**found["real"]["own_cost"])
    return text
