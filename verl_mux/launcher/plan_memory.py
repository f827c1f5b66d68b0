"""`verl-mux plan --memory`: the certificate of jobs that are to share nodes, from composed verl configs, as `--cfg job` prints
them, or from the jobs of a run file, which are composed here.

Runs on the command line; called by plan_command.py; reads files, and runs verl's composition of a run file's jobs.
"""

from __future__ import annotations

import math
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_mux.composed_config import at, count
from verl_mux.config.job_checks import own_pools
from verl_mux.coordinator.bus.members import names_of_this_host
from verl_mux.coordinator.config import read_config
from verl_mux.coordinator.core.settings import Config
from verl_mux.errors import UserError
from verl_mux.launcher import run_file
from verl_mux.launcher.run_processes import composed, composition, require_verl
from verl_mux.memory.certificate.certify import Capacity, Certificate, certify, nodes_of
from verl_mux.memory.certificate.job import Job, read_job
from verl_mux.memory.model_files import read_model_config
from verl_mux.placement.estimator import find_kind
from verl_mux.platform.charges import GB
from verl_mux.platform.host_memory import room
from verl_mux.profiling.eventlog import events
from verl_mux.profiling.plain.lines import read_directory

# Of a node that no file describes.
_KINDS = {"rollout": "H20", "train": "H800"}
# Where a run measured what: (side, tag) -> the phases and the kind that it corrects.
_CORRECTED = {
    ("rollout", "weights"): (("sync", "rollout"), "weights"),
    ("rollout", "kv_cache"): (("rollout",), "kv_cache"),
    ("train", "params"): (("train",), "weights"),
    ("train", "optimizer"): (("train",), "optimizer"),
}
# What of a config is resolved; the rest may name what is not there yet.
_PARTS = ("mux", "data", "algorithm", "trainer", "actor_rollout_ref")


def certificate_of(files: list[Path], pools: Path | None, observed: Path | None) -> Certificate:
    """The certificate of all jobs of these files.

    Raises:
        UserError: a file that cannot be read as what it should be, or a node that the pools lack. Failure: composing a job's
            config takes too long.
    """
    configs = [given for file in files for given in configs_of(file)]
    return certificate(configs, None if pools is None else read_config(pools), observed)


def certificate(
    configs: list[tuple[str, dict[str, Any]]], config: Config | None = None, observed: Path | None = None
) -> Certificate:
    """As `certificate_of`, of what `configs_of` gave."""
    found = [_job(config, where) for where, config in configs]
    jobs = [job for job, _ in found]
    notes = [note for (job, _), (_, given) in zip(found, configs, strict=True) for note in _own_gpus(job.name, given)]
    capacities = {
        (node, side): _capacity(node, side, job, budget, config, notes)
        for job, budget in found
        for side in ("rollout", "train")
        for node in nodes_of(job, side)
    }
    measured = _measured(observed, jobs) if observed is not None else {}
    notes += [f"{name}: corrected by what {observed} measured" for name in measured]
    return certify(jobs, capacities, list(dict.fromkeys(notes)), measured)


def _own_gpus(job: str, config: dict[str, Any]) -> Iterator[str]:
    for keys in own_pools(OmegaConf.create({part: config.get(part) for part in ("reward", "distillation")})):
        role, gpus = keys[0].rpartition(".")[0], math.prod(count(config, key, "for a certificate") for key in keys)
        yield f"{job}: {gpus} GPUs of its own for {role}, which no lease covers and no figure here counts"


def _capacity(node: str, side: str, job: Job, budget: float | None, config: Config | None, notes: list[str]) -> Capacity:
    if config is None and budget is not None:
        notes.append(f"{node}: {budget:g} GB a GPU, from mux.device.budget of {job.name}")
        return Capacity(gpu=round(budget * GB))
    if config is None:
        # One GPU runs both phases of a colocated job.
        kind = find_kind(name := _KINDS["train" if job.colocated else side], {})
        notes.append(f"{node}: no --pools, so {name} is assumed, {kind.memory_gb:g} GB a GPU")
        return Capacity(gpu=round(kind.memory_gb * GB), process=round(kind.process_gb * GB))
    if (described := config.node(node)) is None:
        raise UserError(f"job {job.name!r}: there is no node {node!r}; there are {config.describe_pools()}")
    pool = next(pool for pool in config.pools.values() if described in pool.nodes)
    if pool.kind is None:
        notes.append(f"{node}: its pool has no kind, so {_KINDS[side]} is assumed")
    kind = find_kind(name := pool.kind or _KINDS[side], {})
    gpu = described.device_bytes // max(described.gpus, 1) if described.device_bytes else round(kind.memory_gb * GB)
    notes.append(f"{node}: {name}, {gpu / GB:.0f} GB a GPU")
    host = described.host_bytes
    if host is not None and described.host in names_of_this_host() and (here := room()).total < host:
        host = here.total
        notes.append(f"{node}: {host / GB:.0f} GB of host memory by {here.source} here, less than its host_bytes")
    return Capacity(gpu=gpu, host=host, process=round(kind.process_gb * GB))


