"""Parameters of a decoder and its keys and values, whole and on one GPU of an engine, from its Hugging Face config.json.

Dense and mixture-of-experts decoders with grouped-query attention. Others (latent attention, sliding windows, state spaces) are
refused: their caches have other shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from verl_mux.errors import UserError

# SGLang pads the vocabulary so that it divides among ranks (vocab_parallel_embedding.py).
VOCABULARY_MULTIPLE = 64
_COUNTS = ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_OPTIONAL = (*_EXPERTS, "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size", "n_shared_experts",
             "intermediate_size", "num_key_value_heads", "head_dim", "max_position_embeddings", "decoder_sparse_step",
             "first_k_dense_replace")  # fmt: skip
_MOST = {"num_hidden_layers": 100_000}
_OTHER_CACHES = ("kv_lora_rank", "ssm_state_size", "mamba_d_state", "linear_num_key_heads")
# Families whose config does not say that query, key and value have biases; and those that normalise query and key by head.
_QKV_BIAS = ("qwen2", "qwen2_moe")
_QK_NORM = ("qwen3", "qwen3_moe")


class Decoder(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes. experts: routed ones of a sparse layer, 0: dense; active: those a token goes through. Widths are of one expert."""

    hidden: int
    layers: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    sparse_layers: int = 0
    experts: int = 0
    active: int = 0
    expert_width: int = 0
    shared_width: int = 0
    shared_gate: bool = False
    positions: int = 0

    # ------------------------------------------------------------ parts of a layer

    @property
    def query(self) -> int:
        """Width of the query."""
        return self.heads * self.head_dim

    @property
    def attention(self) -> int:
        """Matrices, biases and norms of a layer's attention."""
        return self._attention(self.query, self.kv_heads * self.head_dim)

    def _attention(self, query: int, kv: int) -> int:
        bias = query + 2 * kv if self.qkv_bias else 0
        return 2 * self.hidden * (query + kv) + bias + (2 * self.head_dim if self.qk_norm else 0)

    @property
    def mlp(self) -> int:
        """Of a dense layer: gate, up and down."""
        return 3 * self.hidden * self.width

    @property
    def expert(self) -> int:
        return 3 * self.hidden * self.expert_width

    @property
    def beside_experts(self) -> int:
        """Of a sparse layer: router, shared experts and their gate."""
        gate = self.hidden if self.shared_gate else 0
        return self.hidden * self.experts + 3 * self.hidden * self.shared_width + gate if self.experts else 0

    # ------------------------------------------------------------ whole

    @property
    def total(self) -> int:
        """Parameters, tied embeddings once."""
        dense = self.layers - self.sparse_layers
        sparse = self.sparse_layers * (self.beside_experts + self.experts * self.expert)
        return self.embeddings + self.layers * (self.attention + 2 * self.hidden) + dense * self.mlp + sparse + self.hidden

    @property
    def active_total(self) -> int:
        """Parameters that one token goes through, all embeddings included, as models are named (30B-A3B)."""
        return self.total - self.sparse_layers * (self.experts - self.active) * self.expert

    @property
    def embeddings(self) -> int:
        return (1 if self.tied else 2) * self.vocabulary * self.hidden

    @property
    def largest_layer(self) -> int:
        """Parameters that FSDP gathers at once."""
        sparse = self.beside_experts + self.experts * self.expert if self.sparse_layers else 0
        dense = self.mlp if self.layers > self.sparse_layers else 0
        return self.attention + 2 * self.hidden + max(sparse, dense)

    def kv_values(self, layers: int | None = None, heads: int | None = None) -> int:
        """Keys and values of one token: 2 x layers x kv heads x head size; of the whole model where nothing is given."""
        return 2 * (layers or self.layers) * (heads or self.kv_heads) * self.head_dim

    # ------------------------------------------------------------ on one GPU

    def on_gpu(self, tensor: int, everything: int, pipeline: int) -> int:
        """Parameters on the fullest GPU of an engine.

        tensor: ranks that attention is split over (a key-value head is never split: with more ranks than heads they are
        repeated). everything: ranks that MLPs and experts are split over, whether as parts of each expert or as whole ones.
        pipeline: stages; embedding and head lie on the first and the last. Norms and routers are on every rank.
        """
        kv = max(self.kv_heads // tensor, 1) * self.head_dim
        attention = self._attention(self.query // tensor, kv)
        shared = 3 * self.hidden * self.shared_width // everything
        router = (self.hidden * self.experts + (self.hidden if self.shared_gate else 0)) if self.experts else 0
        sparse = router + shared + self.experts * self.expert // everything if self.experts else 0
        stage = -(-self.layers // pipeline)
        sparse_here = min(self.sparse_layers, stage)
        dense_here = stage - sparse_here
        rows = -(-self.vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        table = -(-rows // tensor) * self.hidden
        ends = table if self.tied or pipeline > 1 else 2 * table
        layers = stage * (attention + 2 * self.hidden) + dense_here * self.mlp // everything + sparse_here * sparse
        return layers + ends + self.hidden

    def kv_values_on_gpu(self, tensor: int, pipeline: int) -> int:
        return self.kv_values(-(-self.layers // pipeline), max(self.kv_heads // tensor, 1))

    def lora(self, rank: int) -> int:
        """Parameters of adapters of this rank on all matrices of attention and MLPs (verl's target_modules=all-linear)."""
        h, q, kv = self.hidden, self.query, self.kv_heads * self.head_dim
        attention = 2 * (h + q) + 2 * (h + kv)
        dense = (self.layers - self.sparse_layers) * 3 * (h + self.width)
        sparse = self.sparse_layers * (self.experts * 3 * (h + self.expert_width) + 3 * (h + self.shared_width))
        return rank * (self.layers * attention + dense + sparse)


def decoder(config: Mapping[str, Any], where: str = "model config") -> Decoder:
    """From a model's `config.json`. Raises UserError: what is missing, or a model that the formulas are not for."""
    text = config.get("text_config") or {}
    if not isinstance(text, Mapping):
        raise UserError(f"{where}: text_config is {text!r}; keys are needed there")
    given = {**config, **text}
    for key in _OPTIONAL:
        if given.get(key):
            _count(given, key, where)
    if not isinstance(given.get("mlp_only_layers") or [], list):
        raise UserError(f"{where}: mlp_only_layers is {given['mlp_only_layers']!r}; a list is needed")
    for key in _COUNTS:
        _count(given, key, where)
    if other := [key for key in _OTHER_CACHES if given.get(key)]:
        raise UserError(f"{where}: {other[0]}={given[other[0]]}: the certificate knows grouped-query attention only")
    heads, family = given["num_attention_heads"], str(given.get("model_type", ""))
    experts = next((given[key] for key in _EXPERTS if given.get(key)), 0)
    width = given.get("intermediate_size") or 0
    own = given.get("moe_intermediate_size") or width
    shared = given.get("shared_expert_intermediate_size") or (given.get("n_shared_experts") or 0) * own
    return Decoder(
        hidden=given["hidden_size"],
        layers=given["num_hidden_layers"],
        vocabulary=given["vocab_size"],
        heads=heads,
        kv_heads=given.get("num_key_value_heads") or heads,
        head_dim=given.get("head_dim") or given["hidden_size"] // heads,
        width=width if experts else _count(given, "intermediate_size", where),
        tied=bool(given.get("tie_word_embeddings", False)),
        qkv_bias=family in _QKV_BIAS or bool(given.get("attention_bias")),
        qk_norm=family in _QK_NORM,
        sparse_layers=_sparse_layers(given) if experts else 0,
        experts=experts,
        active=(given.get("num_experts_per_tok") or 1) if experts else 0,
        expert_width=own if experts else 0,
        shared_width=shared if experts else 0,
        shared_gate=bool(experts and given.get("shared_expert_intermediate_size")),
        positions=given.get("max_position_embeddings") or 0,
    )


def _sparse_layers(given: Mapping[str, Any]) -> int:
    every, dense = given.get("decoder_sparse_step") or 1, set(given.get("mlp_only_layers") or ())
    first = given.get("first_k_dense_replace") or 0
    layers = range(given["num_hidden_layers"])
    return sum(1 for layer in layers if layer >= first and layer not in dense and (layer + 1) % every == 0)


def _count(given: Mapping[str, Any], key: str, where: str) -> int:
    value, most = given.get(key), _MOST.get(key, 2**31)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise UserError(f"{where}: {key} is {value!r}; a number of 1 or more is needed, at most {most}")
    return value
