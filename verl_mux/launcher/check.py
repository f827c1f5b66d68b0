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


def check(run: RunFile) -> tuple[list[str], list[str]]:
    """What is wrong, and what else is to be said, a line each. Raises ModuleNotFoundError, UserError: as `require_verl`."""
    require_verl(run)
    wrong: list[str] = []
    configs: dict[str, dict[str, Any]] = {}

    def compose(name: str) -> dict[str, Any] | UserError | Failure:
        try:
            return composed(composition(name, run.jobs[name], run), f"the config of job {name!r}", _environment(name, run))
        except (UserError, Failure) as error:
            return error

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, found in zip(run.jobs, pool.map(compose, run.jobs), strict=True):
            try:
                if not isinstance(found, dict):
                    raise found
                configs[name] = found
                wrong += [
                    f"job {name!r}: {refusal['reason']}" for refusal in judge(found, f"the config of job {name!r}")["refusals"]
                ]
                wrong += [f"job {name!r}: {text}" for text in (*_missing(name, found, run), *_on_other_nodes(name, found, run))]
            except (UserError, Failure) as error:
                wrong.append(str(error))
    return (wrong, []) if wrong else _memory(configs, run)


def _environment(name: str, run: RunFile) -> dict[str, str]:
    return {**os.environ, **run.environment, **run.jobs[name].environment}


def _missing(name: str, config: dict[str, Any], run: RunFile) -> list[str]:
    """What `prepare` is yet to make, in the run's folder, is not missing."""
    made = f"{run.directory}/" if run.prepare else "\0"
    found = missing_files(OmegaConf.create(config), run.directory / name)
    return [str(missing) for missing in found if not str(missing.given).startswith(made)]


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


def _memory(configs: dict[str, dict[str, Any]], run: RunFile) -> tuple[list[str], list[str]]:
    """The certificate, where jobs name their nodes, have GPUs or a budget, and bring their model's config.json."""
    for name, config in configs.items():
        on_cpu = cpu_platform_wanted([], _environment(name, run)) and at(config, "mux.device.budget") is None
        if (
            on_cpu
            or run.jobs[name].nodes == "auto"
            or local_model_config(str(at(config, "actor_rollout_ref.model.path"))) is None
        ):
            why = "it has no GPUs" if on_cpu else "it names no nodes, or its model is no folder with a config.json here"
            return [], [f"memory: not judged, job {name!r}: {why}"]
    try:
        found = certificate(
            [(f"the config of job {name!r}", config) for name, config in configs.items()], run.coordinator_config()
        )
    except UserError as error:
        return [str(error)], []
    return [f"memory: {reason}" for reason in found.why_not], [f"memory: {note}" for note in found.notes]
