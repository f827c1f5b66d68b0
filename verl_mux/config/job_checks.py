"""Refuse a job's config where keys contradict one another, a trainer mode, or what a sleeping job must not keep on its device.

Runs in the job's driver before Ray starts (preflight.py) and in `verl-mux report --what-if` (check_rollout); reads a config, the
environment and the model's config file, and writes nothing. Each refusal names the key, its value and the way out.
"""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_mux.config.schema import MuxConfig, RolloutConfig, convert
from verl_mux.coordinator.bus.messages import AUTO
from verl_mux.errors import UserError
from verl_mux.memory.model_files import known_model_config
from verl_mux.placement.estimator import LEAST
from verl_mux.rollout.control.oversampling import MAX_CUTS, groups_to_launch
from verl_mux.rollout.engine.record import engines
from verl_mux.rollout.lengths.predictors import PREDICTORS

MODES = ("mux_separate", "mux_colocate")
_STREAMING_MODES = ("colocate_async", "separate_async")
_ROOT = "mux.rollout"
_ROLLOUT = "actor_rollout_ref.rollout"
_ROLES = ("reward.reward_model.enable", "reward.reward_model.enable_resource_pool", "distillation.enabled")


def check(config: DictConfig) -> MuxConfig | None:
    """Check a verl config that asks for one of our trainer modes; None for any other. Raises UserError: naming the key, its value
    and what is allowed."""
    mode = OmegaConf.select(config, "trainer.v1.trainer_mode")
    if not str(mode).startswith("mux_"):
        return None
    if mode not in MODES:
        raise UserError(f"trainer.v1.trainer_mode={mode} is unknown; ours are {', '.join(MODES)}")
    mux = load(config)
    rollout = config.actor_rollout_ref.rollout
    if rollout.name not in engines():
        raise UserError(f"trainer.v1.trainer_mode={mode} needs {_ROLLOUT}.name={' or '.join(engines())}, given {rollout.name}")
    if mode == "mux_separate" and (rollout.nnodes < 1 or rollout.n_gpus_per_node < 1):
        raise UserError(
            f"trainer.v1.trainer_mode=mux_separate needs a rollout pool: set {_ROLLOUT}.nnodes and "
            f".n_gpus_per_node to 1 or more, given {rollout.nnodes} and {rollout.n_gpus_per_node}"
        )
    gpus, size = _rollout_gpus(config, mode)
    if gpus % size:
        raise UserError(
            f"{_ROLLOUT}: {gpus} rollout GPUs cannot hold replicas of {size} GPUs (tensor x data x pipeline "
            "parallel size); the number of GPUs must be a multiple of it"
        )
    unsupported = f"is not supported by trainer.v1.trainer_mode={mode}"
    # verl keeps these roles awake on GPUs, and no phase of ours covers them.
    _forbid(config, _ROLES, f"{unsupported}, whose leases do not cover it", "False")
    _forbid(config, ["algorithm.filter_groups.enable"], f"{unsupported}; use sync", "False")
    _check_memory(config, mode, unsupported)
    updates = OmegaConf.select(config, f"trainer.v1.{mode}.parameter_sync_step")
    if updates not in (None, 1):
        raise UserError(f"trainer.v1.{mode}.parameter_sync_step is {updates}; {mode} is strictly on-policy, 1 is allowed")
    if mode == "mux_colocate" and mux.coordinator and sorted(mux.nodes.rollout) != sorted(mux.nodes.train):
        raise UserError(
            f"trainer.v1.trainer_mode=mux_colocate runs both phases on the same nodes: mux.nodes.rollout is {mux.nodes.rollout} "
            f"and mux.nodes.train is {mux.nodes.train}; they must be equal"
        )
    check_rollout_keys(config, mux)
    if mux.rollout.controlled:
        ours = "does not go with mux.rollout's order, moves, over-sampling and segments, which"
        _forbid(config, [f"{_ROLLOUT}.enable_rollout_routing_replay"], f"{ours} do not keep routed experts", "False")
        _forbid(config, ["trainer.v1.sampler.custom_sampler.path"], f"{ours} choose the batch themselves", "null")
    return mux


