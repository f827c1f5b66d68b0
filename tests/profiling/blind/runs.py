"""Draws runs, plays them, writes their logs."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from tests.profiling.blind.job import Job
from tests.profiling.blind.log import Cluster, Lines
from tests.profiling.blind.shapes import Run, draw_fault, draw_run

LEAST_COST = 0.10  # of a step, on the average of the fault's steps


def draw(seed: int, mode: str, kind: str | None) -> Run:
    """A run, with a fault of this kind that costs enough (None: a healthy one)."""
    rng = random.Random(f"{seed} {mode} {kind}")
    for _ in range(20):
        healthy = _even(draw_run(rng, seed, mode, kind), rng.uniform(0.75, 1.1))
        if kind is None:
            return healthy
        fault, twin = draw_fault(rng, healthy, kind), play(healthy, quiet=True)
        for _ in range(5):
            steps = range(fault.first, fault.last + 1)
            with_it = play(replace(healthy, fault=fault), quiet=True)
            before, after = (sum(own[fault.job or "a"][s] for s in steps) for own in (twin.own, with_it.own))
            if after / before - 1 >= LEAST_COST:
                return replace(healthy, fault=replace(fault, cost=after / before - 1))
            fault = replace(fault, strength=fault.strength * (0.7 if kind == "kv_starvation" else 1.5))
    raise RuntimeError(f"no {kind} in {mode} that costs a tenth of a step, seed {seed}")


def _even(run: Run, busy: float) -> Run:
    """Jobs that take turns are put together so that both pools are busy: the training pool `busy` times as much as the other."""
    if len(run.jobs) == 1:
        return run
    held = play(run, quiet=True).held
    return replace(run, train_s=run.train_s * busy * held["rollout"] / run.nodes / held["train"])


def play(run: Run, quiet: bool = False) -> Lines:
    """The lines of the run's log."""
    lines = Lines(quiet)
    cluster = Cluster(run, lines)
    jobs = {name: Job(run, name, lines, cluster) for name in run.jobs}
    lives = {name: job.steps() if job.mux else job.streamed() for name, job in jobs.items()}
    for name, job in jobs.items():
        nodes = {"rollout": job.nodes, "train": ["t0"]}
        cluster.say(0, 0.0, "job_registered", job=name, nodes=nodes, seed=run.seed, steps=run.steps)
        job.at = job.rng.uniform(0, 5)
        cluster.asks[name] = (job.at, next(lives[name]))
    while cluster.asks:
        name = min(cluster.asks, key=lambda name: cluster.asks[name][0])
        asked, nodes = cluster.asks.pop(name)
        granted = max([asked, *(cluster.free[node] for node in nodes)])
        try:
            nodes = lives[name].send(granted)
            cluster.asks[name] = (jobs[name].at, nodes)
        except StopIteration:
            cluster.say(run.steps, jobs[name].at, "job_exited", job=name, reason="finished")
    return lines


def write(directory: Path, run: Run) -> None:
    """The run's log, as `mux` lays it out."""
    write_lines(directory, play(run))


def write_lines(directory: Path, lines: Lines) -> None:
    for (job, role, step, worker), own in lines.files.items():
        path = directory / job / "events" / role / f"step_{step}" / f"worker_{worker}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(line + b"\n" for _, line in sorted(own)))
