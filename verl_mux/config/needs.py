"""What a job tells the coordinator of itself, from its verl config and its model's: what a step computes, for one that is to be
placed, and the host memory that its states take."""

from __future__ import annotations

import logging
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_mux.errors import UserError
from verl_mux.memory.certificate.certify import host_states
from verl_mux.memory.certificate.job import read_job
from verl_mux.memory.model_config import local_model_config, read_model_config
from verl_mux.placement.job_needs import JobNeeds, job_needs

log = logging.getLogger(__name__)


def needs_of(config: DictConfig) -> JobNeeds:
    """Raises UserError: a key that the estimate needs is missing, or there is no model config at the model's path."""
    plain = _plain(config, "data", "algorithm", "trainer", "actor_rollout_ref")
    model = plain["actor_rollout_ref"].get("model") or {}
    if OmegaConf.select(config, "trainer.v1.trainer_mode") == "mux_colocate":  # its engines are on the trainer's GPUs
        plain["actor_rollout_ref"]["rollout"] |= {key: plain["trainer"][key] for key in ("nnodes", "n_gpus_per_node")}
    return job_needs(plain, {**read_model_config(str(model.get("path"))), **(model.get("override_config") or {})})


def host_memory_of(config: DictConfig) -> dict[str, dict[str, int]]:
    """Bytes of the states on each node of a side, by side and kind. Empty where the formulas do not know the model: then only
    what is measured counts."""
    plain = _plain(config, "data", "algorithm", "trainer", "actor_rollout_ref", "critic")
    model = local_model_config(str(plain["actor_rollout_ref"].get("model", {}).get("path")))
    if model is None:
        return {}
    try:
        job = read_job(plain, model)
    except UserError as error:
        log.info("host memory is not told: %s", error)
        return {}
    return {side: host_states(job, side) for side in ("rollout", "train")}


def _plain(config: DictConfig, *names: str) -> dict[str, Any]:
    parts = {name: OmegaConf.select(config, name) for name in names}
    return {name: OmegaConf.to_container(part, resolve=True) for name, part in parts.items() if part is not None}
