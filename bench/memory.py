"""`verl-mux bench memory`: a real engine sleeps and wakes at both levels and in parts; its tokens, its memory, and the time
beside that of verl's own way.

Stock's sleep does not run on a CPU; its place takes the same saver with the host copy of the weights that verl's own modes
keep: it goes to the host with every sleep and comes back with every wake, before the sync overwrites it.
"""

from __future__ import annotations

import json as jsonlib
import subprocess
import sys
import time
from statistics import median
from typing import Annotated, Any

import typer

from verl_mux.errors import Failure
from verl_mux.launcher.run_processes import require_verl

_PROCESS = "bench.memory_cycles"
_WITHIN_S = 1500.0  # both engines together


def bench_memory(
    cycles: Annotated[int, typer.Option(help="Of sleep and wake, all five kinds in turn.", min=15)] = 50,
    parameters: Annotated[int, typer.Option(help="Of the model, about.", min=1)] = 200_000_000,
    stock_cycles: Annotated[int, typer.Option(help="Of verl's own way.", min=1)] = 5,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Sleep and wake of one real engine, without Ray: greedy tokens equal, memory returned, no growth, and the time."""
    require_verl()
    found = measure(cycles, parameters, stock_cycles)
    print(jsonlib.dumps(found) if json else "\n".join(_lines(found)))


def measure(cycles: int, parameters: int, stock_cycles: int) -> dict[str, Any]:
    """seconds: medians of a cycle at level 2, ours and stock's; switch_ratio_to_stock: of sleep and wake together, without sync.

    Raises Failure where an engine ended.
    """
    until = time.monotonic() + _WITHIN_S
    ours, stock = _run(until, cycles, parameters), _run(until, stock_cycles, parameters, "--backup")
    seconds = {name: {verb: median(took) for verb, took in measured["seconds"].items()} for name, measured in
               (("ours", ours), ("stock", stock))}  # fmt: skip
    switch = {name: took["sleep"] + took["wake"] for name, took in seconds.items()}
    return {
        "cycles": ours["cycles"],
        "tokens_equal": ours["tokens_equal"],
        "returned_fraction": ours["returned_fraction"],
        "growth": ours["growth"],
        "stale_bytes_moved": ours["stale_bytes"],
        "switch_ratio_to_stock": switch["ours"] / switch["stock"],
        "seconds": seconds,
    }


def _run(until: float, cycles: int, parameters: int, *more: str) -> dict[str, Any]:
    command = [sys.executable, "-m", _PROCESS, "--cycles", str(cycles), "--parameters", str(parameters), *more]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=until - time.monotonic(), check=False)
    except subprocess.TimeoutExpired:
        raise Failure(f"the engines did not end within {_WITHIN_S:g} s; give fewer --cycles or --parameters") from None
    if done.returncode:
        raise Failure(
            f"the engine ended with exit code {done.returncode}: {(done.stderr.strip().splitlines() or ['no word'])[-1]}"
        )
    return jsonlib.loads(done.stdout.strip().splitlines()[-1])


def _lines(found: dict[str, Any]) -> list[str]:
    lines = [
        f"{found['cycles']} cycles; greedy tokens {'equal' if found['tokens_equal'] else 'DIFFER'}",
        f"{found['returned_fraction']:.1%} of what sleeps leaves the process; it grew by {found['growth']:.2%}",
        f"{found['stale_bytes_moved']} bytes of weights moved that a sync overwrites",
    ]
    for name, took in found["seconds"].items():
        lines.append(f"{name:5} sleep {took['sleep']:.3f} s, wake {took['wake']:.3f} s, sync {took['sync']:.3f} s")
    return [*lines, f"a switch takes {found['switch_ratio_to_stock']:.2f} of stock's"]