def _forbid(config: DictConfig, keys: Iterable[str], why: str, allowed: str) -> None:
    """Refuse each of these keys that is set to something true."""
    for key in keys:
        if value := OmegaConf.select(config, key):
            raise UserError(f"{key}={value} {why}; allowed: {allowed}")


def load(config: DictConfig) -> MuxConfig:
    """Return the `mux` part of a whole verl config, with defaults where there is none. Raises UserError: an unknown key, a value
    that is not possible, or keys that contradict one another."""
    mux = convert(_plain(config), MuxConfig, "mux")
    if (transport := mux.sync.transport) != "sockets":
        if not mux.sync.verify:
            raise UserError(f"mux.sync.transport={transport} relies on digests: mux.sync.verify is False and must be True")
        if importlib.util.find_spec(transport) is None:
            missing = f"the package {transport} is not installed here; install it, or use sockets"
            raise UserError(f"mux.sync.transport={transport}: {missing}")
    for side in ("rollout", "train"):
        if not getattr(mux.nodes, side):
            raise UserError(f"mux.nodes.{side} is empty; name at least one node of the coordinator, e.g. [{side}0]")
    counts = len(mux.profiled.rollout), len(mux.profiled.train)
    if counts[0] != counts[1] or 0 < counts[0] < LEAST:
        raise UserError(
            f"mux.profiled has {counts[0]} rollouts and {counts[1]} training phases; as many of both are needed, at least {LEAST}"
        )
    if AUTO in (*mux.nodes.rollout, *mux.nodes.train):
        if mux.nodes.rollout != [AUTO] or mux.nodes.train != [AUTO]:
            raise UserError(
                f"mux.nodes.rollout is {mux.nodes.rollout} and mux.nodes.train is {mux.nodes.train}; the coordinator chooses both"
                " (mux.nodes=auto) or none"
            )
        if not mux.coordinator:
            raise UserError("mux.nodes=auto leaves the nodes to a coordinator, but mux.coordinator is not set")
    mux.job = mux.job or str(OmegaConf.select(config, "trainer.experiment_name") or "job")
    return mux


def _plain(config: DictConfig) -> Any:
    """The values under `mux` with interpolations resolved; names that look like numbers stay names."""
    try:
        node = OmegaConf.select(config, "mux")
        values = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    except OmegaConfBaseException as error:
        raise UserError(f"mux: {str(error).splitlines()[0]}") from None
    if not isinstance(values, dict):
        return {} if values is None else values
    if values.get("nodes") == AUTO:
        values["nodes"] = {"rollout": [AUTO], "train": [AUTO]}
    if isinstance(values.get("job"), int):
        values["job"] = str(values["job"])
    if isinstance(values.get("device"), dict) and isinstance(values["device"].get("sleep_level"), int):
        values["device"]["sleep_level"] = str(values["device"]["sleep_level"])
    return values


def _rollout_gpus(config: DictConfig, mode: str) -> tuple[int, int]:
    """GPUs that generate, and GPUs of one replica."""
    rollout = config.actor_rollout_ref.rollout
    side = rollout if mode == "mux_separate" else config.trainer
    size = rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
    return side.nnodes * side.n_gpus_per_node, size


# ---------------------------------------------------------------- device memory

_STRATEGIES = ("fsdp", "fsdp2")
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_WINDOWS = ("sliding_attention", "chunked_attention")
_NO_SCALES = "its scales do not survive a sleep"
# SGLang's own arguments that quantize weights, and keys of a model's config that say its file holds quantized weights.
_QUANTIZERS = ("quantization", "modelopt_quant", "torchao_config", "rl_quant_profile")
_QUANTIZED = ("quantization_config", "compression_config")


