"""What a job tells the coordinator that is to place it: what a step computes, from its verl config and its model's."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from verl_mux.memory.model_config import read_model_config
from verl_mux.scheduling.estimate.job_needs import JobNeeds, job_needs


def needs_of(config: DictConfig) -> JobNeeds:
    """Raises UserError: a key that the estimate needs is missing, or there is no model config at the model's path."""
    parts = {name: OmegaConf.select(config, name) for name in ("data", "algorithm", "trainer", "actor_rollout_ref")}
    plain = {name: OmegaConf.to_container(part, resolve=True) for name, part in parts.items() if part is not None}
    model = plain["actor_rollout_ref"].get("model") or {}
    return job_needs(plain, {**read_model_config(str(model.get("path"))), **(model.get("override_config") or {})})
