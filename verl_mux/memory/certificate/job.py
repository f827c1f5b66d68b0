"""What a composed verl config says about memory: plain data in, one `Job` out.

Runs on the command line and in the driver; called by `plan --memory` and config/preflight.py; pure.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import msgspec

from verl_mux import plugin
from verl_mux.composed_config import at, count, section
from verl_mux.errors import UserError
from verl_mux.memory.certificate.decoder import Decoder, decoder
from verl_mux.platform.charges import Charges

_ROLLOUT, _ACTOR, _REF = "actor_rollout_ref.rollout", "actor_rollout_ref.actor", "actor_rollout_ref.ref"
_MEGATRON, _DIMENSIONS = f"{_ACTOR}.megatron", ("tensor", "pipeline", "expert")
# verl names what torch names, and short; `auto` is the model's own type, which is bf16 for all that are trained so.
_BYTES = {"auto": 2, "float32": 4, "fp32": 4, "float": 4, "bfloat16": 2, "bf16": 2, "float16": 2, "fp16": 2, "half": 2, "fp8": 1,
          "fp8_e4m3": 1, "fp8_e5m2": 1}  # fmt: skip
# Tokens of one prefill where the config names none: SGLang's on GPUs of 60 to 160 GB, and verl's for vLLM.
_PREFILL = 8192


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """The rollout engine. gpus: of one replica. bytes, kv_bytes: of a parameter, and of a key or value. utilization: verl's
    gpu_memory_utilization; share_of_all: as in the engine's record. tokens, cache_bytes: fixed KV cache, None: what the
    utilization leaves. requests: at once. longest: tokens of prompt and response. graphs: it captures CUDA graphs;
    graphs_sleep: they leave the GPU with the weights. prefill_graphs: some of prefills too, which stay. keeps_weights: asleep it
    may have them on the host."""

    tensor: int
    data: int
    experts: int
    pipeline: int
    bytes: int
    kv_bytes: int
    utilization: float
    share_of_all: bool
    tokens: int | None
    cache_bytes: int | None
    requests: int
    prefill: int
    longest: int
    graphs: bool
    graphs_sleep: bool
    prefill_graphs: bool
    keeps_weights: bool
    nodes: int
    gpus_per_node: int

    @property
    def gpus(self) -> int:
        return self.tensor * self.data * self.pipeline


class Parallel(msgspec.Struct, frozen=True, kw_only=True):
    """How Megatron divides a model. experts: ranks that experts are divided over, whole ones and parts."""

    tensor: int
    pipeline: int
    experts: int


class Training(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer. shards: ranks that states are split over (FSDP; fsdp_size). gathered_bytes: of a parameter while a layer
    computes. tokens: of a micro-batch on one GPU. lora: rank of adapters, 0: all parameters are trained; merged: into the weights
    that a sync brings. megatron: None: FSDP."""

    nodes: int
    gpus_per_node: int
    shards: int
    state_bytes: int
    gathered_bytes: int
    tokens: int
    recompute: bool
    fused_logits: bool
    reference: bool
    critic: bool
    lora: int
    merged: bool = True
    megatron: Parallel | None = None

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus_per_node


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """`rollout_nodes` and `train_nodes`: by name; the same ones where the phases share GPUs (`colocated`)."""

    name: str
    model: Decoder
    engine: Engine
    training: Training
    rollout_nodes: tuple[str, ...]
    train_nodes: tuple[str, ...]
    colocated: bool
    charges: Charges

    @property
    def adapter(self) -> int:
        """Parameters of the LoRA adapter that engines serve; 0: they have weights alone, which syncs bring."""
        return 0 if self.training.merged else self.model.lora(self.training.lora)


