"""How long the phases of a job take and how much host memory they need: bounds before its first step, means of its steps later.

Pure; called by the coordinator when a job registers and after each of its phases, by `verl-mux plan`, and by research/.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median

import msgspec

from verl_mux.placement.job_needs import GpuKind, JobNeeds
from verl_mux.placement.model import Estimate, JobSpec


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


# --- before the first step: every response at its token limit, at speeds that every job of the paper reached (GpuKind) ---

# Older observations say little: responses grow and shrink while a job learns.
WINDOW = 40
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
    params_gb = (_trained_bytes(needs) + needs.critic * needs.model.params * TRAIN_BYTES) / needs.train_nodes / 1e9
    return Bounds(
        rollout_s=rollout.fixed_s + _decode_s(needs, rollout) + _prefill_s(needs, rollout),
        train_s=train.fixed_s + _train_s(needs, train),
        sync_s=LinkModel().two_stage_s(weights_gb, needs.train_nodes * needs.train_gpus, needs.rollout_nodes),
        rollout_memory_gb=max(ROLLOUT_COPIES * on_node, on_node + rollout.process_gb * needs.rollout_gpus),
        train_memory_gb=params_gb + train.process_gb * needs.train_gpus,
    )


def _trained_bytes(needs: JobNeeds) -> float:
    """Adapters have gradients and Adam's states; what they are put on has its weights and the copies of them."""
    if not needs.lora_rank:
        return needs.model.params * TRAIN_BYTES
    return needs.model.params * FROZEN_BYTES + needs.model.adapter_params(needs.lora_rank) * TRAIN_BYTES


def _decode_s(needs: JobNeeds, kind: GpuKind) -> float:
    """A token of each running request costs one read of the weights and of all their keys and values."""
    requests = math.ceil(needs.responses / needs.replicas)
    per_token = needs.model.kv_values_per_token * needs.weight_bytes
    # Requests beyond what the device holds run in a second wave, and so on.
    room = max(1, requests_held(needs, kind))
    rate = kind.tb_per_s * 1e12 * kind.decode * needs.replica_gpus

    def wave_s(running: int) -> float:
        read = needs.model.params_read(running) * needs.weight_bytes
        read += running * per_token * (needs.prompt_tokens + needs.response_tokens / 2)
        compute = 2 * needs.model.active_params * running / (kind.tflops * 1e12 * kind.decode * needs.replica_gpus)
        return needs.response_tokens * max(read / rate, compute)

    waves, rest = divmod(requests, room)
    return waves * wave_s(room) + (wave_s(rest) if rest else 0.0)


def requests_held(needs: JobNeeds, kind: GpuKind) -> int:
    """Requests at their token limits that an engine holds at once; below 1, and the model does not fit on its GPUs."""
    weights = needs.model.params * needs.weight_bytes
    request = needs.model.kv_values_per_token * needs.weight_bytes * (needs.prompt_tokens + needs.response_tokens)
    return int((0.8 * kind.memory_gb * 1e9 * needs.replica_gpus - weights) // request)


def _prefill_s(needs: JobNeeds, kind: GpuKind) -> float:
    gpus = needs.replicas * needs.replica_gpus
    return _forward_flops(needs, needs.prompt_tokens) / (gpus * kind.tflops * 1e12 * kind.decode)


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
        rollout=Estimate(seconds=found.rollout_s, bound_s=found.rollout_s, source="bound"),
        train=Estimate(seconds=found.train_s, bound_s=found.train_s, source="bound"),
        sync_s=found.sync_s,
        rollout_nodes=needs.rollout_nodes,
        train_nodes=needs.train_nodes,
        rollout_memory_gb=found.rollout_memory_gb,
        train_memory_gb=found.train_memory_gb,
        slo=slo,
    )


def on_other_kinds(job: JobSpec, before: Bounds, after: Bounds) -> JobSpec:
    """The job with phases as many times as long as their bounds are. before: on the kinds that its estimates are of; after: on
    the others."""
    longer = after.rollout_s / before.rollout_s
    rollout, train = _scaled(job.rollout, longer), _scaled(job.train, after.train_s / before.train_s)
    return msgspec.structs.replace(job, rollout=rollout, tail_s=job.tail_s * longer, train=train)


def _scaled(phase: Estimate, times: float) -> Estimate:
    bound = None if phase.bound_s is None else phase.bound_s * times
    return msgspec.structs.replace(phase, seconds=phase.seconds * times, bound_s=bound)


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
    between = _median(observed.between)
    return msgspec.structs.replace(
        job,
        rollout=seen(job.rollout, median(observed.rollout) + between, "median"),
        train=seen(job.train, median(observed.train), "median"),
        sync_s=0.0,
        rollout_switch_s=0.0,
        train_switch_s=0.0,
        tail_s=between,
    )


def seen(before: Estimate, seconds: float, source: str) -> Estimate:
    """A phase as it was observed. The bound stays known as long as it holds; a phase beyond it shows that it was none."""
    bound = before.bound_s if before.bound_s is not None and before.bound_s >= seconds else None
    return Estimate(seconds=seconds, bound_s=bound, source=source)


def _median(seconds: Sequence[float]) -> float:
    return median(seconds) if seconds else 0.0


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


# --- while the job runs: how long its phases take now, how much they vary, and whether they drift ---
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
    between = median(observed.between[-RECENT:]) if observed.between else 0.0
    rollout, train = _estimate(observed.rollout, job.rollout, between, source), _estimate(observed.train, job.train, 0.0, source)
    return msgspec.structs.replace(job, rollout=rollout, train=train, tail_s=between, sync_s=0.0, solo_s=None)


def corrected(job: JobSpec, observed: Observed) -> JobSpec | None:
    """The job as it was seen lately, if that is other than what it is placed by."""
    now = learnt(job, observed)
    return now if now is not job and drifted(job, now) else None


def drifted(job: JobSpec, now: JobSpec) -> bool:
    """Whether the phases of `now` differ from those that the job was placed by, beyond what chance would do."""
    rollout = msgspec.structs.replace(job.rollout, seconds=job.rollout.seconds + job.sync_s, bound_s=None)
    return _differ(rollout, now.rollout) or _differ(job.train, now.train)


def _differ(before: Estimate, now: Estimate) -> bool:
    if before.seconds == 0 or before.source == "bound":
        return now.seconds != before.seconds
    off = abs(now.seconds / before.seconds - 1)
    return off > max(WORTH, ERRORS * math.hypot(now.unsure, 0 if before.source == "given" else before.unsure))


def _estimate(seconds: Sequence[float], before: Estimate, more: float, source: str) -> Estimate:
    recent = seconds[-RECENT:]
    mean = fmean(recent)
    cv = _cv(recent, mean)
    return msgspec.structs.replace(seen(before, mean + more, source), cv=cv, unsure=cv / math.sqrt(len(recent)))


def _cv(seconds: Sequence[float], mean: float) -> float:
    """From differences of neighbours, whose variance is twice that of a step; with the prior's steps beside them."""
    squares = [((b - a) / mean) ** 2 / 2 for a, b in zip(seconds, seconds[1:], strict=False)] if mean else []
    return math.sqrt((PRIOR_CV**2 * PRIOR_STEPS + sum(squares)) / (PRIOR_STEPS + len(squares)))
