"""Check our keys where verl checks its own, in the driver before Ray starts, and connect the job to its coordinator.

Runs in the job's driver: `validation_hook` puts `check_job` in front of verl's `validate_config`, and trainer/modes.py connects
through here. Talks to the coordinator and, where the job joins a Ray cluster, to that; writes the mark in the checkpoint folder.
A refusal is one line on stderr and exit code 2.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from verl_mux.config.job_checks import (
    STORAGE_UNITS,
    check,
    load,
    missing_files,
    model_config,
    number,
    refused_numbers,
    refused_rollout_keys,
    refused_surroundings,
    refused_versions,
)
from verl_mux.config.schema import MuxConfig, raise_first
from verl_mux.coordinator.bus.client import LocalMux, connect
from verl_mux.coordinator.bus.members import UID_VARIABLE
from verl_mux.coordinator.bus.messages import AUTO
from verl_mux.errors import UserError
from verl_mux.memory.certificate.certify import host_states
from verl_mux.memory.certificate.job import read_job
from verl_mux.memory.model_files import local_model_config, read_model_config
from verl_mux.placement.estimator import JobNeeds, Observed, job_needs
from verl_mux.platform.choose import CPU_PACKAGE_MISSING, cpu_package_missing, cpu_platform_wanted, joined_cluster
from verl_mux.rollout.engine.record import engines, installed
from verl_mux.warm.engine_processes import VARIABLE, worker_command

log = logging.getLogger(__name__)

# How long a job waits at start for its coordinator's answer.
_TIMEOUT_S = 30.0
# An engine has given a node back when its requests have left it, each at the end of a step of the engine.
_GRACE_S = 20.0
# In `trainer.default_local_dir`: the name of the job whose checkpoints these are.
_MARK = ".mux_job"
_WORKERS = "ray_kwargs.ray_init.runtime_env"
_STORES = "transfer_queue.backend.SimpleStorage.required_node_resource"


def check_job(config: DictConfig) -> None:
    """Check what a verl config says to us, and ask the coordinator; what is wrong is one line on stderr and exit code 2."""
    try:
        mux = check(config)
        if mux is None:
            return complete_stock_mode(config)
        if cpu_platform_wanted() and cpu_package_missing():
            raise UserError(CPU_PACKAGE_MISSING)
        if (name := config.actor_rollout_ref.rollout.name) not in [engine.name for engine in installed()]:
            raise UserError(f"actor_rollout_ref.rollout.name={name}: {name} is not installed in the environment {sys.prefix}")
        # All processes of this run carry one mark, so that the coordinator can tell when the last is gone.
        os.environ.setdefault(UID_VARIABLE, uuid4().hex)
        raise_first([*refused_versions(config), *refused_surroundings(config, model_config(config))])
        if (cluster := _ray_cluster(config)) is None:
            raise_first(missing_files(config))  # in a cluster that runs already another machine may read them
            here = number(config, "ray_kwargs.ray_init.num_cpus", os.cpu_count() or 1)
            check_cpus(cpus(config), here, "the job's own Ray has")
        if mux.launch.warm and VARIABLE not in os.environ:
            become_fork_server()
        ask_coordinator(config, mux)
        if mux.move_note is not None:
            Path(mux.move_note).unlink(missing_ok=True)  # from now on it has not left
        if cluster is not None:
            join_cluster(config, cluster)
        if forked := worker_command():
            OmegaConf.update(config, f"{_WORKERS}.py_executable", forked, force_add=True)
        # TransferQueue ties each storage unit, which needs a CPU, to a node of the cluster; a head often offers none.
        OmegaConf.update(config, _STORES, OmegaConf.select(config, _STORES) or "CPU", force_add=True)
        claim_folder(Path(config.trainer.default_local_dir), str(mux.job))
    except (UserError, OmegaConfBaseException) as error:
        print(f"verl-mux: {str(error).splitlines()[0]}", file=sys.stderr)
        sys.exit(2)


def become_fork_server() -> None:
    """Start this driver again as a fork of a process that has imported what the job's workers need."""
    os.execv(sys.executable, [sys.executable, "-m", "verl_mux.warm.fork_server", "verl.trainer.main_ppo", *sys.argv[1:]])


