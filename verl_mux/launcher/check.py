"""`verl-mux run --check FILE`: all that a run of this file would be refused for, in seconds, and whether its jobs fit in memory.

Runs on the command line; called by command.py; composes each job's config, reads files, starts and writes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from omegaconf import OmegaConf

from verl_mux.composed_config import at
from verl_mux.config.completion import judge
from verl_mux.config.job_checks import missing_files
from verl_mux.errors import Failure, UserError
from verl_mux.launcher.plan_memory import certificate
from verl_mux.launcher.run_file import RunFile
from verl_mux.launcher.run_processes import composed, composition, require_verl
from verl_mux.memory.model_files import local_model_config
from verl_mux.platform.choose import cpu_platform_wanted

_MODEL = "actor_rollout_ref.model.path"


def check(run: RunFile) -> tuple[list[str], list[str]]:
    """What is wrong, and what else is to be said, a line each. Raises ModuleNotFoundError, UserError: as `require_verl`."""
    require_verl(run)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = dict(zip(run.jobs, pool.map(lambda name: _composed(name, run), run.jobs), strict=True))
    wrong = [config for config in found.values() if isinstance(config, str)]
    configs = {name: config for name, config in found.items() if not isinstance(config, str)}
    for name, config in configs.items():
        try:
            wrong += [f"job {name!r}: {text}" for text in (*_refused(name, config), *_missing(name, config, run))]
            wrong += [f"job {name!r}: {text}" for text in _on_other_nodes(name, config, run)]
        except UserError as error:
            wrong.append(str(error))
    notes = [] if wrong else list(_memory(configs, run, wrong))
    return wrong, notes


def _environment(name: str, run: RunFile) -> dict[str, str]:
    return {**os.environ, **run.environment, **run.jobs[name].environment}


def _composed(name: str, run: RunFile) -> dict[str, Any] | str:
    """The job's config, or why it cannot be composed."""
    try:
        return composed(composition(name, run.jobs[name], run), f"the config of job {name!r}", _environment(name, run))
    except (UserError, Failure) as error:
        return str(error)


def _refused(name: str, config: dict[str, Any]) -> Iterator[str]:
    yield from (found["reason"] for found in judge(config, f"the config of job {name!r}")["refusals"])


def _missing(name: str, config: dict[str, Any], run: RunFile) -> Iterator[str]:
    """What `prepare` is yet to make, in the run's folder, is not missing."""
    for found in missing_files(OmegaConf.create(config), run.directory / name):
        if not (run.prepare and str(found.given).startswith(f"{run.directory}/")):
            yield str(found)


def _on_other_nodes(name: str, config: dict[str, Any], run: RunFile) -> Iterator[str]:
    """Where verl's keys count other nodes, or more GPUs, than the run file gives the job."""
    spec, coordinator = run.jobs[name], run.coordinator_config()
    colocated = at(config, "trainer.v1.trainer_mode") == "mux_colocate"
    for side, nodes in spec.nodes.items() if isinstance(spec.nodes, dict) else ():
        keys = "trainer" if side == "train" or colocated else "actor_rollout_ref.rollout"
        count, gpus = (at(config, f"{keys}.{key}") for key in ("nnodes", "n_gpus_per_node"))
        if count != len(nodes):
            yield f"{keys}.nnodes is {count}, and nodes.{side} names {len(nodes)} ({', '.join(nodes)}); they must be equal"
        for node in filter(None, map(coordinator.node, nodes)):
            if isinstance(gpus, int) and gpus > node.gpus:
                yield f"{keys}.n_gpus_per_node is {gpus}, and node {node.name!r} has {node.gpus}"


def _memory(configs: dict[str, dict[str, Any]], run: RunFile, wrong: list[str]) -> Iterator[str]:
    """The certificate, where jobs name their nodes, have GPUs or a budget, and bring their model's config.json."""
    for name, config in configs.items():
        on_cpu = cpu_platform_wanted([], _environment(name, run)) and at(config, "mux.device.budget") is None
        if on_cpu or run.jobs[name].nodes == "auto" or local_model_config(str(at(config, _MODEL))) is None:
            why = "it has no GPUs" if on_cpu else "it names no nodes, or its model is no folder with a config.json here"
            yield f"memory: not judged, job {name!r}: {why}"
            return
    try:
        found = certificate(
            [(f"the config of job {name!r}", config) for name, config in configs.items()], run.coordinator_config()
        )
    except UserError as error:
        wrong.append(str(error))
        return
    wrong += [f"memory: {reason}" for reason in found.why_not]
    yield from (f"memory: {note}" for note in found.notes)
