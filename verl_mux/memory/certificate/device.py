"""Bytes on one GPU by kind, for each phase of one job. The formulas, with their sources: docs/memory.md."""

from __future__ import annotations

from collections.abc import Mapping

from verl_mux.memory.certificate.job import Job

# fp32: the first and second moment of Adam.
_ADAM_BYTES = 8
# Megatron: a parameter in bf16, its gradient in fp32, and what its distributed optimizer has: an fp32 copy and both moments.
_MEGATRON_WEIGHT, _MEGATRON_GRADIENT, _MEGATRON_STATES = 2, 4, 4 + _ADAM_BYTES
# Slots of adapters: SGLang's by its record; vLLM has one.
_SLOTS = 2
# Rotary tables are fp32 or the engine's type; one for all layers.
_TABLE_BYTES = 4
# Of hidden states, queries, keys, values and the MLP's two wide ones, in the computing type; plus the sampled logits in fp32,
# twice (softmax).
_LOGIT_COPIES = 2


def weights(job: Job) -> int:
    """Of the engine on its fullest GPU, rotary table and slots of adapters included."""
    it, model = job.engine, job.model
    count = model.on_gpu(it.tensor, it.tensor * it.data, it.pipeline) + _SLOTS * -(-job.adapter // (it.tensor * it.pipeline))
    return count * it.bytes + model.positions * model.head_dim * _TABLE_BYTES


def kv_per_token(job: Job) -> int:
    """On one GPU. Key-value heads are repeated where there are more ranks than heads."""
    return job.model.kv_values_on_gpu(job.engine.tensor, job.engine.pipeline) * job.engine.kv_bytes


def request_table(job: Job) -> int:
    """SGLang's table from requests to places in the KV cache: int32, one row a request. It counts the table to what comes later,
    but it is a part of what sleeps. vLLM's tables do not sleep, and have a row's 16th part."""
    if job.engine.share_of_all:
        return 0
    return (job.engine.requests // job.engine.data + 1) * ((job.model.positions or job.engine.longest) + 4) * 4


def held_by_engine(job: Job) -> dict[str, int]:
    """By the engine's process and the rollout worker beside it, besides tensors, while it is awake."""
    return _added(job.charges.engine(job.engine.gpus, job.engine.graphs, job.engine.prefill_graphs), job.charges.worker())


def kept(job: Job, side: str) -> dict[str, int]:
    """What the job keeps on a GPU of this side while it sleeps there: of what its engine holds, all but graphs that sleep."""
    engine = {kind: size for kind, size in held_by_engine(job).items() if kind != "graphs" or not job.engine.graphs_sleep}
    trainer = job.charges.trainer(job.training.ranks)
    if job.colocated:
        return _added(engine, trainer)
    return engine if side == "rollout" else trainer


def held(job: Job) -> dict[str, int]:
    """What the job keeps on a rollout GPU besides tensors while its engine is awake there."""
    engine = held_by_engine(job)
    return _added(engine, job.charges.trainer(job.training.ranks)) if job.colocated else engine


def room(job: Job, capacity: int) -> int:
    """Bytes that SGLang sees free before it loads, with no process beside it: it takes `gpu_memory_utilization` of these for
    weights and KV cache, and leaves the rest to what comes later: graphs, workspaces, activations."""
    return capacity - sum(size for kind, size in held(job).items() if kind not in ("graphs", "prefill_graphs", "workspace"))


def kv_cache(job: Job, capacity: int, utilization: float | None = None) -> int:
    """On one GPU: what the utilization leaves beside the weights, or a number of tokens that is given and less."""
    share = job.engine.utilization if utilization is None else utilization
    if job.engine.share_of_all:  # it measures a first pass; contexts and communicators were there before, and are not counted
        rest = weights(job) + activations(job) + held_by_engine(job).get("graphs", 0)
        return max(int(share * capacity) - rest, 0) if job.engine.cache_bytes is None else job.engine.cache_bytes
    left = max(int(share * room(job, capacity)) - weights(job), 0)
    if job.engine.tokens is None:
        return left + request_table(job)
    # One place more: SGLang's pools keep one for padding.
    return min((job.engine.tokens + 1) * kv_per_token(job), left) + request_table(job)


def activations(job: Job) -> int:
    """Of one prefill and of one sampling step."""
    it, model = job.engine, job.model
    width = max(model.width, model.active * model.expert_width + model.shared_width)
    per_token = 4 * model.hidden + (model.query + 2 * model.kv_heads * model.head_dim + 3 * width) // it.tensor
    sampled = _LOGIT_COPIES * min(it.requests // it.data, 1024) * model.vocabulary * 4
    return it.prefill * per_token * it.bytes + sampled


def rollout(job: Job, capacity: int) -> dict[str, int]:
    found = {"weights": weights(job), "kv_cache": kv_cache(job, capacity), "activations": activations(job)}
    return {**found, **held(job)}


def sync(job: Job, _capacity: int) -> dict[str, int]:
    """Weights arrive, straight from the host's memory; the KV cache is not there yet."""
    return {"weights": weights(job), **held(job)}


def train(job: Job, _capacity: int) -> dict[str, int]:
    """FSDP: parameters, gradients and Adam's moments of this rank's shard; one layer and the next gathered, and the embeddings;
    activations at their largest. Reference and critic hold their shards beside the actor's."""
    if job.training.megatron is not None:
        return {**_megatron_states(job), "activations": _training_activations(job), **kept(job, "train")}
    it, total = job.training, job.model.total
    adapters = job.model.lora(it.lora) if it.lora else 0
    trained = (adapters or total) + (total if it.critic else 0)
    held = total + adapters + (total if it.critic else 0)
    # A reference model is frozen, in bf16; with LoRA it is the actor without its adapters.
    reference = total * 2 if it.reference and not it.lora else 0
    return {
        "weights": -(-(held * it.state_bytes + reference) // it.shards),
        "gradients": -(-trained * it.state_bytes // it.shards),
        "optimizer": -(-trained * _ADAM_BYTES // it.shards),
        "gathered": _gathered(job),
        "activations": _training_activations(job),
        **kept(job, "train"),
    }


def _megatron_states(job: Job) -> dict[str, int]:
    """Of its fullest rank. Each parameter's optimizer states are there once, divided evenly over the ranks that have it."""
    it, model, parts = job.training, job.model, job.training.megatron
    assert parts is not None
    part = model.on_gpu(parts.tensor, parts.experts if model.experts else parts.tensor, parts.pipeline)
    adapters = -(-model.lora(it.lora) // (parts.tensor * parts.pipeline)) if it.lora else 0
    critic = part if it.critic else 0
    trained = (adapters or part) + critic
    held = part + adapters + critic + (part if it.reference and not it.lora else 0)
    # Experts have fewer ranks with the same part than the rest has.
    everywhere = max(trained * parts.tensor * parts.pipeline, 0 if adapters else model.total * (2 if critic else 1))
    return {
        "weights": held * _MEGATRON_WEIGHT,
        "gradients": trained * _MEGATRON_GRADIENT,
        "optimizer": -(-everywhere * _MEGATRON_STATES // it.ranks),
    }


def _gathered(job: Job) -> int:
    if job.training.shards == 1:
        return 0
    return (2 * job.model.largest_layer + job.model.embeddings) * job.training.gathered_bytes


def _training_activations(job: Job) -> int:
    """With recomputation a layer's input each and one layer's insides; without, all insides. Logits, their gradient in the
    computing type and one fp32 copy of them, unless fused kernels never make them."""
    it, model = job.training, job.model
    tensor = it.megatron.tensor if it.megatron is not None else 1
    width = max(model.width, model.active * model.expert_width + model.shared_width)
    inside = 8 * model.hidden + (2 * model.query + 4 * model.kv_heads * model.head_dim + 4 * width) // tensor
    layers = model.layers * model.hidden + inside if it.recompute else model.layers * inside
    logits = 0 if it.fused_logits else model.vocabulary // tensor * (2 * it.gathered_bytes + 4)
    return it.tokens * (layers * it.gathered_bytes + logits)


def largest_utilization(job: Job, capacity: int, others: int) -> float | None:
    """The largest gpu_memory_utilization, in hundredths, with which the rollout fits beside what others keep, and one request
    of the longest kind too. None: not with any."""
    for hundredths in range(99, 0, -1):
        share = hundredths / 100
        cache = kv_cache(job, capacity, share)
        total = weights(job) + cache + activations(job) + sum(held(job).values()) + others
        if total <= capacity and cache - request_table(job) >= kv_per_token(job) * job.engine.longest:
            return share
    return None


def _added(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {kind: one.get(kind, 0) + other.get(kind, 0) for kind in {**one, **other}}
