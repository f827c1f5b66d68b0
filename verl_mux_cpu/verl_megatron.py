"""verl's Megatron engines on the CPU. Imported after `verl.workers.engine.megatron`, where Megatron-Core is installed.

Megatron-Core names CUDA where it makes tensors, and has its layers and experts from Transformer Engine. Once a process has made
such an engine, these names mean the CPU there; the engine's layers and experts are Megatron-Core's own. Runs in training workers;
touches torch's functions.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, initialize_rng_tracker
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead, MegatronEngineWithValueHead

# Functions that make tensors on a device, which Megatron-Core calls with device="cuda".
_FACTORIES = ("arange", "empty", "full", "ones", "tensor", "zeros")
# mbridge knows the norms of Transformer Engine's layers, which are parts of the matrices after them.
_LAYER = "model.layers.{layer_number}"
_NORMS = {
    "_OTHER_MAPPING": {"input_layernorm.weight": [f"{_LAYER}.input_layernorm.weight"]},
    "_MLP_MAPPING": {"pre_mlp_layernorm.weight": [f"{_LAYER}.post_attention_layernorm.weight"]},
}

# A matrix of an expert, in a module of its own here, and in mbridge's names a numbered part of one module.
_EXPERT = re.compile(r"\.mlp\.experts\.local_experts\.(\d+)\.(linear_fc\d\.weight)$")


class CausalAttention(DotProductAttention):
    """torch's, over sequences padded on the right: under a causal mask no token sees its padding."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """All are [tokens, batch, heads, size of a head]; returns [tokens, batch, heads * size]."""
        heads_first = [it.permute(1, 2, 0, 3) for it in (query, key, value)]
        found = torch.nn.functional.scaled_dot_product_attention(
            *heads_first, is_causal=True, scale=self.softmax_scale, enable_gqa=True
        )
        return found.permute(2, 0, 1, 3).flatten(2)


class _OnCpu:
    """What both engines do another way."""

    bridge: Any

    def __init__(self, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any) -> None:
        cuda_means_cpu()
        # Torch's norms do not know the first two, and the third needs a kernel.
        ours = {"sequence_parallel": False, "persist_layer_norm": False, "moe_grouped_gemm": False}
        engine_config.override_transformer_config.update(ours)
        super().__init__(model_config, engine_config, *args, **kwargs)
        # A checkpoint would move the states by CUDA's calls.
        self._is_offload_param = self._is_offload_optimizer = False

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Without Apex, Megatron-Core loads what an optimizer has alone, and one count of steps that all parameters raise."""
        optimizers = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        for one in optimizers:
            one._init_optimizer_states_with_dummy_values()
        super().load_checkpoint(*args, **kwargs)
        for kept in (state for one in optimizers for state in one.optimizer.state.values()):
            kept["step"] = kept["step"].clone()

    def _build_tf_config(self) -> None:
        super()._build_tf_config()
        get_cuda_rng_tracker().states_["none"] = None  # verl loads no checkpoint without any
        for name, ours in _NORMS.items():
            setattr(self.bridge, name, {**getattr(self.bridge, name), **ours})
        self.bridge.has_vp_stage = True
        self.bridge._get_transformer_layer_spec = functools.partial(_own_layers, self.bridge)
        self.bridge._weight_name_mapping_mcore_local_to_global = functools.partial(_global_names, self.bridge)


def _own_layers(bridge: Any, vp_stage: int | None = None) -> Any:
    """Megatron-Core's own layers, for this rank's stage."""
    block = get_gpt_decoder_block_spec(bridge.config, use_transformer_engine=False, vp_stage=vp_stage)
    for layer in block.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = CausalAttention
    return block


def _global_names(bridge: Any, model: torch.nn.Module, consider_ep: bool = True) -> dict[str, str]:
    """mbridge's names of this rank's parameters, by ours. consider_ep: an expert's number is the one among those of all ranks."""
    names = type(bridge)._weight_name_mapping_mcore_local_to_global(bridge, model, consider_ep=False)
    first = (bridge.config.num_moe_experts or 0) // bridge.mpu.ep_size * bridge.mpu.ep_rank if consider_ep else 0
    return {ours: _EXPERT.sub(lambda it: f".mlp.experts.{it[2]}{first + int(it[1])}", name) for ours, name in names.items()}


@EngineRegistry.register(model_type="language_model", backend="megatron", device="cpu")
class CpuMegatronEngine(_OnCpu, MegatronEngineWithLMHead):
    """verl's, of a policy or a reference."""


@EngineRegistry.register(model_type="value_model", backend="megatron", device="cpu")
class CpuMegatronCritic(_OnCpu, MegatronEngineWithValueHead):
    """verl's, of a critic."""


class _Stream(torch.cpu.Stream):
    def record_event(self) -> torch.cpu.Event:
        return torch.cpu.Event()


@functools.cache
def cuda_means_cpu() -> None:
    """In this process, for good: where Megatron-Core asks for the CUDA device it gets the CPU."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.Stream, torch.cuda.stream, torch.cuda.current_stream = _Stream, torch.cpu.stream, _Stream
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self
    torch.Tensor.type = _with_cuda_names(torch.Tensor.type)
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    moe_utils.te_general_gemm = None  # an import that fails leaves it undefined
    token_dispatcher.maybe_move_tensor_to_cpu = _moved
    torch._dynamo.config.disable = True  # compiling for the CPU takes longer than a small job
    initialize_rng_tracker(inference_rng_tracker=True)  # it tracks nothing: there is no CUDA generator


def _moved(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
    """A tensor that is on the CPU already; numbers of tokens in the form in which gloo takes them."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return made


def _with_cuda_names(type_of: Callable[..., Any]) -> Callable[..., Any]:
    """Optimizers of Megatron-Core know parameters by the names of their types on CUDA."""

    @functools.wraps(type_of)
    def named(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = type_of(self, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found

    return named
