"""Thousands of jobs at one coordinator: what a heartbeat costs it, how long a grant takes, and how an outage ends."""

from __future__ import annotations

import json as json_module
import multiprocessing
import resource
import time
from multiprocessing.connection import Connection
from typing import Annotated, Any

import typer
import zmq

from bench.bare_router import echo_us
from bench.coordinator_process import CoordinatorProcess
from bench.crowd import Crowd
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.bus.access.keys import JOB, for_address
from verl_mux.coordinator.bus.conversation import BEAT_EVERY_S
from verl_mux.coordinator.bus.link import connect_to, dealer
from verl_mux.coordinator.command import fetch_status
from verl_mux.errors import UserError


def bench_load(
    jobs: Annotated[int, typer.Option(help="Jobs, two to a node: half of them wait.")] = 2000,
    seconds: Annotated[float, typer.Option(help="How long each part is measured.", min=1)] = 20.0,
    phases: Annotated[float, typer.Option(help="Phases that end a second.", min=0)] = 10.0,
    idle: Annotated[int, typer.Option(help="Further clients that are connected and say nothing.", min=0)] = 10_000,
    outage: Annotated[float, typer.Option(help="Seconds for which the coordinator is gone.", min=0)] = 60.0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure a coordinator process with many jobs on real sockets."""
    if jobs < 2 or jobs % 2:
        raise UserError(f"--jobs is {jobs}; an even number of 2 or more is needed")
    found = load(jobs, seconds, phases, idle, outage)
    print(json_module.dumps(found) if json else "\n".join(f"{name}: {value}" for name, value in found.items()))


def load(jobs: int, seconds: float, phases: float, idle: int, outage: float) -> dict[str, Any]:
    """`heartbeat_us`: processor time of the coordinator over the heartbeats while nothing else happens, its watch over jobs
    included; `heartbeat_zmq_us`: what ZeroMQ's threads take beside that; `bare_us`: what a router takes that only sends such a
    frame back, measured right before it. `all_back_s` counts from when it listens again."""
    nodes = [f"r{i}" for i in range(jobs // 2)]
    config = {"pools": {"rollout": {"nodes": [{"name": node} for node in nodes]}}, "lease_timeout": outage + 30}
    bare_us = echo_us(m.encode(m.Heartbeat(job="bare", uid="bare", client="bare", beat=1)), jobs / BEAT_EVERY_S, seconds / 4)
    with CoordinatorProcess(config) as coordinator:
        crowd = Crowd(coordinator.address, nodes)
        crowd.register()
        found: dict[str, Any] = {
            **{"jobs": jobs, "bare_us": round(bare_us, 1)},
            **_quiet(coordinator, crowd, seconds),
            **_busy(coordinator, crowd, seconds, phases),
        }
        found |= _idle(coordinator, crowd, idle, seconds)
        found |= _outage(coordinator, crowd, outage, seconds)
        crowd.close()
    return found


def _quiet(coordinator: CoordinatorProcess, crowd: Crowd, seconds: float) -> dict[str, Any]:
    crowd.run(min(3.0, seconds))  # what the registrations left behind is through by then
    before, before_zmq, beats = coordinator.cpu_s, coordinator.zmq_cpu_s, crowd.beats
    crowd.run(seconds)
    beats = crowd.beats - beats
    zmq_us = (coordinator.zmq_cpu_s - before_zmq) * 1e6 / beats
    all_us = (coordinator.cpu_s - before) * 1e6 / beats
    return {
        **{"heartbeat_us": round(all_us - zmq_us, 1), "heartbeat_zmq_us": round(zmq_us, 1)},
        "heartbeats_per_second": round(beats / seconds),
    }


def _busy(coordinator: CoordinatorProcess, crowd: Crowd, seconds: float, phases: float) -> dict[str, Any]:
    before, began = coordinator.cpu_s, time.monotonic()
    crowd.run(seconds, phases)
    cores = (coordinator.cpu_s - before) / (time.monotonic() - began)
    asked = time.monotonic()
    fetch_status(coordinator.address, 60.0)
    status_s = time.monotonic() - asked
    return {
        "cores": round(cores, 3),
        **grants(crowd),
        "rss_mib": round(coordinator.rss_mib, 1),
        "status_ms": round(status_s * 1e3, 1),
    }


def grants(crowd: Crowd) -> dict[str, Any]:
    taken = sorted(crowd.grants_s)
    if not taken:
        return {"grants": 0, "grant_p50_ms": None, "grant_p99_ms": None}
    p50, p99 = (round(taken[min(len(taken) - 1, int(share * len(taken)))] * 1e3, 2) for share in (0.5, 0.99))
    return {"grants": len(taken), "grant_p50_ms": p50, "grant_p99_ms": p99}


def _idle(coordinator: CoordinatorProcess, crowd: Crowd, idle: int, seconds: float) -> dict[str, Any]:
    """Connected from processes of their own, each within its limit of open files."""
    at_once = max(1, (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 200) // 3)
    processes, held = multiprocessing.get_context("spawn"), []
    for first in range(0, idle, at_once):
        ours, theirs = processes.Pipe()
        process = processes.Process(target=_connected, args=(coordinator.address, min(at_once, idle - first), theirs))
        process.start()
        held.append((ours, process))
    connected = 0
    for ours, _ in held:
        crowd.run_until(ours.poll, 300)
        connected += ours.recv()
    crowd.grants_s.clear()
    crowd.run(min(5.0, seconds), 10.0)
    found = {"idle_clients": connected, "idle_rss_mib": round(coordinator.rss_mib, 1)}
    found["idle_grant_p99_ms"] = grants(crowd)["grant_p99_ms"]
    for ours, process in held:
        ours.send(None)
        process.join()
    return found


def _connected(address: str, count: int, bench: Connection) -> None:
    """Each client asks once, so that its connection is known, and is then silent until the bench ends."""
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, count + 10)
    sockets, answered, keys = [], 0, for_address(address, None, JOB)
    for _ in range(count):
        sockets.append(socket := dealer(context, None, keys))
        connect_to(address, socket)
        socket.send(m.encode(m.Heartbeat(job="stranger", uid="stranger", client="stranger", beat=1)))
    for socket in sockets:
        answered += bool(socket.poll(60_000))
    bench.send(answered)
    bench.recv()
    context.destroy(linger=0)


def _outage(coordinator: CoordinatorProcess, crowd: Crowd, outage: float, seconds: float) -> dict[str, Any]:
    coordinator.stop()
    crowd.run(outage)
    coordinator.start()
    began = time.monotonic()
    back_s = crowd.run_until(lambda: all(member.heard > began for member in crowd.members), 300)
    crowd.grants_s.clear()
    crowd.run(min(5.0, seconds), 10.0)
    return {"outage_s": outage, "all_back_s": round(back_s, 2), "grant_p99_ms_after": grants(crowd)["grant_p99_ms"]}