def _check_memory(config: DictConfig, mode: str, unsupported: str) -> None:
    """Each of these is right in verl's own trainer modes, where no other job wants the device."""
    # verl's other training engines have offload keys of their own, and none has been seen to leave the device.
    critic = OmegaConf.select(config, "algorithm.adv_estimator") == "gae" or OmegaConf.select(config, "critic.enable")
    for role in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", *(["critic"] if critic else [])):
        if OmegaConf.select(config, f"{role}.strategy") not in (None, *_STRATEGIES):
            _forbid(config, [f"{role}.strategy"], unsupported, ", ".join(_STRATEGIES))
    model = "actor_rollout_ref.model"
    if not OmegaConf.select(config, f"{model}.lora.merge"):
        for key in (f"{model}.lora_rank", f"{model}.lora.rank", f"{model}.lora_adapter_path"):  # three spellings of one choice
            if value := OmegaConf.select(config, key):
                raise UserError(
                    f"trainer.v1.trainer_mode={mode} syncs whole weights: {key}={value} needs {model}.lora.merge=true"
                )
    arguments = f"{_ROLLOUT}.engine_kwargs.{OmegaConf.select(config, f'{_ROLLOUT}.name')}"
    quantizers = [f"{_ROLLOUT}.quantization", *(f"{arguments}.{name}" for name in _QUANTIZERS)]
    _forbid(config, quantizers, f"{unsupported}: {_NO_SCALES}", "null")
    overrides = f"{arguments}.json_model_override_args"
    if "quantization_config" in str(OmegaConf.select(config, overrides)):
        raise UserError(f"{overrides} has a quantization_config, which {unsupported}: {_NO_SCALES}; allowed: none")
    # A draft model sleeps with the engine's weights, and neither a copy nor a sync brings it back.
    drafts = f"{unsupported}: nothing brings a draft model back after a sleep"
    algorithm = f"{arguments}.speculative_algorithm"
    if OmegaConf.select(config, algorithm) != "NGRAM":  # which needs no model of its own
        _forbid(config, [algorithm], drafts, "NGRAM, null")
    for key in (f"{model}.mtp", f"{_ROLLOUT}.mtp"):
        if OmegaConf.select(config, f"{key}.enable"):
            _forbid(config, [f"{key}.enable_rollout"], drafts, "False")
    saver = f"{arguments}.enable_memory_saver"
    if OmegaConf.select(config, saver) is False:
        raise UserError(f"{saver}=False: a sleeping engine would keep all its memory; trainer.v1.trainer_mode={mode} needs True")


def check_surroundings(config: DictConfig) -> None:
    """Check the environment and the model's config file. Raises UserError."""
    for variable in _ALLOCATOR:
        words = os.environ.get(variable, "").replace(" ", "").lower()
        if "expandable_segments:true" in words:
            raise UserError(
                f"{variable}={os.environ[variable]}: torch_memory_saver frees nothing with expandable segments; take them out"
            )
    path = str(OmegaConf.select(config, "actor_rollout_ref.model.path"))
    model, named = known_model_config(path) or {}, f"actor_rollout_ref.model.path={path}"
    if quantized := next((key for key in _QUANTIZED if _language_model(model).get(key)), None):
        raise UserError(f"{named} is quantized ({quantized}): {_NO_SCALES}; allowed: models in bf16, fp16 or fp32")
    if window := sliding_window(model):
        raise UserError(
            f"{named} has sliding-window attention ({window}): SGLang 0.5.12 keeps its KV cache on the device while it sleeps;"
            " allowed: models without"
        )


def sliding_window(model: Mapping[str, Any]) -> str | None:
    """The key of a model's config that says that layers see only a window."""
    config = _language_model(model)
    if any(kind in _WINDOWS for kind in config.get("layer_types") or ()):
        return "layer_types"
    if config.get("use_sliding_window") and config.get("sliding_window"):
        return "use_sliding_window"
    return None


def _language_model(model: Mapping[str, Any]) -> dict[str, Any]:
    return {**model, **(model.get("text_config") or {})}


