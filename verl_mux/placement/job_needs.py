"""What one step of a job computes, and what a GPU of each kind can do. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from verl_mux.composed_config import at, count
from verl_mux.errors import UserError

# What a GPU (or a CPU core that stands for one) can do, as far as phase times depend on it.


class GpuKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """tflops: dense bf16 peak. tb_per_s: memory bandwidth. memory_gb: on the device. usd_per_gpu_hour: rent.

    decode, train: share of bandwidth and peak that generation, and of the peak that training, reaches at least. For GPUs the
    lowest seen in the paper's jobs (table 3: 7B, 14B, 32B on H20 and H800), so that estimates from them are bounds: of decoding
    as if all responses had their maximum, which the longest of a batch has; of training by the tokens that there really were,
    with mean responses as in its figure 11 (7B with at most 8K tokens: 1,206). process_gb: host memory of one process per GPU,
    besides the model's states. fixed_s: what a phase takes however little it computes.
    """

    tflops: float
    tb_per_s: float
    memory_gb: float = 80.0
    usd_per_gpu_hour: float = 0.0
    decode: float = 0.30
    train: float = 0.041
    process_gb: float = 14.0
    fixed_s: float = 2.0

    def __post_init__(self) -> None:
        for name in ("tflops", "tb_per_s", "memory_gb", "decode", "train"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"GPU kind: {name} is {getattr(self, name):g}; it must be above 0 and finite")
        for name in ("usd_per_gpu_hour", "process_gb", "fixed_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"GPU kind: {name} is {getattr(self, name):g}; it must be at least 0 and finite")


# H20, H800: RollMux (arXiv 2512.11306v2), table 1. H100, H200: NVIDIA's data sheets of the SXM ones; they name no rent.
GPU_KINDS: dict[str, GpuKind] = {
    "H20": GpuKind(tflops=148.0, tb_per_s=4.0, memory_gb=96.0, usd_per_gpu_hour=1.85),
    "H800": GpuKind(tflops=989.5, tb_per_s=3.35, memory_gb=80.0, usd_per_gpu_hour=5.28),
    "H100": GpuKind(tflops=989.4, tb_per_s=3.35, memory_gb=80.0),
    "H200": GpuKind(tflops=989.4, tb_per_s=4.8, memory_gb=141.0),
}


def find_kind(name: str, given: dict[str, GpuKind]) -> GpuKind:
    """A kind of the user's own, or one of ours. Raises UserError."""
    kinds = {**GPU_KINDS, **given}
    if name not in kinds:
        raise UserError(f"GPU kind {name!r} is not known; allowed: {', '.join(kinds)}, or one given under `kinds`")
    return kinds[name]


def with_given(given: Mapping[str, Mapping[str, float]]) -> dict[str, GpuKind]:
    """All kinds of the table, and those of a file, of which what is left out is as in the table, where they stand there. Raises
    UserError."""
    kinds = dict(GPU_KINDS)
    for name, said in given.items():
        known = msgspec.structs.asdict(kinds[name]) if name in kinds else {}
        try:
            kinds[name] = msgspec.convert({**known, **said}, GpuKind)
        except msgspec.ValidationError as error:
            allowed = ", ".join(GpuKind.__struct_fields__)
            raise UserError(f"kinds.{name}: {error}; allowed: {allowed}, of which {', '.join(GPU_KINDS)} have all") from None
    return kinds


# What a verl config says about how much a step computes. Plain data in, plain data out.

# Checked where needs are decoded: others send them, and from sizes beyond these no time can be estimated.
_Size = Annotated[int, msgspec.Meta(ge=1, le=2**24)]
_Few = Annotated[int, msgspec.Meta(ge=1, le=2**12)]
_Passes = Annotated[int, msgspec.Meta(ge=0, le=2**12)]


