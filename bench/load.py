"""Hundreds of jobs at one coordinator: how long a grant takes, and how an outage ends.

Runs on the command line; starts a coordinator.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from bench.coordinator_process import CoordinatorProcess
from bench.crowd import Crowd
from bench.measuring import AsJson, quantile, show
from verl_mux.errors import UserError


def bench_load(
    jobs: Annotated[int, typer.Option(help="Jobs, two to a node: half of them wait.")] = 500,
    seconds: Annotated[float, typer.Option(help="How long each part is measured.", min=1)] = 20.0,
    phases: Annotated[float, typer.Option(help="Phases that end a second.", min=0)] = 10.0,
    outage: Annotated[float, typer.Option(help="Seconds for which the coordinator is gone.", min=0)] = 60.0,
    json: AsJson = False,
) -> None:
    """Measure a coordinator process with many jobs on real sockets."""
    if jobs < 2 or jobs % 2:
        raise UserError(f"--jobs is {jobs}; an even number of 2 or more is needed")
    show(load(jobs, seconds, phases, outage), json)


def load(jobs: int, seconds: float, phases: float, outage: float) -> dict[str, Any]:
    """`cores`: processor time of the coordinator a second. `all_back_s` counts from when it listens again."""
    nodes = [f"r{i}" for i in range(jobs // 2)]
    config = {"pools": {"rollout": {"nodes": [{"name": node} for node in nodes]}}, "lease_timeout": outage + 30}
    with CoordinatorProcess(config) as coordinator:
        crowd = Crowd(coordinator.address, nodes)
        crowd.register()
        crowd.run(min(3.0, seconds))  # what the registrations left behind is through by then
        found = {"jobs": jobs, **_busy(coordinator, crowd, seconds, phases)}
        found |= _outage(coordinator, crowd, outage, seconds)
        crowd.close()
    return found


def _busy(coordinator: CoordinatorProcess, crowd: Crowd, seconds: float, phases: float) -> dict[str, Any]:
    before, began = coordinator.cpu_s, time.monotonic()
    crowd.run(seconds, phases)
    cores = (coordinator.cpu_s - before) / (time.monotonic() - began)
    return {"cores": round(cores, 3), **grants(crowd), "rss_mib": round(coordinator.rss_mib, 1)}


def grants(crowd: Crowd) -> dict[str, Any]:
    taken = crowd.grants_s
    p50, p99 = (round(quantile(taken, part) * 1e3, 2) if taken else None for part in (0.5, 0.99))
    return {"grants": len(taken), "grant_p50_ms": p50, "grant_p99_ms": p99}


def _outage(coordinator: CoordinatorProcess, crowd: Crowd, outage: float, seconds: float) -> dict[str, Any]:
    coordinator.stop()
    crowd.run(outage)
    coordinator.start()
    began = time.monotonic()
    back_s = crowd.run_until(lambda: all(member.heard > began for member in crowd.members), 300)
    crowd.grants_s.clear()
    crowd.run(min(5.0, seconds), 10.0)
    return {"outage_s": outage, "all_back_s": round(back_s, 2), "grant_p99_ms_after": grants(crowd)["grant_p99_ms"]}