# ---------------------------------------------------------------- mux.rollout


@dataclass(frozen=True)
class Surroundings:
    """What the rest of the job's config says. engine_requests: all engines' together; None where unknown.

    train_batch_size: prompt groups. samples_per_group: rollout.n. bypasses_old_log_probs: rollout_correction.bypass_mode.
    """

    trainer_mode: str
    train_batch_size: int
    samples_per_group: int
    max_response_length: int
    engine_requests: int | None = None
    rollout_nodes: Sequence[str] = ()
    bypasses_old_log_probs: bool = False


def check_rollout_keys(config: DictConfig, mux: MuxConfig) -> None:
    """Check `mux.rollout` against the rest of the job's config. Raises UserError."""
    rollout = config.actor_rollout_ref.rollout
    mode = str(config.trainer.v1.trainer_mode)
    at_once = OmegaConf.select(rollout, "max_num_seqs")
    gpus, size = _rollout_gpus(config, mode)
    around = Surroundings(
        trainer_mode=mode,
        train_batch_size=OmegaConf.select(config, "data.train_batch_size") or 1,
        samples_per_group=OmegaConf.select(rollout, "n") or 1,
        max_response_length=OmegaConf.select(config, "data.max_response_length") or sys.maxsize,
        engine_requests=at_once * max(1, gpus // size) if at_once else None,
        rollout_nodes=list(mux.nodes.rollout or []),
        bypasses_old_log_probs=bool(OmegaConf.select(config, "algorithm.rollout_correction.bypass_mode")),
    )
    check_rollout(mux.rollout, around)


def check_rollout(keys: RolloutConfig, around: Surroundings) -> None:
    """Check these keys together and with the rest of the job. Raises UserError."""
    _check_modes(keys, around.trainer_mode)  # first: elsewhere a better value would not help
    for possible, key, value, allowed in _conditions(keys, around):
        if not possible:
            raise UserError(f"{_ROOT}.{key}={value} is not possible; allowed: {allowed}")
    nodes = list(around.rollout_nodes)
    if keys.migration:
        why = f"{_ROOT}.migration=True is not possible: "
        if keys.cuts:
            raise UserError(f"{why}over-sampling and segments cut the tail off that migration would gather")
        if nodes != [AUTO] and len(nodes) == 1:
            raise UserError(f"{why}mux.nodes.rollout={nodes} names one node; two or more are needed")
    if keys.growth.own is not None:
        why = "both say which engines a rollout's last responses run on"
        _exclude("growth.own", list(keys.growth.own), {**_cuts(keys), "migration": keys.migration or None}, why)
    if keys.defers:
        _exclude("tail", keys.tail, _cuts(keys), "rounds of whole responses leave no tail to cut off")
    if around.bypasses_old_log_probs:
        bypass = "algorithm.rollout_correction.bypass_mode=True leaves out"
        if keys.cuts:
            what = "old log-probs of the present weights"
            raise UserError(
                f"{_ROOT}.segments.treatment={keys.segments.treatment} needs {what}, which {bypass}; allowed: bypass_mode=False"
            )
        if keys.trigger.n_min is not None and keys.trigger.entropy is not None:
            what = "the entropy that verl computes with old log-probs"
            raise UserError(f"{_ROOT}.trigger.entropy={list(keys.trigger.entropy)} needs {what}, which {bypass}; allowed: null")


def _check_modes(keys: RolloutConfig, mode: str) -> None:
    """Each part needs a trainer that offers what it builds on."""
    why_not = {
        "sync": "its trainer offers no place to cut requests off",
        "colocate_async": "it cuts off and resumes unfinished responses already",
        "separate_async": "it has no barrier whose tail could be cut off",
    }
    cut, whole = why_not.get(mode, "what it would do there is not known"), "its trainer hands prompts out"
    nodes = "only a rollout pool of its own has nodes that come and go while the rollout runs"
    batches = "its trainer waits for whole batches of one version of the weights"
    parts: list[tuple[str, Any, tuple[str, ...], str]] = [
        *((key, value, MODES, cut) for key, value in _cuts(keys).items()),
        ("trigger.n_min", keys.trigger.n_min, _STREAMING_MODES, batches),
        ("migration", keys.migration or None, ("mux_separate",), nodes),
        ("growth.own", keys.growth.own, ("mux_separate",), nodes),
        ("dispatch.order", keys.dispatch.order if keys.dispatch.order != "fifo" else None, MODES, whole),
        ("tail", keys.tail if keys.defers else None, MODES, whole),
    ]
    for key, value, allowed, why in parts:
        if value is not None and mode not in allowed:
            raise UserError(
                f"{_ROOT}.{key}={value} does not go with trainer.v1.trainer_mode={mode}: {why}; "
                f"allowed trainer modes: {', '.join(allowed)}"
            )


def _conditions(keys: RolloutConfig, around: Surroundings) -> Iterator[tuple[bool, str, Any, str]]:
    """(holds, key, value, what is allowed) of each value that the rest of the job bounds."""
    rate, limit, segments, own = keys.oversample.rate, around.max_response_length, keys.segments, keys.growth.own
    if rate > 0 and around.engine_requests is not None:
        launched = groups_to_launch(rate, around.train_batch_size) * around.samples_per_group
        highest = around.engine_requests // around.samples_per_group / around.train_batch_size - 1
        yield launched <= around.engine_requests, "oversample.rate", rate, (
            f"it would launch {launched} responses and the engines hold {around.engine_requests} at once, so "
            + (f"at most {math.floor(highest * 1000) / 1000:g}" if highest >= 0 else "only 0, or larger or more engines")
        )  # fmt: skip
    longest = segments.max_length or limit
    yield longest <= limit, "segments.max_length", longest, f"1 to data.max_response_length={limit}"
    length = segments.segment_length
    yield length is None or length <= longest, "segments.segment_length", length, f"1 to {longest}, the maximum"
    older = "null where no response goes on under newer weights (oversample.rate, segments.segment_length)"
    yield keys.max_lag is None or keys.cuts, "max_lag", keys.max_lag, older
    cuts = keys.oversample.max_cuts
    default = f"its default with {_ROOT}.segments.segment_length, where {_ROOT}.max_lag says how old a response may become"
    yield length is None or cuts == MAX_CUTS, "oversample.max_cuts", cuts, default
    yield keys.dispatch.predictor in PREDICTORS, "dispatch.predictor", keys.dispatch.predictor, ", ".join(PREDICTORS)
    if own is not None:
        nodes = list(around.rollout_nodes)
        alone = "null with one rollout node, or where the coordinator chooses them"
        some = f"some of mux.nodes.rollout={nodes}, and not all" if len(nodes) > 1 else alone
        yield 0 < len(set(own)) < len(nodes) and set(own) <= set(nodes), "growth.own", own, some
    if (entropy := keys.trigger.entropy) is not None:
        yield 0 <= entropy[0] < entropy[1], "trigger.entropy", list(entropy), "[low, high], 0 <= low < high"
    n_min, most = keys.trigger.n_min, around.train_batch_size
    yield n_min is None or n_min <= most, "trigger.n_min", n_min, f"1 to data.train_batch_size={most} prompt groups"


def _cuts(keys: RolloutConfig) -> dict[str, Any]:
    """The keys that let requests be cut off, None where they do not."""
    rate = keys.oversample.rate if keys.oversample.rate > 0 else None
    return {"oversample.rate": rate, "segments.segment_length": keys.segments.segment_length}


def _exclude(key: str, value: Any, others: Mapping[str, Any], why: str) -> None:
    for other, given in others.items():
        if given is not None:
            raise UserError(f"{_ROOT}.{key}={value} is not possible with {_ROOT}.{other}={given}: {why}; allowed: one of the two")
