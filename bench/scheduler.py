"""`verl-mux bench scheduler`: how long a placement decision takes among many running jobs.

Runs on the command line; called by research/paper/traces.py too; pure but for the clock.
"""

from __future__ import annotations

import functools
import gc
import math
import random
import time
from collections.abc import Callable, Sequence
from statistics import linear_regression
from typing import Annotated, Any

import typer

from bench.measuring import AsJson, quantile, show
from research.workload.workload import FAMILIES, GPUS_PER_NODE, NODES, draw_job
from verl_mux.placement.feasibility import Progress
from verl_mux.placement.model import TESTBED, JobSpec
from verl_mux.placement.planner import Arrive, Leave, Planner


def bench_scheduler(
    jobs: Annotated[int, typer.Option(help="Jobs running while decisions are timed.", min=1)] = 500,
    decisions: Annotated[int, typer.Option(help="Departures, each followed by an arrival, to time.", min=2)] = 200,
    seed: Annotated[int, typer.Option(help="Draws the jobs.")] = 0,
    json: AsJson = False,
) -> None:
    """Time decisions (a job arrives, a job departs) among jobs of the mixed shapes, SLO uniform:1,2, cap 5."""
    show(decision_latency(jobs, decisions, seed), json, _line)


def _line(row: dict[str, Any]) -> str:
    parts = [f"{what} {row[f'{what}_p50_ms']:.2f}, {row[f'{what}_p99_ms']:.2f}" for what in ("cpu", "arrival", "departure")]
    return f"{row['jobs']:>6} jobs: p50 {row['p50_ms']:.2f} ms, p99 {row['p99_ms']:.2f} ms ({'; '.join(parts)})"


def decision_latency(jobs: int, decisions: int = 200, seed: int = 0) -> dict[str, Any]:
    """Milliseconds of the answers to Arrive and Leave (repacking included), with `jobs` jobs placed and their progress
    known. p50 and p99 are over arrivals and departures together; cpu: the same in processor time, which is what the
    clock would show if the machine did nothing else. Decisions run in one thread."""
    rng = random.Random(seed)
    placer, progress = _filled(jobs, rng)
    arrivals: list[tuple[float, float]] = []
    departures: list[tuple[float, float]] = []
    gc.collect()
    for number in range(decisions):
        leaver = rng.choice(sorted(placer.placer.groups.home)) if jobs > 1 else next(iter(placer.placer.groups.home))
        progress.pop(leaver)
        departures.append(_timed(functools.partial(placer.answer, Leave(leaver), progress)))
        newcomer = _job(f"new{number}", rng)
        arrivals.append(_timed(functools.partial(placer.answer, Arrive(newcomer), progress)))
        progress[newcomer.name] = _somewhere(newcomer, rng)
    walls = {"": arrivals + departures, "arrival_": arrivals, "departure_": departures}
    times = {kind: [wall for wall, _ in timed] for kind, timed in walls.items()} | {"cpu_": [cpu for _, cpu in walls[""]]}
    return {
        "jobs": jobs,
        **{
            f"{kind}p{at}_ms": round(quantile(times[kind], at / 100), 3)
            for kind in ("", "cpu_", "arrival_", "departure_")
            for at in (50, 99)
        },
    }


def _filled(jobs: int, rng: random.Random) -> tuple[Planner, dict[str, Progress]]:
    """A placer with `jobs` jobs, each somewhere in its life."""
    placer, progress = Planner.of_one(TESTBED), {}
    for number in range(jobs):
        job = _job(f"job{number}", rng)
        placer.answer(Arrive(job), {})
        progress[job.name] = _somewhere(job, rng)
    return placer, progress


def _job(name: str, rng: random.Random) -> JobSpec:
    shape = rng.choice(FAMILIES["mixed"])
    return draw_job(name, shape, NODES[shape.size], GPUS_PER_NODE, rng.uniform(1, 2), rng)


def _somewhere(job: JobSpec, rng: random.Random) -> Progress:
    """Some hours old and half as far behind as its SLO allows."""
    done = rng.randint(10, 400)
    age_s = done * (job.iteration_s + job.limit_s) / 2
    return Progress(age_s=age_s, done=done, phase="rollout", waited_s=rng.uniform(0, 10))


def _timed(decide: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds on the clock, and of processor time."""
    wall, cpu = time.perf_counter(), time.process_time()
    decide()
    return (time.perf_counter() - wall) * 1000, (time.process_time() - cpu) * 1000


def log_log_slope(points: Sequence[tuple[float, float]]) -> float:
    """Least squares through (log x, log y)."""
    return round(linear_regression([math.log(x) for x, _ in points], [math.log(y) for _, y in points]).slope, 3)