def _measured(run: Path, jobs: list[Job]) -> dict[str, dict[str, dict[str, int]]]:
    """From a run's event log: by job, phase and kind the largest number of bytes that a GPU had of each tag.

    A server logs the bytes of its replica's GPUs on its node, the trainer those of all GPUs of a node.
    """
    largest: defaultdict[tuple[str, str, str], int] = defaultdict(int)
    for line in read_directory(run):
        extra = line.extra
        if line.event in (events.SLEEP, events.WAKE) and isinstance(extra.get("mapped"), int):
            key = (line.job, str(extra.get("side")), str(extra.get("tag")))
            largest[key] = max(largest[key], extra["mapped"], extra["bytes"] if isinstance(extra.get("bytes"), int) else 0)
    found: dict[str, dict[str, dict[str, int]]] = {}
    for job in jobs:
        gpus = {"rollout": min(job.engine.gpus, job.engine.gpus_per_node), "train": job.training.gpus_per_node}
        for (side, tag), (phases, kind) in _CORRECTED.items():
            for phase in phases if (job.name, side, tag) in largest else ():
                found.setdefault(job.name, {}).setdefault(phase, {})[kind] = largest[job.name, side, tag] // gpus[side]
    if not found:
        raise UserError(f"--observed {run} holds no sleep or wake of {', '.join(job.name for job in jobs)}")
    return found


def configs_of(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each composed config of a file, and where it is from."""
    given = run_file.given_by(file)
    if isinstance(given, dict) and "defaults" in given:
        raise UserError(f"{file} is a config of Hydra's that is not composed yet: `--cfg job > FILE` after its command does that")
    if isinstance(given, dict) and "actor_rollout_ref" in given:
        yield str(file), given
        return
    if not isinstance(given, dict) or "jobs" not in given:
        raise UserError(
            f"{file} is neither a composed verl config (`python -m verl.trainer.main_ppo ... --cfg job > FILE`) nor a run file"
        )
    if isinstance(given["jobs"], list):
        raise UserError(f"{file} is a file of jobs to place; --memory wants composed verl configs or a run file")
    run = run_file.read(file)
    require_verl(run)
    for name, spec in run.jobs.items():
        print(f"composing the config of job {name}", file=sys.stderr, flush=True)
        command, environment = composition(name, spec, run), {**os.environ, **run.environment, **spec.environment}
        yield f"{file}, job {name!r}", composed(command, f"{file}: the config of job {name!r}", environment)


def _job(config: dict[str, Any], where: str) -> tuple[Job, float | None]:
    """The job, and the memory of its GPUs in GB where its config says it (mux.device.budget)."""
    try:
        whole = OmegaConf.create(config)
        parts = {name: part for name in _PARTS if (part := OmegaConf.select(whole, name)) is not None}
        if strange := [name for name, part in parts.items() if not OmegaConf.is_dict(part)]:
            raise UserError(f"{where}: {strange[0]} is {parts[strange[0]]!r}; keys are needed there")
        plain: dict[str, Any] = {name: OmegaConf.to_container(part, resolve=True) for name, part in parts.items()}
    except OmegaConfBaseException as error:
        raise UserError(f"{where}: {str(error).splitlines()[0]}") from None
    path, budget = at(plain, "actor_rollout_ref.model.path"), at(plain, "mux.device.budget")
    if not isinstance(path, str) or not path:
        raise UserError(f"{where}: actor_rollout_ref.model.path is {path!r}; a folder, or a name on a hub, is needed")
    job = read_job(plain, read_model_config(path, "count parameters of"))
    number = isinstance(budget, (int, float)) and not isinstance(budget, bool)
    if budget is not None and not (number and 0 < budget < math.inf):
        raise UserError(f"mux.device.budget is {budget!r}; GB of a GPU, above 0, are needed for a certificate")
    return job, budget