def read_job(config: Mapping[str, Any], model: Mapping[str, Any]) -> Job:
    """`config`: a whole composed verl config, resolved; `model`: the config.json of its model.

    Raises:
        UserError: a missing key, or what the formulas are not for, by name.
    """
    mode = str(at(config, "trainer.v1.trainer_mode"))
    colocated = mode != "mux_separate" and not mode.startswith("separate")
    name = str(at(config, "mux.job") or at(config, "trainer.experiment_name", "job"))
    model = {**model, **section(config, "actor_rollout_ref.model.override_config")}
    engine, training = _engine(config, colocated, name), _training(config, name)
    both = _names(config, "train", training.nodes, name)
    return Job(
        name=name,
        model=decoder(model, f"job {name!r}: config.json of {at(config, 'actor_rollout_ref.model.path')}"),
        engine=engine,
        training=training,
        rollout_nodes=both if colocated else _names(config, "rollout", engine.nodes, name),
        train_nodes=both,
        colocated=colocated,
        charges=Charges(),
    )


def _names(config: Mapping[str, Any], side: str, count: int, job: str) -> tuple[str, ...]:
    """The nodes that the job names; nodes that a coordinator is to choose are taken for ones of its own."""
    given = at(config, f"mux.nodes.{side}")
    if given == "auto" or given == ["auto"] or not given:
        return tuple(f"{side}{number}" for number in range(count))
    if not isinstance(given, (list, tuple)):
        raise UserError(f"job {job!r}: mux.nodes.{side} is {given!r}; a list of nodes is needed, or auto")
    if len(given) != count:
        raise UserError(f"job {job!r}: mux.nodes.{side} names {len(given)} nodes, but the config uses {count}")
    return tuple(map(str, given))


def _engine(config: Mapping[str, Any], colocated: bool, job: str) -> Engine:
    name = str(at(config, f"{_ROLLOUT}.name"))
    if name not in plugin.ENGINES:
        raise UserError(f"{_ROLLOUT}.name is {name!r}; the certificate knows {', '.join(plugin.ENGINES)}")
    record, given = importlib.import_module(plugin.ENGINES[name]).RECORD, f"{_ROLLOUT}.engine_kwargs.{name}"
    arguments = section(config, given)
    tokens, size = (
        _count(config, f"{given}.{key}") if arguments.get(key) is not None else None
        for key in (record.cache_tokens, record.cache_bytes)
    )
    longest = _count(config, "data.max_prompt_length") + _count(config, "data.max_response_length")
    side = "trainer" if colocated else _ROLLOUT
    dtype = _bytes_of(config, f"{_ROLLOUT}.dtype", "bfloat16")
    kv_dtype, prefill = arguments.get("kv_cache_dtype", "auto"), f"{_ROLLOUT}.{record.prefill}"
    graphs = not at(config, f"{_ROLLOUT}.enforce_eager")
    share = at(config, f"{_ROLLOUT}.gpu_memory_utilization", 0.5)
    if not isinstance(share, (int, float)) or not 0 < share < 1:
        raise UserError(f"{_ROLLOUT}.gpu_memory_utilization is {share!r}; a number between 0 and 1 is needed for a certificate")
    engine = Engine(
        tensor=_count(config, f"{_ROLLOUT}.tensor_model_parallel_size", 1),
        data=_count(config, f"{_ROLLOUT}.data_parallel_size", 1),
        experts=_count(config, f"{_ROLLOUT}.expert_parallel_size", 1),
        pipeline=_count(config, f"{_ROLLOUT}.pipeline_model_parallel_size", 1),
        bytes=dtype,
        kv_bytes=dtype if kv_dtype == "auto" else _BYTES.get(str(kv_dtype), dtype),
        utilization=float(share),
        share_of_all=record.share_of_all,
        tokens=tokens,
        cache_bytes=size,
        requests=_count(config, f"{_ROLLOUT}.max_num_seqs", 1024),
        prefill=max(longest, _PREFILL) if at(config, prefill) == -1 else _count(config, prefill, _PREFILL),
        longest=longest,
        graphs=graphs,
        # On a device with a budget, which is host memory, there are none: what they would take is charged throughout.
        graphs_sleep=record.graphs_sleep and graphs and at(config, "mux.device.budget") is None,
        prefill_graphs=record.prefill_graphs(arguments),
        keeps_weights=str(at(config, "mux.device.sleep_level", "auto")) != "2",
        nodes=_count(config, f"{side}.nnodes"),
        gpus_per_node=_count(config, f"{side}.n_gpus_per_node"),
    )
    if engine.nodes * engine.gpus_per_node % engine.gpus:
        raise UserError(f"job {job!r}: {engine.nodes * engine.gpus_per_node} rollout GPUs hold no replicas of {engine.gpus}")
    if (engine.tensor * engine.data) % engine.experts:
        raise UserError(f"job {job!r}: expert_parallel_size={engine.experts} does not divide {engine.tensor * engine.data} ranks")
    return engine


