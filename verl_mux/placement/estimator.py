"""How long the phases of a job take and how much host memory they need: bounds before its first step from what a step computes
and what a GPU of each kind can do, means of its steps later; and the job as it is in each pair of pools.

Pure; called by the coordinator when a job registers and after each of its phases, by `verl-mux plan`, and by research/. The job
itself reads its needs from verl's config (config/preflight.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from verl_mux.composed_config import at, count
from verl_mux.errors import UserError
from verl_mux.placement.model import COLOCATED, SEPARATE, Cluster, Estimate, JobSpec, too_large

# --- what a GPU (or a CPU core that stands for one) can do, as far as phase times depend on it ---


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
        for name, value in msgspec.structs.asdict(self).items():
            may_be_0 = name in ("usd_per_gpu_hour", "process_gb", "fixed_s")
            if not (0 < value < math.inf or (may_be_0 and value == 0)):
                raise UserError(f"GPU kind: {name} is {value:g}; it must be {'at least' if may_be_0 else 'above'} 0 and finite")


# H20, H800: RollMux (arXiv 2512.11306v2), table 1. Others: NVIDIA's data sheets, of the SXM ones where there are; they name no
# rent. Memory of the first four: what nvidia-smi counts (97,871, 81,559 and 143,771 MiB). `core`: one core of an EPYC by its fp32
# peak, for runs without a GPU; the shares hold as bounds: in a run of examples/placed.yaml all phases stayed within their
# estimates. `half_core`: two processes share the core.
GPU_KINDS: dict[str, GpuKind] = {
    "H20": GpuKind(tflops=148.0, tb_per_s=4.0, memory_gb=102.6, usd_per_gpu_hour=1.85),
    "H800": GpuKind(tflops=989.5, tb_per_s=3.35, memory_gb=85.5, usd_per_gpu_hour=5.28),
    "H100": GpuKind(tflops=989.4, tb_per_s=3.35, memory_gb=85.5),
    "H200": GpuKind(tflops=989.4, tb_per_s=4.8, memory_gb=150.8),
    "B200": GpuKind(tflops=2250.0, tb_per_s=8.0, memory_gb=180.0),
    "A100": GpuKind(tflops=312.0, tb_per_s=2.04, memory_gb=80.0),
    "L40S": GpuKind(tflops=362.0, tb_per_s=0.86, memory_gb=48.0),
    "core": GpuKind(tflops=0.08, tb_per_s=0.01, memory_gb=4.0, decode=0.15, train=0.6, process_gb=4.0, fixed_s=0.5),
    "half_core": GpuKind(tflops=0.04, tb_per_s=0.005, memory_gb=4.0, decode=0.15, train=0.6, process_gb=4.0, fixed_s=1.0),
}


def find_kind(name: str, given: Mapping[str, GpuKind]) -> GpuKind:
    """A kind of the user's own, or one of the table. Raises UserError."""
    kinds = {**GPU_KINDS, **given}
    if name not in kinds:
        raise UserError(f"GPU kind {name!r} is not known; allowed: {', '.join(kinds)}")
    return kinds[name]


def with_given(given: Mapping[str, Mapping[str, float]]) -> dict[str, GpuKind]:
    """The kinds of the table, and those of a file; what a kind in the file leaves out is as in the table. Raises UserError."""
    kinds = dict(GPU_KINDS)
    for name, said in given.items():
        known = msgspec.structs.asdict(kinds[name]) if name in kinds else {}
        try:
            kinds[name] = msgspec.convert({**known, **said}, GpuKind)
        except msgspec.ValidationError as error:
            allowed = ", ".join(GpuKind.__struct_fields__)
            raise UserError(f"kinds.{name}: {error}; allowed: {allowed}, of which {', '.join(GPU_KINDS)} have all") from None
    return kinds


# --- what one step computes, by a verl config ---