def claim_folder(folder: Path, job: str) -> None:
    """A job's checkpoints and event log are its own: another one would go on from them without a word. Raises UserError: the
    folder is another job's, or cannot be written."""
    mark = folder / _MARK
    try:
        owner = mark.read_text().strip() if mark.exists() else job
        if owner == job:
            folder.mkdir(parents=True, exist_ok=True)
            mark.write_text(f"{job}\n")
    except OSError as error:
        raise UserError(f"trainer.default_local_dir={folder} cannot be used: {error.strerror}") from None
    if owner != job:
        raise UserError(
            f"trainer.default_local_dir={folder} holds the checkpoints of job {owner!r}: give job {job!r} a"
            f" trainer.experiment_name or default_local_dir of its own, or, if it is to go on from them, remove {mark}"
        )


def ask_coordinator(config: DictConfig, mux: MuxConfig) -> None:
    """Would the coordinator take this job? Registers and leaves again.

    Raises UserError: it does not answer, or refuses: unknown node, too many GPUs, a second job of this name."""
    connect_job(config, mux, wait=False).close()


def complete_stock_mode(config: DictConfig) -> None:
    """verl's own trainer modes: the event log with `mux.profile.enable=true`, the training trigger with
    `mux.rollout.trigger.n_min`, and what a platform without GPU needs. No mux keys on a GPU: nothing. Raises UserError: as
    `refused_rollout_keys`, and for a custom sampler beside the trigger."""
    from verl_mux import plugin
    from verl_mux.config import completion

    if OmegaConf.select(config, "mux") is not None:
        mux = load(config)
        raise_first([*refused_numbers(config), *refused_rollout_keys(config, mux)])
        triggered = mux.rollout.trigger.n_min is not None
        if mux.profile.enable or triggered:
            completion.hand_to_workers(config, mux)
            with open_dict(config):
                config.actor_rollout_ref.rollout.agent.agent_loop_manager_class = plugin.AGENT_LOOP_MANAGER
        if triggered:
            completion.complete_trigger(config)
    if cpu_platform_wanted() and OmegaConf.select(config, "actor_rollout_ref.rollout.name") in engines():
        completion.complete_stock_cpu(config)


def connect_job(config: DictConfig, mux: MuxConfig, wait: bool = True) -> LocalMux:
    """The job's client, connected; its local stand-in where no coordinator is named. A job that leaves its nodes to the
    coordinator may have to wait for them; with `wait` False it does not, and the client names none. Raises UserError: refused by
    the coordinator, or placed on another number of nodes than verl will use."""
    nodes = {"rollout": list(mux.nodes.rollout), "train": list(mux.nodes.train)}
    colocated = config.trainer.v1.trainer_mode == "mux_colocate"
    rollout = config.trainer if colocated else config.actor_rollout_ref.rollout
    gpus = {"rollout": rollout.n_gpus_per_node, "train": config.trainer.n_gpus_per_node}
    # Its launcher would start it again, and it keeps checkpoints that are whole when it ends.
    in_background = OmegaConf.select(config, "actor_rollout_ref.actor.checkpoint.async_save")
    client = connect(
        mux.coordinator, str(mux.job), nodes, gpus=gpus, seed=mux.seed, steps=config.trainer.total_training_steps,
        timeout=_TIMEOUT_S, needs=needs_of(config) if mux.nodes.rollout == [AUTO] else None, slo=mux.slo,
        profiled=Observed(rollout=tuple(mux.profiled.rollout), train=tuple(mux.profiled.train)),
        host_memory=host_memory_of(config) if mux.coordinator else None, wait=wait, keys=mux.keys,
        movable=mux.move_note is not None and number(config, "trainer.save_freq") > 0 and not in_background, colocated=colocated,
    )  # fmt: skip
    if mux.coordinator and client.nodes:
        for side, key in (("rollout", "trainer" if colocated else "actor_rollout_ref.rollout"), ("train", "trainer")):
            if len(given := client.nodes[side]) != (count := OmegaConf.select(config, f"{key}.nnodes")):
                client.close()
                raise UserError(
                    f"mux.nodes.{side} stands for {len(given)} nodes of the coordinator ({', '.join(given)}), but "
                    f"{key}.nnodes is {count}; they must be equal"
                )
    return client


def connect_to_grow(config: DictConfig, mux: MuxConfig, nodes: Sequence[str]) -> LocalMux:
    """A client of a connected job that asks for these nodes as a filler does, whenever no job uses them."""
    name, gpus = f"{mux.job}-grows-onto-{nodes[0]}", config.actor_rollout_ref.rollout.n_gpus_per_node
    return connect(
        mux.coordinator, name, {"rollout": list(nodes)}, gpus={"rollout": gpus}, timeout=_TIMEOUT_S,
        uid=f"{name}:{uuid4().hex}", keys=mux.keys, filler=True, grace=_GRACE_S,
    )  # fmt: skip


# ---------------------------------------------------------------- what a job says of itself


