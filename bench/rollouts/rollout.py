"""`verl-mux bench rollout`: what shortens the tail, on real jobs, one after the other.

Runs on the command line; starts the jobs.
"""

from __future__ import annotations

import json as jsonlib
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from bench.measuring import AsJson
from bench.rollouts.modes import DEFAULT_MODES, GROUPS, MODES, RESPONSES, SAMPLES, Run, figures, overrides, read_run
from verl_mux.errors import Failure, UserError
from verl_mux.launcher import run_file
from verl_mux.launcher.command import prepare
from verl_mux.launcher.folders import make_folder
from verl_mux.launcher.run_file import RunFile
from verl_mux.launcher.run_processes import JobProcess, require_verl

_TICK_S = 0.5
# Few responses at once: a CPU engine's step costs as much as it has requests, a GPU's does not, and it is the GPU's tail that
# is being stood in for. Validation at the end, four answers to each of problems that no mode has chosen by length.
_JOB = [
    "data.train_batch_size={groups}",
    "actor_rollout_ref.actor.ppo_mini_batch_size={groups}",
    "actor_rollout_ref.rollout.n={samples}",
    "trainer.total_training_steps={steps}",
    "trainer.test_freq={steps}",
    "actor_rollout_ref.rollout.val_kwargs.n=4",
    "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
    "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
    "actor_rollout_ref.rollout.enable_prefix_caching=True",
    "mux.seeded_sampling=true",
    "trainer.rollout_data_dir={dumps}",
]
_MAX_RESPONSE = "data.max_response_length="


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
    chosen = list(dict.fromkeys(mode or DEFAULT_MODES))
    if unknown := [name for name in chosen if name not in MODES]:
        raise UserError(f"--mode {unknown[0]}: not a mode this can measure; allowed: {', '.join(MODES)}")
    if warmup >= steps - 1:
        raise UserError(f"--warmup is {warmup} of {steps} steps; at least two must be left to measure")
    run = run_file.read(file, directory)
    runs = run_all(run, chosen, steps, range(first_seed, first_seed + seeds), rate, override or [])
    result = figures(runs, warmup)
    print(jsonlib.dumps(result, indent=2) if json else _modes_table(result["modes"]))


def _modes_table(modes: dict[str, dict[str, Any]]) -> str:
    head = f"{'mode':<20} {'step':>7} {'rollout':>8} {'to sync':>8} {'to plain':>8} {'reward':>7} {'wasted':>7}"
    lines = [
        f"{name:<20} {m['step_s']:>5.2f} s {m['rollout_s']:>6.2f} s {m['time_ratio_to_sync'] or float('nan'):>8.2f} "
        f"{m['time_ratio_to_plain'] or float('nan'):>8.2f} {m['reward_last']:>7.3f} {m['wasted_token_fraction']:>7.1%}"
        for name, m in modes.items()
    ]
    return "\n".join([head, *lines])


def run_all(run: RunFile, modes: list[str], steps: int, seeds: range, rate: float, more: list[str]) -> list[Run]:
    """Every mode with every seed, seed by seed, so that a slow hour of the machine is shared by all modes.

    Raises:
        Failure: a job ended with an error. UserError: it refused its keys, or they do not say how long a response may be.
    """
    require_verl()
    try:
        Path(run.dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {run.dir}: {error.strerror}; choose another --dir") from None
    (name, spec), *others = run.jobs.items()
    longest = _longest([*run.overrides, *spec.overrides, *more])
    unneeded = {other for other, _ in others}
    prepare(msgspec.structs.replace(run, prepare=[command for command in run.prepare if not unneeded.intersection(command)]))
    out = []
    for seed in seeds:
        for mode in modes:
            folder = f"{mode}_{seed}"
            values = {"steps": steps, "groups": GROUPS, "samples": SAMPLES, "dumps": run.directory / folder / RESPONSES}
            keys = [key.format(**values) for key in _JOB] + more + overrides(mode, rate, longest)
            job = msgspec.structs.replace(spec, seed=seed, overrides=[*spec.overrides, *keys])
            out.append(_run_one(msgspec.structs.replace(run, jobs={name: job}), name, folder, mode, seed))
    return out


def _longest(keys: list[str]) -> int:
    given = [key.removeprefix(_MAX_RESPONSE) for key in keys if key.startswith(_MAX_RESPONSE)]
    if not given or not given[-1].isdecimal():
        raise UserError(
            f"the run file's overrides say {given[-1:] or 'nothing'} of {_MAX_RESPONSE}; a number of tokens is needed"
        )
    return int(given[-1])


def _run_one(run: RunFile, asset: str, folder: str, mode: str, seed: int) -> Run:
    """One job, without a coordinator. `asset`: the job whose model and data it uses."""
    spec = run.jobs[asset]
    given = [text.replace("{job}", asset) for text in (*run.overrides, *spec.overrides)]
    alone = msgspec.structs.replace(run, overrides=given, jobs={folder: msgspec.structs.replace(spec, overrides=[])})
    make_folder(alone.directory, folder)
    process = JobProcess(folder, alone.jobs[folder], alone, address=None)
    started = time.monotonic()
    try:
        process.start()
        while process.returncode is None:
            time.sleep(_TICK_S)
    finally:
        process.stop()
    if process.returncode == 2:
        raise UserError(f"{mode}: {process.last_error().removeprefix('verl-mux: ')}")
    if process.returncode != 0:
        raise Failure(f"{mode}, seed {seed}, exit code {process.returncode}: {process.last_error()} (log: {process.log_path})")
    result = read_run(mode, seed, process.directory)
    print(f"{mode}, seed {seed}: {len(result.metrics)} steps in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return result
