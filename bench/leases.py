"""What taking turns costs by itself: time from a release to the grant at a job that waits, over localhost.

A grant is on disk before the coordinator sends it, so beside each hand-over a bare fsync in the same folder is timed: the
difference is what the coordinator adds.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import json as json_module
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import typer

from verl_mux.coordinator.bus.client import LocalMux, connect
from verl_mux.coordinator.config import make_config
from verl_mux.coordinator.server import Coordinator
from verl_mux.errors import Failure, UserError

_CONFIG = {"pools": {"rollout": {"nodes": [{"name": "r0"}]}, "train": {"nodes": [{"name": "t0"}]}}}
_RECORD_BYTES = 300
_NODES = {"rollout": ["r0"], "train": ["t0"]}


def bench_leases(
    rounds: Annotated[int, typer.Option(help="Hand-overs to time.", min=1)] = 500,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where the journal lies; default: the system's temporary folder.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time hand-overs of a node between two jobs, with a coordinator process that keeps a journal."""
    if directory is not None and not directory.is_dir():
        raise UserError(f"--dir {directory} is no folder; name one that is there")
    found = grant_latency(rounds, directory)
    if json:
        print(json_module.dumps(found))
    else:
        print("release to grant: median {median_us:.0f} us, p99 {p99_us:.0f} us, {rounds} rounds".format(**found))
        print("a bare fsync beside it: median {fsync_median_us:.0f} us, p99 {fsync_p99_us:.0f} us".format(**found))


def grant_latency(rounds: int = 500, directory: Path | None = None) -> dict[str, Any]:
    """Microseconds from just before `release` in one job to just after the waiting `acquire` of another returns.

    The coordinator is a process of its own with a journal on disk; both jobs are clients in this process.
    """
    with tempfile.TemporaryDirectory(dir=directory) as folder, _coordinator(folder) as address:
        jobs = [connect(address, name, _NODES, uid=f"{name}:bench") for name in ("a", "b")]
        with concurrent.futures.ThreadPoolExecutor(2) as pool, Path(folder, "beside").open("ab", buffering=0) as beside:
            taken, synced = _hand_over(pool, jobs, rounds, beside)
        for mux in jobs:
            mux.close()
    figures = {"median_us": statistics.median(taken), "p99_us": _p99(taken)}
    return {"rounds": rounds, **figures, "fsync_median_us": statistics.median(synced), "fsync_p99_us": _p99(synced)}


def _p99(taken: list[float]) -> float:
    return sorted(taken)[int(0.99 * (len(taken) - 1))]


def _hand_over(
    pool: concurrent.futures.Executor, jobs: list[LocalMux], rounds: int, beside: io.FileIO
) -> tuple[list[float], list[float]]:
    """The node goes to and fro; each time the other job is seen to wait before it is released. Then a bare fsync."""
    holder, waiter = jobs
    lease = holder.acquire("rollout", step=1)
    taken, synced = [], []
    for _ in range(rounds):
        waiting = pool.submit(lambda mux: (mux.acquire("rollout", step=1), time.perf_counter()), waiter)
        while not holder.contended("rollout"):
            time.sleep(0.0005)
        released_at = time.perf_counter()
        holder.release(lease)
        lease, granted_at = waiting.result()
        taken.append((granted_at - released_at) * 1e6)
        synced.append(_write_and_sync(beside) * 1e6)
        holder, waiter = waiter, holder
    return taken, synced


def _write_and_sync(file: io.FileIO) -> float:
    """Seconds for as many bytes as a hand-over's record has, as the journal writes them."""
    began = time.perf_counter()
    file.write(b"x" * _RECORD_BYTES)
    os.fdatasync(file.fileno())
    return time.perf_counter() - began


@contextlib.contextmanager
def _coordinator(directory: str) -> Iterator[str]:
    processes = multiprocessing.get_context("spawn")
    ours, theirs = processes.Pipe()
    process = processes.Process(target=_serve, args=(str(Path(directory, "journal")), theirs))
    process.start()
    theirs.close()
    try:
        yield _address(ours)
    finally:
        ours.close()
        process.join()


def _address(coordinator: Connection) -> str:
    try:
        return coordinator.recv()
    except EOFError:
        raise Failure("the coordinator did not start") from None


def _serve(journal: str, bench: Connection) -> None:
    """Until the other end is closed."""
    with Coordinator(make_config(_CONFIG), journal) as service, contextlib.suppress(EOFError):
        bench.send(service.address)
        bench.recv()
