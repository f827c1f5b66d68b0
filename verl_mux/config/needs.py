"""What a job tells the coordinator that is to place it: what a step computes, from its verl config and its model's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_mux.errors import UserError
from verl_mux.scheduling.estimate.job_needs import JobNeeds, job_needs


def needs_of(config: DictConfig) -> JobNeeds:
    """Raises UserError: a key that the estimate needs is missing, or there is no model config at the model's path."""
    parts = {name: OmegaConf.select(config, name) for name in ("data", "algorithm", "trainer", "actor_rollout_ref")}
    plain = {name: OmegaConf.to_container(part, resolve=True) for name, part in parts.items() if part is not None}
    model = plain["actor_rollout_ref"].get("model") or {}
    return job_needs(plain, {**read_model_config(str(model.get("path"))), **(model.get("override_config") or {})})


def read_model_config(path: str) -> dict[str, Any]:
    """`config.json` of a model in a folder, or by its name on a hub."""
    file = Path(path).expanduser() / "config.json"
    if file.is_file():
        return json.loads(file.read_text())
    # Slow to import, and needed only for a model that is not here yet.
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path).to_dict()
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"actor_rollout_ref.model.path={path}: no model config to estimate phase times from: {reason}") from None
