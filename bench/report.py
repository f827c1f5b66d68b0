"""`verl-mux bench report`: what the report itself costs. Runs on the command line; starts `verl-mux report`."""

from __future__ import annotations

import json as jsonlib
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from bench.made_log import LAYOUTS, make_log
from bench.measuring import AsJson, show
from verl_mux.errors import Failure, UserError

IN_WORDS = "{events} events, {bytes} bytes: {seconds:.1f} s ({cpu_seconds:.1f} s of CPU), {peak_mib:.0f} MiB, {cores} cores"
RUN_REPORT = "import typer; from verl_mux.report_command import report; typer.run(report)"


def bench_report(
    events: Annotated[int, typer.Option(help="Events of the made log, at least.")] = 10_000_000,
    directory: Annotated[Path | None, typer.Option("--dir", help="Where the made log goes and stays.")] = None,
    cores: Annotated[int, typer.Option(help="Cores that the report may use.")] = 2,
    layout: Annotated[str, typer.Option(help="ours, or sglang: that of the sglang profiling scripts.")] = "ours",
    json: AsJson = False,
) -> None:
    """Make a log of multi-turn requests and time `verl-mux report --json` on it: seconds, and memory of all its processes."""
    if events < 1 or cores < 1:
        raise UserError(f"--events {events} --cores {cores}: both are at least 1")
    if layout not in LAYOUTS:
        raise UserError(f"--layout {layout}: not known; allowed: {', '.join(LAYOUTS)}")
    import polars  # noqa: F401  the report that is timed needs it; missed before the log is made

    with tempfile.TemporaryDirectory(dir=directory.parent if directory else None) as scratch:
        folder = directory or Path(scratch)
        written, nbytes = make_log(folder, events, layout)
        found = {"events": written, "bytes": nbytes, "cores": cores, **time_report(folder, cores)}
    show(found, json, lambda it: IN_WORDS.format(**it))


def time_report(directory: Path, cores: int) -> dict[str, Any]:
    """Seconds and MiB of `verl-mux report --json` as a process of its own, held to `cores` cores.

    `peak_mib` is the sum of the resident sets of all its processes, shared pages counted in each: no less than what it took.
    """
    command = [sys.executable, "-c", RUN_REPORT, str(directory), "--json", "--processes", str(cores)]
    allowed = sorted(psutil.Process().cpu_affinity())[:cores]
    environment = os.environ | {"POLARS_MAX_THREADS": str(cores)}
    began, spent = time.perf_counter(), _children_seconds()
    process = psutil.Popen(command, stdout=subprocess.PIPE, env=environment)
    process.cpu_affinity(allowed)
    peak = _Peak(process)
    output = process.communicate()[0]
    seconds = time.perf_counter() - began
    if process.returncode:
        raise Failure(f"verl-mux report ended with {process.returncode}")
    summary = jsonlib.loads(output)
    counts = {"requests": summary["requests"], "findings": len(summary["findings"]), "skipped_lines": summary["skipped_lines"]}
    cpu = round(_children_seconds() - spent, 2)
    return {"seconds": round(seconds, 2), "cpu_seconds": cpu, "peak_mib": round(peak.stop() / 2**20, 1), **counts}


def _children_seconds() -> float:
    """CPU seconds of this process's ended children and theirs: what the machine did, however busy it was with others."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class _Peak:
    """The most memory that a process and its children have together, looked at ten times a second."""

    def __init__(self, process: psutil.Process) -> None:
        self._process, self._most, self._over = process, 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(0.1):
            self._most = max(self._most, self._now())

    def _now(self) -> int:
        total = 0
        try:
            for process in [self._process, *self._process.children(recursive=True)]:
                total += process.memory_info().rss
        except psutil.Error:
            pass
        return total

    def stop(self) -> int:
        """Bytes."""
        self._over.set()
        self._thread.join()
        return self._most