def needs_of(config: DictConfig) -> JobNeeds:
    """What a step computes, for a job that is to be placed. Raises UserError: a key that the estimate needs is missing, or there
    is no model config at the model's path."""
    plain = _sections(config, "data", "algorithm", "trainer", "actor_rollout_ref")
    model = plain["actor_rollout_ref"].get("model") or {}
    if OmegaConf.select(config, "trainer.v1.trainer_mode") == "mux_colocate":  # its engines are on the trainer's GPUs
        plain["actor_rollout_ref"]["rollout"] |= {key: plain["trainer"][key] for key in ("nnodes", "n_gpus_per_node")}
    return job_needs(plain, {**read_model_config(str(model.get("path"))), **(model.get("override_config") or {})})


def host_memory_of(config: DictConfig) -> dict[str, dict[str, int]]:
    """Bytes of the job's states on each node of a side, by side and kind. Empty where the formulas do not know the model: then
    the coordinator counts only what is measured."""
    plain = _sections(config, "data", "algorithm", "trainer", "actor_rollout_ref", "critic")
    model = local_model_config(str(plain["actor_rollout_ref"].get("model", {}).get("path")))
    if model is None:
        return {}
    try:
        job = read_job(plain, model)
    except UserError as error:
        log.info("host memory is not estimated: %s", error)
        return {}
    return {side: host_states(job, side) for side in ("rollout", "train")}


def _sections(config: DictConfig, *names: str) -> dict[str, Any]:
    parts = {name: OmegaConf.select(config, name) for name in names}
    return {name: OmegaConf.to_container(part, resolve=True) for name, part in parts.items() if part is not None}


# ---------------------------------------------------------------- its Ray cluster

_FREED_S = 10.0  # that Ray may take to end the actors of a job that is over
_TRAIN_CPUS, _ROLLOUT_CPUS, _UNITS = 3, 2, 8  # that verl asks Ray for: with each GPU of a side's pool, and storage units
_POOLS = "trainer", "actor_rollout_ref.rollout"


def _ray_cluster(config: DictConfig) -> str | None:
    """The address of the Ray cluster that the job would join; None: it starts one of its own."""
    return joined_cluster([f"ray_init.address={OmegaConf.select(config, 'ray_kwargs.ray_init.address') or 'null'}"])


def join_cluster(config: DictConfig, address: str) -> None:
    """Prepare the job for a Ray cluster that runs already: its workers there get the job's mark. Raises UserError: the cluster
    has too few CPUs, or other jobs have them."""
    import ray

    OmegaConf.update(config, f"{_WORKERS}.env_vars.{UID_VARIABLE}", os.environ[UID_VARIABLE], force_add=True)
    if ray.is_initialized():
        return
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except ConnectionError:  # a cluster that is gone; verl's own connecting reports it
        return
    try:
        wanted = cpus(config)
        check_cpus(wanted, ray.cluster_resources().get("CPU", 0), f"the Ray cluster at {address} has")
        deadline = time.monotonic() + _FREED_S
        while (free := ray.available_resources().get("CPU", 0)) < sum(wanted.values()) and time.monotonic() < deadline:
            time.sleep(0.5)
        check_cpus(wanted, free, f"other jobs leave, of the Ray cluster at {address},")
    finally:
        ray.shutdown()


def cpus(config: DictConfig) -> dict[str, float]:
    """That the job asks Ray for at once, by what wants them; none of a TransferQueue whose needs are not known."""
    if OmegaConf.select(config, "transfer_queue.backend.storage_backend") != "SimpleStorage":
        return {}
    train, rollout = (number(config, f"{part}.nnodes") * number(config, f"{part}.n_gpus_per_node") for part in _POOLS)
    colocated = OmegaConf.select(config, "trainer.v1.trainer_mode") == "mux_colocate"
    return {
        f"TransferQueue's storage units ({STORAGE_UNITS})": number(config, STORAGE_UNITS, _UNITS),
        "its controller": 1,
        "training workers": train * _TRAIN_CPUS,
        "rollout workers": 0 if colocated else rollout * _ROLLOUT_CPUS,
        "agent loop workers, as they start": 1,
    }


def check_cpus(wanted: dict[str, float], there: float, where: str) -> None:
    """A job that wants more CPUs than Ray has waits for ever, without a word. Raises UserError."""
    if there < (needed := sum(wanted.values())):
        why = ", ".join(f"{count} for {part}" for part, count in wanted.items() if count)
        raise UserError(f"{where} {there:g} CPUs and this job needs {needed}, or waits for ever: {why}")
