"""Runs the real jobs of `verl-mux bench rollout`, one after the other."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec

from bench.rollouts.modes import GROUPS, RESPONSES, SAMPLES, Run, overrides, read_run
from verl_mux.errors import Failure, UserError
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
