"""The jobs of a certificate: composed verl configs, as `--cfg job` prints them, or the jobs of a run file, composed here."""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_mux.composed_config import at
from verl_mux.errors import Failure, UserError
from verl_mux.launcher import run_file
from verl_mux.launcher.processes.job_process import composition, require_verl
from verl_mux.memory.certificate.job import Job, read_job
from verl_mux.memory.model_config import read_model_config
from verl_mux.yaml_file import read_yaml

# What of a config is resolved; the rest may name what is not there yet.
_PARTS = ("mux", "data", "algorithm", "trainer", "actor_rollout_ref")
_WITHIN_S = 300.0


def read_jobs(files: list[Path]) -> list[tuple[Job, float | None]]:
    """All jobs, each with the memory of its GPUs in GB where its config says it (mux.device.budget).

    Raises:
        UserError: a file that is neither, or a config that cannot be composed or lacks a key. Failure: composing it takes too
            long.
    """
    return [_job(config, where) for file in files for where, config in _configs(file)]


def _configs(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    given = read_yaml(file)
    if isinstance(given, dict) and "actor_rollout_ref" in given:
        yield str(file), given
    elif isinstance(given, dict) and "jobs" in given:
        yield from _of_run_file(file)
    else:
        raise UserError(
            f"{file} is neither a composed verl config (`python -m verl.trainer.main_ppo ... --cfg job > FILE`) nor a run file"
        )


def _of_run_file(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    require_verl()
    run = run_file.read(file)
    for name, spec in run.jobs.items():
        command, environment = composition(name, spec, run), {**os.environ, **run.environment, **spec.environment}
        try:
            done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=_WITHIN_S, check=False)
        except subprocess.TimeoutExpired:
            raise Failure(f"{file}: the config of job {name!r} was not composed within {_WITHIN_S:g} s") from None
        if done.returncode:
            reason = (done.stderr.strip() or "no word").splitlines()[-1]
            raise UserError(f"{file}: the config of job {name!r} cannot be composed: {reason}")
        yield f"{file}, job {name!r}", OmegaConf.to_container(OmegaConf.create(done.stdout))


def _job(config: dict[str, Any], where: str) -> tuple[Job, float | None]:
    whole = OmegaConf.create(config)
    try:
        parts = {name: OmegaConf.select(whole, name) for name in _PARTS}
        if strange := [name for name, part in parts.items() if part is not None and not OmegaConf.is_dict(part)]:
            raise UserError(f"{where}: {strange[0]} is {parts[strange[0]]!r}; keys are needed there")
        plain: dict[str, Any] = {
            name: OmegaConf.to_container(part, resolve=True) for name, part in parts.items() if part is not None
        }
    except OmegaConfBaseException as error:
        raise UserError(f"{where}: {str(error).splitlines()[0]}") from None
    path = at(plain, "actor_rollout_ref.model.path")
    if not isinstance(path, str) or not path:
        raise UserError(f"{where}: actor_rollout_ref.model.path is {path!r}; a folder, or a name on a hub, is needed")
    return read_job(plain, read_model_config(path, "count parameters of")), _budget(at(plain, "mux.device.budget"))


def _budget(given: Any) -> float | None:
    """GB."""
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 < given < math.inf:
        raise UserError(f"mux.device.budget is {given!r}; GB of a GPU, above 0, are needed for a certificate")
    return float(given)
