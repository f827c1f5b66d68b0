"""What would keep device memory that a sleeping job must not keep, or lose weights: refused at start, by name.

Each of these is right in verl's own trainer modes, where nobody else wants the device.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_mux.errors import UserError
from verl_mux.memory.model_config import known_model_config

_OURS = ("fsdp", "fsdp2")
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_WINDOWS = ("sliding_attention", "chunked_attention")
_ROLLOUT = "actor_rollout_ref.rollout"
_NO_SCALES = "its scales do not survive a sleep"
# SGLang's own arguments that quantize weights, and where a model's config says that its file has them so.
_QUANTIZERS = ("quantization", "modelopt_quant", "torchao_config", "rl_quant_profile")
_QUANTIZED = ("quantization_config", "compression_config")
# Drafts that need no model of their own.
_DRAFTS = (None, "NGRAM")


def check_memory(config: DictConfig, mode: str) -> None:
    """Raises UserError with the key, what was given and what is allowed."""
    _check_engines(config, mode)
    _check_lora(config, mode)
    arguments = f"{_ROLLOUT}.engine_kwargs.{OmegaConf.select(config, f'{_ROLLOUT}.name')}"
    _check_quantization(config, mode, arguments)
    _check_drafts(config, mode, arguments)
    saver = f"{arguments}.enable_memory_saver"
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
    model = known_model_config(path) or {}
    if quantized := next((key for key in _QUANTIZED if _given(model).get(key)), None):
        raise UserError(
            f"actor_rollout_ref.model.path={path} is quantized ({quantized}): {_NO_SCALES}; allowed: models in bf16, fp16 or fp32"
        )
    if window := sliding_window(model):
        raise UserError(
            f"actor_rollout_ref.model.path={path} has sliding-window attention ({window}): SGLang 0.5.12 keeps its KV cache on "
            "the device while it sleeps; allowed: models without"
        )


def sliding_window(model: Mapping[str, Any]) -> str | None:
    """The key that says so, if a model has layers that see a window only."""
    given = _given(model)
    if any(kind in _WINDOWS for kind in given.get("layer_types") or ()):
        return "layer_types"
    if given.get("use_sliding_window") and given.get("sliding_window"):
        return "use_sliding_window"
    return None


def _given(model: Mapping[str, Any]) -> dict[str, Any]:
    """What a model's config says of its language model."""
    return {**model, **(model.get("text_config") or {})}


def _check_quantization(config: DictConfig, mode: str, arguments: str) -> None:
    for key in (f"{_ROLLOUT}.quantization", *(f"{arguments}.{name}" for name in _QUANTIZERS)):
        if given := OmegaConf.select(config, key):
            raise UserError(f"{key}={given} is not supported by trainer.v1.trainer_mode={mode}: {_NO_SCALES}; allowed: null")
    key = f"{arguments}.json_model_override_args"
    if "quantization_config" in str(OmegaConf.select(config, key)):
        raise UserError(
            f"{key} has a quantization_config, which trainer.v1.trainer_mode={mode} does not support: {_NO_SCALES}; allowed: none"
        )


def _check_drafts(config: DictConfig, mode: str, arguments: str) -> None:
    """A draft model sleeps with the engine's weights, and neither a copy nor a sync brings it back."""
    why = f"is not supported by trainer.v1.trainer_mode={mode}: nothing brings a draft model back after a sleep"
    algorithm = f"{arguments}.speculative_algorithm"
    if (given := OmegaConf.select(config, algorithm)) not in _DRAFTS:
        raise UserError(f"{algorithm}={given} {why}; allowed: NGRAM (mux.rollout.speculative=ngram), null")
    for key in ("actor_rollout_ref.model.mtp", f"{_ROLLOUT}.mtp"):
        if OmegaConf.select(config, f"{key}.enable") and OmegaConf.select(config, f"{key}.enable_rollout"):
            raise UserError(f"{key}.enable_rollout=True {why}; allowed: False")


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