def _training(config: Mapping[str, Any], job: str) -> Training:
    strategy = at(config, f"{_ACTOR}.strategy", "fsdp")
    if strategy not in ("fsdp", "fsdp2", "megatron"):
        raise UserError(f"job {job!r}: {_ACTOR}.strategy={strategy}: the certificate knows fsdp, fsdp2 and megatron")
    megatron = _parallel(config) if strategy == "megatron" else None
    nodes, gpus = _count(config, "trainer.nnodes"), _count(config, "trainer.n_gpus_per_node")
    size = f"{_ACTOR}.fsdp_config.fsdp_size"
    model = "actor_rollout_ref.model"
    longest = _count(config, "data.max_prompt_length") + _count(config, "data.max_response_length")
    dynamic = bool(at(config, f"{_ACTOR}.use_dynamic_bsz"))
    micro = _count(config, f"{_ACTOR}.ppo_micro_batch_size_per_gpu", 1)
    tokens = _count(config, f"{_ACTOR}.ppo_max_token_len_per_gpu", 16384) if dynamic else micro * longest
    shared = f"{_ACTOR}.ulysses_sequence_parallel_size" if megatron is None else f"{_MEGATRON}.context_parallel_size"
    granularity = f"{_MEGATRON}.override_transformer_config.recompute_granularity"
    recompute = at(config, f"{model}.enable_gradient_checkpointing", True)
    return Training(
        nodes=nodes,
        gpus_per_node=gpus,
        shards=nodes * gpus if at(config, size, -1) == -1 else _count(config, size),
        state_bytes=_bytes_of(config, f"{_ACTOR}.fsdp_config.model_dtype", "fp32"),
        gathered_bytes=_bytes_of(config, f"{_ACTOR}.fsdp_config.mixed_precision.param_dtype", "bf16"),
        tokens=-(-tokens // _count(config, shared, 1)),
        recompute=bool(recompute) if megatron is None else at(config, granularity) == "full",
        fused_logits=bool(at(config, f"{model}.use_fused_kernels")),
        reference=bool(at(config, f"{_ACTOR}.use_kl_loss") or at(config, "algorithm.use_kl_in_reward")),
        critic=at(config, "algorithm.adv_estimator") == "gae",
        lora=next((_count(config, key) for key in (f"{model}.lora.rank", f"{model}.lora_rank") if at(config, key)), 0),
        merged=bool(at(config, f"{model}.lora.merge")),
        megatron=megatron,
    )


def _parallel(config: Mapping[str, Any]) -> Parallel:
    tensor, pipeline, experts = (_count(config, f"{_MEGATRON}.{kind}_model_parallel_size", 1) for kind in _DIMENSIONS)
    return Parallel(
        tensor=tensor, pipeline=pipeline, experts=experts * _count(config, f"{_MEGATRON}.expert_tensor_parallel_size", tensor)
    )


def _bytes_of(config: Mapping[str, Any], path: str, default: str) -> int:
    name = str(at(config, path, default)).removeprefix("torch.")
    if name not in _BYTES:
        raise UserError(f"{path} is {name!r}; the certificate knows {', '.join(_BYTES)}")
    return _BYTES[name]


def _count(config: Mapping[str, Any], path: str, default: int | None = None) -> int:
    return count(config, path, "for a certificate", default)