class ModelSize(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a decoder, from its Hugging Face config. Of a mixture of experts: experts of a layer, how many of them work on
    one token, their width, that of the expert that works on all of them (0: none), and how many layers are dense."""

    hidden_size: _Size
    num_hidden_layers: _Few
    intermediate_size: _Size
    vocab_size: _Size
    num_attention_heads: _Few
    num_key_value_heads: _Few
    head_dim: _Few
    tie_word_embeddings: bool = False
    experts: Annotated[int, msgspec.Meta(ge=0, le=2**12)] = 0
    experts_per_token: Annotated[int, msgspec.Meta(ge=0, le=2**12)] = 0
    expert_size: Annotated[int, msgspec.Meta(ge=0, le=2**24)] = 0
    shared_expert_size: Annotated[int, msgspec.Meta(ge=0, le=2**24)] = 0
    dense_layers: Annotated[int, msgspec.Meta(ge=0, le=2**12)] = 0

    @property
    def params(self) -> int:
        """Parameters of the matrices; norms and biases are left out."""
        return self._besides_experts + self.expert_params

    @property
    def active_params(self) -> int:
        """Those that work on one token."""
        return self._besides_experts + (self.expert_params * self.experts_per_token // self.experts if self.experts else 0)

    @property
    def expert_params(self) -> int:
        """Of all experts among which tokens are divided."""
        return self._sparse_layers * self.experts * 3 * self.hidden_size * self.expert_size

    def params_read(self, tokens: int) -> float:
        """Parameters that `tokens` tokens, each of another request, need together: experts chosen evenly."""
        if not self.experts:
            return float(self.params)
        touched = 1 - (1 - self.experts_per_token / self.experts) ** tokens
        return self._besides_experts + touched * self.expert_params

    def adapter_params(self, rank: int) -> int:
        """Of adapters of this rank on all matrices of all layers."""
        h, q, kv = self.hidden_size, self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        attention = 2 * (h + q) + 2 * (h + kv)
        dense, sparse = 3 * (h + self.intermediate_size), 3 * self.experts * (h + self.expert_size)
        layers = self.num_hidden_layers
        return rank * (layers * attention + (layers - self._sparse_layers) * dense + self._sparse_layers * sparse)

    @property
    def _sparse_layers(self) -> int:
        return self.num_hidden_layers - self.dense_layers if self.experts else 0

    @property
    def _besides_experts(self) -> int:
        h, kv = self.hidden_size, self.num_key_value_heads * self.head_dim
        q = self.num_attention_heads * self.head_dim
        layers, sparse = self.num_hidden_layers, self._sparse_layers
        mixed = self.experts * h + 3 * h * self.shared_expert_size
        embedded = (1 if self.tie_word_embeddings else 2) * self.vocab_size * h
        return layers * (2 * h * q + 2 * h * kv) + (layers - sparse) * 3 * h * self.intermediate_size + sparse * mixed + embedded

    @property
    def kv_values_per_token(self) -> int:
        """Keys and values of all layers."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim


def model_size(config: Mapping[str, Any]) -> ModelSize:
    """From a model's `config.json`. Raises UserError that names what is missing."""
    given = {**config, **(config.get("text_config") or {})}
    needed = ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size", "num_attention_heads")
    for key in needed:
        if not isinstance(given.get(key), int) or given[key] < 1:
            raise UserError(f"model config: {key} is {given.get(key)!r}; a number of 1 or more is needed to estimate phase times")
    heads = given["num_attention_heads"]
    return ModelSize(
        **{key: given[key] for key in needed},
        num_key_value_heads=given.get("num_key_value_heads") or heads,
        head_dim=given.get("head_dim") or given["hidden_size"] // heads,
        tie_word_embeddings=bool(given.get("tie_word_embeddings", False)),
        **_experts(given),
    )


def _experts(given: Mapping[str, Any]) -> dict[str, int]:
    """The names of Qwen's, of DeepSeek's and of Mixtral's configs."""

    def first(*keys: str) -> int:
        return next((int(given[key]) for key in keys if given.get(key)), 0)

    if not (experts := first("num_experts", "n_routed_experts", "num_local_experts")):
        return {}
    size = first("moe_intermediate_size", "intermediate_size")
    every = first("decoder_sparse_step", "moe_layer_freq") or 1
    layers = given["num_hidden_layers"]
    dense = set(given.get("mlp_only_layers") or ()) | set(range(first("first_k_dense_replace")))
    dense |= {layer for layer in range(layers) if (layer + 1) % every}
    return {
        "experts": experts,
        "experts_per_token": first("num_experts_per_tok") or 1,
        "expert_size": size,
        "shared_expert_size": first("shared_expert_intermediate_size") or first("n_shared_experts") * size,
        "dense_layers": len(dense),
    }


class JobNeeds(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a verl job. responses: samples of a step. *_tokens: limits for one sample, all turns together.

    passes: forward-only passes of the training phase (old log-probs, reference, critic's values). updates: forward and
    backward passes over the batch (ppo_epochs, the critic's too). recompute: activations are computed twice.
    replica_gpus: GPUs of one rollout engine. weight_bytes: of a parameter in the rollout. lora_rank: 0: all parameters are
    trained.
    """

    model: ModelSize
    responses: _Size
    prompt_tokens: _Size
    response_tokens: _Size
    rollout_nodes: _Few
    rollout_gpus: _Few
    train_nodes: _Few
    train_gpus: _Few
    replica_gpus: _Few = 1
    passes: _Passes = 1
    updates: _Passes = 1
    recompute: bool = True
    weight_bytes: _Few = 2
    critic: bool = False
    lora_rank: Annotated[int, msgspec.Meta(ge=0, le=2**16)] = 0

    @property
    def replicas(self) -> int:
        return max(1, self.rollout_nodes * self.rollout_gpus // self.replica_gpus)


def job_needs(config: Mapping[str, Any], model: Mapping[str, Any]) -> JobNeeds:
    """From a verl config, resolved to plain mappings, and the model's `config.json`.

    Raises:
        UserError: a key that is missing or no number of 1 or more.
    """
    rollout, actor = ("actor_rollout_ref.rollout", "actor_rollout_ref.actor")
    critic = at(config, "algorithm.adv_estimator") == "gae"
    reference = bool(at(config, f"{actor}.use_kl_loss") or at(config, "algorithm.use_kl_in_reward"))
    parallel = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
    replica_gpus = 1
    for key in parallel:
        replica_gpus *= _count(config, f"{rollout}.{key}", default=1)
    epochs = _count(config, f"{actor}.ppo_epochs", default=1)
    return JobNeeds(
        model=model_size(model),
        responses=_count(config, "data.train_batch_size") * _count(config, f"{rollout}.n", default=1),
        prompt_tokens=_count(config, "data.max_prompt_length"),
        response_tokens=_count(config, "data.max_response_length"),
        rollout_nodes=_count(config, f"{rollout}.nnodes"),
        rollout_gpus=_count(config, f"{rollout}.n_gpus_per_node"),
        train_nodes=_count(config, "trainer.nnodes"),
        train_gpus=_count(config, "trainer.n_gpus_per_node"),
        replica_gpus=replica_gpus,
        passes=1 + reference + critic,
        updates=epochs * (1 + critic),
        recompute=bool(at(config, "actor_rollout_ref.model.enable_gradient_checkpointing", True)),
        weight_bytes=4 if at(config, f"{rollout}.dtype") in ("float32", "float", "fp32") else 2,
        critic=critic,
        lora_rank=at(config, "actor_rollout_ref.model.lora_rank") or 0,
    )


def _count(config: Mapping[str, Any], path: str, default: int | None = None) -> int:
    return count(config, path, "to estimate phase times", default)