# Checked where needs are decoded: jobs send them, and from sizes beyond these no time can be estimated.
_Size = Annotated[int, Meta(ge=1, le=2**24)]
_Few = Annotated[int, Meta(ge=1, le=2**12)]
_Passes = Annotated[int, Meta(ge=0, le=2**12)]


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
    experts: Annotated[int, Meta(ge=0, le=2**12)] = 0
    experts_per_token: Annotated[int, Meta(ge=0, le=2**12)] = 0
    expert_size: Annotated[int, Meta(ge=0, le=2**24)] = 0
    shared_expert_size: Annotated[int, Meta(ge=0, le=2**24)] = 0
    dense_layers: Annotated[int, Meta(ge=0, le=2**12)] = 0

    @property
    def params(self) -> int:
        """Parameters of the matrices; norms and biases are left out."""
        return self._besides_experts + self._expert_params

    @property
    def active_params(self) -> int:
        """Those that work on one token."""
        return self._besides_experts + (self._expert_params * self.experts_per_token // self.experts if self.experts else 0)

    def params_read(self, tokens: int) -> float:
        """Parameters that `tokens` tokens, each of another request, need together: experts chosen evenly."""
        if not self.experts:
            return float(self.params)
        touched = 1 - (1 - self.experts_per_token / self.experts) ** tokens
        return self._besides_experts + touched * self._expert_params

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
    def _expert_params(self) -> int:
        """Of all experts among which tokens are divided."""
        return self._sparse_layers * self.experts * 3 * self.hidden_size * self.expert_size

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
    lora_rank: Annotated[int, Meta(ge=0, le=2**16)] = 0

    @property
    def replicas(self) -> int:
        return max(1, self.rollout_nodes * self.rollout_gpus // self.replica_gpus)


def job_needs(config: Mapping[str, Any], model: Mapping[str, Any]) -> JobNeeds:
    """From a verl config, resolved to plain mappings, and the model's `config.json`. Raises UserError: a key that is missing or
    no number of 1 or more."""

    def number(path: str, default: int | None = None) -> int:
        return count(config, path, "to estimate phase times", default)

    rollout, actor = ("actor_rollout_ref.rollout", "actor_rollout_ref.actor")
    critic = at(config, "algorithm.adv_estimator") == "gae"
    reference = bool(at(config, f"{actor}.use_kl_loss") or at(config, "algorithm.use_kl_in_reward"))
    parallel = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
    return JobNeeds(
        model=model_size(model),
        responses=number("data.train_batch_size") * number(f"{rollout}.n", 1),
        prompt_tokens=number("data.max_prompt_length"),
        response_tokens=number("data.max_response_length"),
        rollout_nodes=number(f"{rollout}.nnodes"),
        rollout_gpus=number(f"{rollout}.n_gpus_per_node"),
        train_nodes=number("trainer.nnodes"),
        train_gpus=number("trainer.n_gpus_per_node"),
        replica_gpus=math.prod(number(f"{rollout}.{key}", 1) for key in parallel),
        passes=1 + reference + critic,
        updates=number(f"{actor}.ppo_epochs", 1) * (1 + critic),
        recompute=bool(at(config, "actor_rollout_ref.model.enable_gradient_checkpointing", True)),
        weight_bytes=4 if at(config, f"{rollout}.dtype") in ("float32", "float", "fp32") else 2,
        critic=critic,
        lora_rank=at(config, "actor_rollout_ref.model.lora_rank") or 0,
    )


# --- before the first step: every response at its token limit, at speeds that every job of the paper reached (GpuKind) ---


class LinkModel(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a weight sync between the pools, fitted to figure 12 of the paper. Two stages: each training GPU sends its part
    of the one copy to a rollout GPU over a stream of its own, then the rollout GPUs broadcast among themselves.

    GB/s. scatter: one stream between the pools (the paper's "20 Gbps": one shared link of that could not bring its times).
    broadcast_in: among the GPUs of one rollout node. broadcast_across: as soon as there are several nodes.
    """

    scatter: float = 18.9 / 8
    broadcast_in: float = 220.0
    broadcast_across: float = 5.95

    def two_stage_s(self, weights_gb: float, streams: int, rollout_nodes: int) -> float:
        broadcast = self.broadcast_in if rollout_nodes == 1 else self.broadcast_across
        return weights_gb / (streams * self.scatter) + weights_gb / broadcast


# Host memory over bytes of weights on a rollout node, and bytes per parameter on the training nodes together (fp32
# weights 4, Adam 8, gradients 4, copies in bf16 and for staging 8): bounds of all eight figures of the paper's table 2.
ROLLOUT_COPIES, TRAIN_BYTES = 2.3, 24
# Of what adapters are put on: fp32 weights 4, copies in bf16 and for staging 8.
FROZEN_BYTES = 12


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of rollout, train and sync, and GB of host memory on each node of a side. None is passed by a step whose
    engines reach the kinds' speeds."""

    rollout_s: float
    train_s: float
    sync_s: float
    rollout_memory_gb: float
    train_memory_gb: float


def bounds(needs: JobNeeds, rollout: GpuKind, train: GpuKind) -> Bounds:
    """The bounds of one step on nodes of these kinds."""
    weights_gb = needs.model.params * needs.weight_bytes / 1e9
    on_node = needs.rollout_gpus / needs.replica_gpus * weights_gb
    params, adapters = needs.model.params, needs.model.adapter_params(needs.lora_rank)
    # Adapters have gradients and Adam's states; what they are put on has its weights and the copies of them.
    trained = params * FROZEN_BYTES + adapters * TRAIN_BYTES if needs.lora_rank else params * TRAIN_BYTES
    params_gb = (trained + needs.critic * params * TRAIN_BYTES) / needs.train_nodes / 1e9
    engines = needs.replicas * needs.replica_gpus * rollout.tflops * 1e12 * rollout.decode
    prefill_s = _forward_flops(needs, needs.prompt_tokens) / engines
    return Bounds(
        rollout_s=rollout.fixed_s + _decode_s(needs, rollout) + prefill_s,
        train_s=train.fixed_s + _train_s(needs, train),
        sync_s=LinkModel().two_stage_s(weights_gb, needs.train_nodes * needs.train_gpus, needs.rollout_nodes),
        rollout_memory_gb=max(ROLLOUT_COPIES * on_node, on_node + rollout.process_gb * needs.rollout_gpus),
        train_memory_gb=params_gb + train.process_gb * needs.train_gpus,
    )


def _decode_s(needs: JobNeeds, kind: GpuKind) -> float:
    """A token of each running request costs one read of the weights and of all their keys and values."""
    requests = math.ceil(needs.responses / needs.replicas)
    per_token = needs.model.kv_values_per_token * needs.weight_bytes
    # Requests at their token limits beyond what the device holds run in a second wave, and so on.
    held = 0.8 * kind.memory_gb * 1e9 * needs.replica_gpus - needs.model.params * needs.weight_bytes
    room = max(1, int(held // (per_token * (needs.prompt_tokens + needs.response_tokens))))
    rate = kind.tb_per_s * 1e12 * kind.decode * needs.replica_gpus

    def wave_s(running: int) -> float:
        read = needs.model.params_read(running) * needs.weight_bytes
        read += running * per_token * (needs.prompt_tokens + needs.response_tokens / 2)
        compute = 2 * needs.model.active_params * running / (kind.tflops * 1e12 * kind.decode * needs.replica_gpus)
        return needs.response_tokens * max(read / rate, compute)

    waves, rest = divmod(requests, room)
    return waves * wave_s(room) + (wave_s(rest) if rest else 0.0)


def _train_s(needs: JobNeeds, kind: GpuKind) -> float:
    """A backward pass costs two forward passes, of which one is saved where only adapters are trained; recomputed activations one
    more."""
    update = (2 if needs.lora_rank else 3) + needs.recompute
    passes = needs.passes + needs.updates * update
    gpus = needs.train_nodes * needs.train_gpus
    forward = _forward_flops(needs, needs.prompt_tokens + needs.response_tokens)
    return passes * forward / (gpus * kind.tflops * 1e12 * kind.train)


def _forward_flops(needs: JobNeeds, tokens: int) -> float:
    """Two per parameter that works on a token, and causal attention: two matrix products over half of the square."""
    model = needs.model
    attention = 2 * model.num_hidden_layers * model.num_attention_heads * model.head_dim * tokens**2
    return needs.responses * (2 * model.active_params * tokens + attention)


def job_spec(name: str, needs: JobNeeds, found: Bounds, slo: float = 2.0) -> JobSpec:
    """The job as placement sees it before its first step."""
    return JobSpec(
        name=name,
        rollout=Estimate(seconds=found.rollout_s, source="bound"),
        train=Estimate(seconds=found.train_s, source="bound"),
        sync_s=found.sync_s,
        rollout_nodes=needs.rollout_nodes,
        train_nodes=needs.train_nodes,
        rollout_memory_gb=found.rollout_memory_gb,
        train_memory_gb=found.train_memory_gb,
        slo=slo,
    )


def in_pairs(
    name: str,
    needs: JobNeeds,
    clusters: Mapping[str, Cluster],
    *,
    profiled: Observed,
    slo: float,
    movable: bool,
    move_s: float,
    colocated: bool,
) -> dict[str, JobSpec]:
    """The job in each pair of pools that could hold it. What it was seen to take counts for the first of them; in the others its
    phases last as many times as long as their bounds do, and the limit of its SLO stays. Raises UserError: no pair could.

    clusters: by name of the pair."""
    found: dict[str, JobSpec] = {}
    refusals: list[UserError] = []
    first: tuple[JobSpec, Bounds] | None = None
    met: set[str] = set()
    for pair, cluster in clusters.items():
        if colocated and cluster.train.name in met:
            continue  # colocated, it is the same in all pairs of one training pool
        met.add(cluster.train.name)
        try:
            pools = cluster.train if colocated else cluster.rollout, cluster.train
            there = bounds(needs, *(find_kind(pool.kind.name, {}) for pool in pools))
            modes = (COLOCATED if colocated else SEPARATE,)
            own = {"movable": movable, "move_s": move_s, "modes": modes, "colocated": colocated}
            spec = msgspec.structs.replace(learnt(job_spec(name, needs, there, slo), profiled, "profile"), **own)
            spec = spec if first is None else _elsewhere(spec, there, *first)
            if why := too_large(spec, cluster):
                raise UserError(why)
        except UserError as error:
            refusals.append(error)
            continue
        found[pair] = spec
        first = first or (spec, there)
    if not found:
        raise refusals[0]
    return found


def _elsewhere(spec: JobSpec, there: Bounds, known: JobSpec, before: Bounds) -> JobSpec:
    """The job as `known` shows it on kinds on which `before` bounds it. Raises UserError: it would be later alone than its SLO
    allows."""
    longer = there.rollout_s / before.rollout_s
    rollout, train = _scaled(known.rollout, longer), _scaled(known.train, there.train_s / before.train_s)
    scaled = msgspec.structs.replace(known, rollout=rollout, tail_s=known.tail_s * longer, train=train)
    if scaled.iteration_s > known.limit_s:
        raise UserError(
            f"job {spec.name!r} would take {scaled.iteration_s:.0f} s an iteration alone, its SLO allows {known.limit_s:.0f} s"
        )
    memory = {"rollout_memory_gb": spec.rollout_memory_gb, "train_memory_gb": spec.train_memory_gb}
    return msgspec.structs.replace(scaled, slo=known.limit_s / scaled.iteration_s, **memory)


def _scaled(phase: Estimate, times: float) -> Estimate:
    return msgspec.structs.replace(phase, seconds=phase.seconds * times)


# --- while the job runs: what it was seen to take ---


# Older observations say little: responses grow and shrink while a job learns.
WINDOW = 40


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that a job held its nodes, step by step: rollout (sync, wake and sleep included) and train; and `between`,
    the time in a step in which it neither held nor asked for nodes."""

    rollout: tuple[float, ...] = ()
    train: tuple[float, ...] = ()
    between: tuple[float, ...] = ()

    @property
    def steps(self) -> int:
        return min(len(self.rollout), len(self.train))

    def seen(self, what: str, seconds: float) -> Observed:
        """With one more observation; only the last WINDOW are kept."""
        return msgspec.structs.replace(self, **{what: (*getattr(self, what), seconds)[-WINDOW:]})


def expected(job: JobSpec, observed: Observed) -> JobSpec:
    """The job with median times, to predict a typical period rather than to be on the safe side; unchanged before its first
    step. Medians, since one stalled step says nothing about the next."""
    if observed.steps == 0:
        return job
    between = median(observed.between or [0.0])
    return msgspec.structs.replace(
        job,
        rollout=Estimate(seconds=median(observed.rollout) + between, source="median"),
        train=Estimate(seconds=median(observed.train), source="median"),
        sync_s=0.0,
        rollout_switch_s=0.0,
        train_switch_s=0.0,
        tail_s=between,
    )


def estimate_error(job: JobSpec, phase: str, observed_s: float) -> dict[str, float | str]:
    """One observed phase, `rollout` (sync included) or `train`, beside the estimate that placement counted with, as the event log
    has it. ratio: estimated over observed; above 1 is on the safe side."""
    estimate = job.rollout if phase == "rollout" else job.train
    seconds = job.rollout_hold_s if phase == "rollout" else estimate.seconds
    ratio = seconds / observed_s if observed_s > 0 else math.inf
    return {
        "job": job.name, "phase": phase, "source": estimate.source,
        "estimated_s": seconds, "observed_s": observed_s, "ratio": ratio,
    }  # fmt: skip


# --- how long its phases take now, how much they vary, and whether they drift ---
#
# Estimates follow the last RECENT steps, since responses grow and shrink while a model learns. How much phases vary comes from
# the differences between neighbouring steps, which a slow drift hardly touches.

RECENT = 12
# Steps after which observations count more than what was known before.
LEAST = 3
# How much phases vary before it was observed (RollMux, arXiv 2512.11306v2, figure 10), weighted as this number of steps.
PRIOR_CV, PRIOR_STEPS = 0.1, 4
# A change by less than WORTH, or by less than ERRORS standard errors, is no drift.
WORTH, ERRORS = 0.03, 3.0


def learnt(job: JobSpec, observed: Observed, source: str = "mean") -> JobSpec:
    """The job as its last steps were; unchanged before LEAST of them. Observed rollouts hold the sync. The time between phases
    holds no node: it counts as the end of the rollout."""
    if observed.steps < LEAST:
        return job
    between = median(observed.between[-RECENT:] or [0.0])
    rollout, train = _estimate(observed.rollout, between, source), _estimate(observed.train, 0.0, source)
    return msgspec.structs.replace(job, rollout=rollout, train=train, tail_s=between, sync_s=0.0, solo_s=None)


def corrected(job: JobSpec, observed: Observed) -> JobSpec | None:
    """The job as its last steps were, if that is other than what it is placed by."""
    now = learnt(job, observed)
    return now if now is not job and drifted(job, now) else None


def drifted(job: JobSpec, now: JobSpec) -> bool:
    """Whether the phases of `now` differ from those that the job was placed by, beyond what chance would do."""
    rollout = msgspec.structs.replace(job.rollout, seconds=job.rollout.seconds + job.sync_s)
    return _differ(rollout, now.rollout) or _differ(job.train, now.train)


def _differ(before: Estimate, now: Estimate) -> bool:
    if before.seconds == 0 or before.source == "bound":
        return now.seconds != before.seconds
    off = abs(now.seconds / before.seconds - 1)
    return off > max(WORTH, ERRORS * math.hypot(now.unsure, 0 if before.source == "given" else before.unsure))


def _estimate(seconds: Sequence[float], more: float, source: str) -> Estimate:
    recent = seconds[-RECENT:]
    mean = fmean(recent)
    cv = _cv(recent, mean)
    return Estimate(seconds=mean + more, source=source, cv=cv, unsure=cv / math.sqrt(len(recent)))


def _cv(seconds: Sequence[float], mean: float) -> float:
    """From differences of neighbours, whose variance is twice that of a step; with the prior's steps beside them."""
    squares = [((b - a) / mean) ** 2 / 2 for a, b in zip(seconds, seconds[1:], strict=False)] if mean else []
    return math.sqrt((PRIOR_CV**2 * PRIOR_STEPS + sum(squares)) / (PRIOR_STEPS + len(squares)))
