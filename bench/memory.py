"""`verl-mux bench memory`: a real engine sleeps and wakes at both levels and in parts; its tokens, its memory, and the time
beside that of verl's own way.

Stock's sleep does not run on a CPU; its place takes the same saver with the host copy of the weights that verl's own modes
keep: it goes to the host with every sleep and comes back with every wake, before the sync overwrites it. Runs on the command
line; starts memory_cycles.py.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Annotated, Any

import typer

from bench.measuring import AsJson, answer_of, show
from verl_mux.launcher.run_processes import require_verl

_WITHIN_S = 1500.0  # both engines together


def bench_memory(
    cycles: Annotated[int, typer.Option(help="Of sleep and wake, all five kinds in turn.", min=15)] = 50,
    parameters: Annotated[int, typer.Option(help="Of the model, about.", min=1)] = 200_000_000,
    stock_cycles: Annotated[int, typer.Option(help="Of verl's own way.", min=1)] = 5,
    json: AsJson = False,
) -> None:
    """Sleep and wake of one real engine, without Ray: greedy tokens equal, memory returned, no growth, and the time."""
    require_verl()
    show(measure(cycles, parameters, stock_cycles), json, _in_words)


def measure(cycles: int, parameters: int, stock_cycles: int) -> dict[str, Any]:
    """seconds: medians of a cycle at level 2, ours and stock's; switch_ratio_to_stock: of sleep and wake together, without sync.

    Raises Failure where an engine ended.
    """
    until = time.monotonic() + _WITHIN_S
    ours, stock = _run(until, cycles, parameters), _run(until, stock_cycles, parameters, "--backup")
    both = {"ours": ours["seconds"], "stock": stock["seconds"]}
    seconds = {name: {verb: median(took) for verb, took in measured.items()} for name, measured in both.items()}
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
    given = ["--cycles", str(cycles), "--parameters", str(parameters), *more]
    return answer_of("bench.memory_cycles", *given, within_s=until - time.monotonic(), what="the engine")


def _in_words(found: dict[str, Any]) -> str:
    lines = [
        f"{found['cycles']} cycles; greedy tokens {'equal' if found['tokens_equal'] else 'DIFFER'}",
        f"{found['returned_fraction']:.1%} of what sleeps leaves the process; it grew by {found['growth']:.2%}",
        f"{found['stale_bytes_moved']} bytes of weights moved that a sync overwrites",
    ]
    for name, took in found["seconds"].items():
        lines.append(f"{name:5} sleep {took['sleep']:.3f} s, wake {took['wake']:.3f} s, sync {took['sync']:.3f} s")
    return "\n".join([*lines, f"a switch takes {found['switch_ratio_to_stock']:.2f} of stock's"])
