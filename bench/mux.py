"""`verl-mux bench mux`: the same two jobs one after the other, both at once without coordination, and interleaved, in one run.

Runs on the command line; starts the run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from bench.measuring import AsJson
from verl_mux.coordinator.core.settings import MODES
from verl_mux.errors import UserError
from verl_mux.launcher import run_file, run_intervals
from verl_mux.launcher.command import run_jobs
from verl_mux.launcher.run_file import RunFile
from verl_mux.launcher.run_summary import Figures
from verl_mux.profiling.plain.lines import throughput_ratio


def bench_mux(
    file: Annotated[Path, typer.Option(help="A run file of two jobs; its schedule is replaced.")] = Path("examples/demo.yaml"),
    directory: Annotated[Path, typer.Option("--dir", help="Where the run goes.")] = Path("runs/bench_mux"),
    steps: Annotated[int, typer.Option(help="Steps of each job in each of the three ways.")] = 7,
    as_json: AsJson = False,
) -> None:
    """Throughput, step time and peak device memory of two jobs, three ways side by side. Takes about ten minutes on two cores."""
    if steps < 3:
        raise UserError(f"--steps is {steps}; at least 3 are needed for a median of periods")
    run = _three_ways(run_file.read(file, directory), steps)
    run_jobs(run)
    result = figures(run)
    print(json.dumps(result, indent=2)) if as_json else _print(result)


def _three_ways(run: RunFile, steps: int) -> RunFile:
    schedule = [{"mode": mode, "steps": steps} for mode in MODES[:-1]] + [{"mode": MODES[-1]}]
    overrides = [*run.overrides, f"trainer.total_training_steps={steps * len(MODES)}"]
    return msgspec.structs.replace(run, coordinator={**run.coordinator, "schedule": schedule}, overrides=overrides)


def figures(run: RunFile) -> dict[str, Any]:
    """The bench's result from a finished run's files. Bytes are those of tagged device memory."""
    directory, jobs, config = run.directory, list(run.jobs), run.coordinator_config()
    measured = Figures(run_intervals.read(directory, jobs), config.schedule, jobs)
    peaks = json.loads((directory / "peaks.json").read_text())
    ways: dict[str, Any] = {}
    for index, mode in enumerate(MODES):
        periods = measured.periods(mode)
        bytes_by_node = {node: by_segment.get(str(index), 0) for node, by_segment in peaks.items()}
        ways[mode] = {"period_s": periods, "peak_device_bytes": bytes_by_node}
    alone = ways["sequential"]["period_s"]
    for mode in MODES[1:]:
        ways[mode]["throughput_ratio"] = throughput_ratio(alone, ways[mode]["period_s"])
    ways["sequential"]["throughput_ratio"] = 1.0
    return {**ways, "memory": {node: _memory_ratios(ways, node) for node in peaks}}


def _memory_ratios(ways: dict[str, Any], node: str) -> dict[str, float]:
    alone, both, turns = (ways[mode]["peak_device_bytes"][node] for mode in MODES)
    return {
        "interleaved_over_larger_alone": round(turns / alone, 4) if alone else 0.0,
        "uncoordinated_over_interleaved": round(both / turns, 4) if turns else 0.0,
    }


def _print(result: dict[str, Any]) -> None:
    table = Table(title="two jobs, three ways")
    for column in ("way", "throughput", "step", "peak device memory"):
        table.add_column(column)
    for mode in MODES:
        way = result[mode]
        periods = ", ".join(f"{job} {p:.2f} s" if p else f"{job} -" for job, p in way["period_s"].items())
        memory = ", ".join(f"{node} {n / 2**20:.0f} MiB" for node, n in way["peak_device_bytes"].items())
        ratio = way["throughput_ratio"]
        table.add_row(mode, f"{ratio:.2f}x" if ratio else "-", periods, memory)
    Console().print(table)
