"""What taking turns costs by itself: time from a release to the grant at a job that waits, over localhost."""

from __future__ import annotations

import concurrent.futures
import json as json_module
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from verl_mux.coordinator.client import LocalMux, connect
from verl_mux.errors import Failure

_CONFIG = "pools: {rollout: {nodes: [{name: r0}]}, train: {nodes: [{name: t0}]}}\n"
_NODES = {"rollout": ["r0"], "train": ["t0"]}


def bench_leases(
    rounds: Annotated[int, typer.Option(help="Hand-overs to time.")] = 500,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time hand-overs of a node between two jobs, with a coordinator process that keeps a journal."""
    found = grant_latency(rounds)
    if json:
        print(json_module.dumps(found))
    else:
        print("release to grant: median {median_us:.0f} us, p99 {p99_us:.0f} us, {rounds} rounds".format(**found))


def grant_latency(rounds: int = 500) -> dict[str, Any]:
    """Microseconds from just before `release` in one job to just after the waiting `acquire` of another returns.

    The coordinator is a process of its own with a journal on disk; both jobs are clients in this process.
    """
    with _coordinator() as address, concurrent.futures.ThreadPoolExecutor(2) as pool:
        jobs = [connect(address, name, _NODES, uid=f"{name}:bench") for name in ("a", "b")]
        taken = _hand_over(pool, jobs, rounds)
        for mux in jobs:
            mux.close()
    taken.sort()
    return {"rounds": rounds, "median_us": statistics.median(taken), "p99_us": taken[int(0.99 * (rounds - 1))]}


def _hand_over(pool: concurrent.futures.Executor, jobs: list[LocalMux], rounds: int) -> list[float]:
    """The node goes to and fro; each time the other job is seen to wait before it is released."""
    holder, waiter = jobs
    lease = holder.acquire("rollout", step=1)
    taken = []
    for _ in range(rounds):
        waiting = pool.submit(lambda mux: (mux.acquire("rollout", step=1), time.perf_counter()), waiter)
        while not holder.has_waiters("rollout"):
            time.sleep(0.0005)
        released_at = time.perf_counter()
        holder.release(lease)
        lease, granted_at = waiting.result()
        taken.append((granted_at - released_at) * 1e6)
        holder, waiter = waiter, holder
    return taken


@contextmanager
def _coordinator() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory, "mux.yaml")
        config.write_text(_CONFIG)
        journal = str(Path(directory, "journal.sqlite"))
        command = [sys.executable, "-m", "verl_mux.cli", "coordinator", "--config", str(config)]
        command += ["--bind", "tcp://127.0.0.1:0", "--journal", journal]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            line = process.stderr.readline()
            if " at tcp://" not in line:
                raise Failure(f"the coordinator did not start: {line.strip()}")
            yield line.split(" at ")[1].split()[0]
        finally:
            process.terminate()
            process.wait()
            process.stderr.close()
