"""`verl-mux bench predictor`: length predictors on a file. `verl-mux bench rollout`: what shortens the tail, on real jobs.

Runs on the command line.
"""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.measuring import AsJson, show
from verl_mux.errors import UserError


def bench_predictor(
    file: Annotated[Path, typer.Argument(help="JSON lines: id, prompt, epoch, length.", show_default=False)],
    json: AsJson = False,
    predictor: Annotated[list[str] | None, typer.Option(help="Measure only this one; may be repeated.")] = None,
    slots: Annotated[int, typer.Option(help="Requests that run at once in the simulated engine.", min=1)] = 64,
) -> None:
    """Order each epoch by what the earlier ones teach, and say how good the order is."""
    from bench.rollouts.predictor import MEASURED, measure, read_rows

    unknown = [name for name in predictor or () if name not in MEASURED]
    if unknown:
        raise UserError(f"--predictor {unknown[0]}: not a predictor this can measure; allowed: {', '.join(MEASURED)}")
    show(measure(read_rows(file), names=predictor or MEASURED, slots=slots), json, _table)


def bench_rollout(
    file: Annotated[Path, typer.Option(help="A run file; its first job is run, alone.")] = Path("examples/long_tail.yaml"),
    directory: Annotated[Path, typer.Option("--dir", help="Where the runs go.")] = Path("runs/bench_rollout"),
    mode: Annotated[list[str] | None, typer.Option(help="Run this mode; may be repeated. Default: five.")] = None,
    steps: Annotated[int, typer.Option(help="Steps of each job.", min=4)] = 24,
    warmup: Annotated[int, typer.Option(help="Steps left out of the times: pools fill, caches warm.", min=0)] = 6,
    seeds: Annotated[int, typer.Option(help="Seeds a mode.", min=1)] = 3,
    first_seed: Annotated[int, typer.Option(help="The first of them.", min=0)] = 1,
    rate: Annotated[float, typer.Option(help="Over-sampling rate.", min=0)] = 1.0,
    override: Annotated[list[str] | None, typer.Option(help="One more key=value for every job; may be repeated.")] = None,
    json: AsJson = False,
) -> None:
    """Step time and reward with over-sampling and with segments, beside verl's own trainers and plain steps of ours.

    About three minutes a mode and seed.
    """
    from bench.rollouts.jobs import run_all
    from bench.rollouts.modes import DEFAULT_MODES, MODES, figures
    from verl_mux.launcher import run_file

    chosen = list(dict.fromkeys(mode or DEFAULT_MODES))
    if unknown := [name for name in chosen if name not in MODES]:
        raise UserError(f"--mode {unknown[0]}: not a mode this can measure; allowed: {', '.join(MODES)}")
    if warmup >= steps - 1:
        raise UserError(f"--warmup is {warmup} of {steps} steps; at least two must be left to measure")
    run = run_file.read(file, directory)
    runs = run_all(run, chosen, steps, range(first_seed, first_seed + seeds), rate, override or [])
    result = figures(runs, warmup)
    print(jsonlib.dumps(result, indent=2) if json else _modes_table(result["modes"]))


def bench_migration(
    file: Annotated[Path, typer.Option(help="A run file in which a job migrates its tail, or grows.")] = Path(
        "examples/migration.yaml"
    ),
    directory: Annotated[Path, typer.Option("--dir", help="Where the two runs go.")] = Path("runs/bench_migration"),
    json: AsJson = False,
) -> None:
    """Two jobs with long-tail migration, or with tail rounds and growth (--file examples/growth.yaml), and without: makespan,
    and whether the responses are equal.

    About twelve minutes.
    """
    from bench.rollouts.migration import measure

    show(measure(file, directory), json, _migration_in_words)


def _migration_in_words(result: dict[str, Any]) -> str:
    return (
        "makespan {makespan_s[with]} s with it, {makespan_s[without]} s without: {ratio}x; nodes went back early {freed} times"
        " and were lent {grown} times, {migrated_requests} requests moved; {equal_responses} of {responses} responses are equal"
    ).format(**result)


def _modes_table(modes: dict[str, dict[str, Any]]) -> str:
    head = f"{'mode':<20} {'step':>7} {'rollout':>8} {'to sync':>8} {'to plain':>8} {'reward':>7} {'wasted':>7}"
    lines = [
        f"{name:<20} {m['step_s']:>5.2f} s {m['rollout_s']:>6.2f} s {m['time_ratio_to_sync'] or float('nan'):>8.2f} "
        f"{m['time_ratio_to_plain'] or float('nan'):>8.2f} {m['reward_last']:>7.3f} {m['wasted_token_fraction']:>7.1%}"
        for name, m in modes.items()
    ]
    return "\n".join([head, *lines])


def _table(results: dict[str, dict[str, Any]]) -> str:
    head = f"{'predictor':<14} {'tau':>6} {'sjf mean':>9} {'ljf makespan':>13}  tau by epoch"
    lines = [
        f"{name:<14} {r['kendall_tau']:>6.3f} {r['sjf_mean_completion_ratio']:>9.3f} "
        f"{r['ljf_makespan_ratio']:>13.3f}  {' '.join(f'{tau:.3f}' for tau in r['kendall_tau_by_epoch'])}"
        for name, r in results.items()
    ]
    return "\n".join([head, *lines])
