"""`verl-mux bench leases`: what taking turns costs by itself, from a release to the grant at a job that waits, over localhost.

A grant is on disk before the coordinator sends it, so beside each hand-over a bare fsync in the same folder is timed: the
difference is what the coordinator adds. Runs on the command line; starts a coordinator.
"""

from __future__ import annotations

import concurrent.futures
import io
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.coordinator_process import CoordinatorProcess
from bench.measuring import AsJson, quantile, show
from verl_mux.coordinator.bus.client import connect
from verl_mux.errors import UserError

_RECORD = b"x" * 300  # as many bytes as the journal writes for a hand-over


def bench_leases(
    rounds: Annotated[int, typer.Option(help="Hand-overs to time.", min=1)] = 500,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where the journal lies; default: the system's temporary folder.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Time hand-overs of a node between two jobs, with a coordinator process that keeps a journal."""
    if directory is not None and not directory.is_dir():
        raise UserError(f"--dir {directory} is no folder; name one that is there")
    show(grant_latency(rounds, directory), json, _in_words)


def _in_words(found: dict[str, Any]) -> str:
    return (
        "release to grant: median {median_us:.0f} us, p99 {p99_us:.0f} us, {rounds} rounds\n"
        "a bare fsync beside it: median {fsync_median_us:.0f} us, p99 {fsync_p99_us:.0f} us"
    ).format(**found)


def grant_latency(rounds: int = 500, directory: Path | None = None) -> dict[str, Any]:
    """Microseconds from just before `release` in one job to just after the waiting `acquire` of another returns."""
    taken, synced = [], []
    with (
        CoordinatorProcess({"pools": {"rollout": {"nodes": [{"name": "r0"}]}}}, directory=directory) as coordinator,
        (coordinator.folder / "beside").open("ab", buffering=0) as beside,
    ):
        turns = hand_overs(coordinator.address, "r0")
        for _ in range(rounds):
            taken.append(next(turns) * 1e6)
            synced.append(_write_and_sync(beside) * 1e6)
        turns.close()
    figures = {"median_us": statistics.median(taken), "p99_us": quantile(taken, 0.99)}
    return {"rounds": rounds, **figures, "fsync_median_us": statistics.median(synced), "fsync_p99_us": quantile(synced, 0.99)}


def hand_overs(address: str, node: str) -> Iterator[float]:
    """Seconds of each hand-over of the node between two jobs, both clients in this process, without end. Each time the other job
    is seen to wait before the node is released."""
    jobs = [connect(address, name, {"rollout": [node]}, uid=f"{name}:bench") for name in ("hand", "over")]
    holder, waiter = jobs
    lease = holder.acquire("rollout", step=1)
    with concurrent.futures.ThreadPoolExecutor(1) as waits:
        try:
            while True:
                waiting = waits.submit(lambda mux: (mux.acquire("rollout", step=1), time.perf_counter()), waiter)
                lease.wanted.wait()
                released = time.perf_counter()
                holder.release(lease)
                lease, granted = waiting.result()
                holder, waiter = waiter, holder
                yield granted - released
        finally:
            for mux in jobs:
                mux.close()


def _write_and_sync(file: io.FileIO) -> float:
    """Seconds, as the journal writes."""
    began = time.perf_counter()
    file.write(_RECORD)
    os.fdatasync(file.fileno())
    return time.perf_counter() - began
