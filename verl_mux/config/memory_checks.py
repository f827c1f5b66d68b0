"""What would keep device memory that a sleeping job must not keep, or lose weights: refused at start, by name.

Each of these is right in verl's own trainer modes, where nobody else wants the device.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_mux.errors import UserError
from verl_mux.memory.model_config import local_model_config

_OURS = ("fsdp", "fsdp2")
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_WINDOWS = ("sliding_attention", "chunked_attention")


def check_memory(config: DictConfig, mode: str) -> None:
    """Raises UserError with the key, what was given and what is allowed."""
    _check_engines(config, mode)
    _check_lora(config, mode)
    quantization = OmegaConf.select(config, "actor_rollout_ref.rollout.quantization")
    if quantization:
        raise UserError(
            f"actor_rollout_ref.rollout.quantization={quantization} is not supported by trainer.v1.trainer_mode={mode}: its "
            "scales do not survive a sleep; allowed: null"
        )
    name = OmegaConf.select(config, "actor_rollout_ref.rollout.name")
    saver = f"actor_rollout_ref.rollout.engine_kwargs.{name}.enable_memory_saver"
    if OmegaConf.select(config, saver) is False:
        raise UserError(f"{saver}=False: a sleeping engine would keep all its memory; trainer.v1.trainer_mode={mode} needs True")


def check_surroundings(config: DictConfig) -> None:
    """What the environment and the model's config say. Raises UserError."""
    for variable in _ALLOCATOR:
        words = os.environ.get(variable, "").replace(" ", "").lower()
        if "expandable_segments:true" in words:
            raise UserError(
                f"{variable}={os.environ[variable]}: torch_memory_saver frees nothing with expandable segments; take them out"
            )
    path = str(OmegaConf.select(config, "actor_rollout_ref.model.path"))
    window = sliding_window(local_model_config(path) or {})
    if window:
        raise UserError(
            f"actor_rollout_ref.model.path={path} has sliding-window attention ({window}): SGLang 0.5.12 keeps its KV cache on "
            "the device while it sleeps; allowed: models without"
        )


def sliding_window(model: Mapping[str, Any]) -> str | None:
    """The key that says so, if a model has layers that see a window only."""
    given = {**model, **(model.get("text_config") or {})}
    if any(kind in _WINDOWS for kind in given.get("layer_types") or ()):
        return "layer_types"
    if given.get("use_sliding_window") and given.get("sliding_window"):
        return "use_sliding_window"
    return None


def _check_engines(config: DictConfig, mode: str) -> None:
    """verl's other engines have offload keys of their own, and none has been seen to leave the device."""
    roles = {"actor_rollout_ref.actor": True, "actor_rollout_ref.ref": True, "critic": _has_critic(config)}
    for role, used in roles.items():
        strategy = OmegaConf.select(config, f"{role}.strategy")
        if used and strategy is not None and strategy not in _OURS:
            raise UserError(
                f"{role}.strategy={strategy} is not supported by trainer.v1.trainer_mode={mode}; allowed: {', '.join(_OURS)}"
            )


def _has_critic(config: DictConfig) -> bool:
    return OmegaConf.select(config, "algorithm.adv_estimator") == "gae" or bool(OmegaConf.select(config, "critic.enable"))


def _check_lora(config: DictConfig, mode: str) -> None:
    """By any of its three spellings."""
    model = "actor_rollout_ref.model"
    if OmegaConf.select(config, f"{model}.lora.merge"):
        return
    for key in (f"{model}.lora_rank", f"{model}.lora.rank", f"{model}.lora_adapter_path"):
        if given := OmegaConf.select(config, key):
            raise UserError(f"trainer.v1.trainer_mode={mode} syncs whole weights: {key}={given} needs {model}.lora.merge=true")
