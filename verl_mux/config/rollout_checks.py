"""What values `mux.rollout` may take, alone, together, and with a trainer mode. Each refusal names the key and the way out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verl_mux.config.rollout_keys import SPECULATIVE, DispatchConfig, RolloutConfig, SegmentsConfig
from verl_mux.errors import UserError
from verl_mux.rollout.control.growth_plan import GrowthPolicy
from verl_mux.rollout.control.lag_limit import STRATEGIES
from verl_mux.rollout.control.launch_order import ORDERS
from verl_mux.rollout.control.migration_plan import MigrationPolicy
from verl_mux.rollout.control.oversampling import LEFTOVERS, TOKENS, OversamplingPolicy
from verl_mux.rollout.control.segment_loss import TREATMENTS
from verl_mux.rollout.control.tail_rounds import TAILS
from verl_mux.rollout.control.trigger import TriggerPolicy
from verl_mux.rollout.lengths.predictor import PREDICTORS, make_predictor

ROOT = "mux.rollout"


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
    on_gpu: bool = True
    seeded_sampling: bool = False


def check_rollout(config: RolloutConfig, around: Surroundings) -> None:
    """All the checks.

    Raises:
        UserError: naming the key, what was given and what is allowed.
    """
    # The mode first: elsewhere a better value would not help.
    _check_cuts_go_with(config, around.trainer_mode)
    _check_oversample(config.oversample, around)
    _check_segments(config.segments, around)
    _check_lag(config)
    _check_dispatch(config.dispatch)
    _check_migration(config.migration)
    _check_growth(config.growth, around)
    _check_tail(config)
    _check_speculative(config, around)
    _check_trigger(config.trigger)
    _check_combination(config, around)


def _require(ok: bool, key: str, given: Any, allowed: str) -> None:
    if not ok:
        raise UserError(f"{ROOT}.{key}={given} is not possible; allowed: {allowed}")


def _check_oversample(it: OversamplingPolicy, around: Surroundings) -> None:
    _require(it.rate >= 0, "oversample.rate", it.rate, "0 (off) or more")
    _require(it.leftover in LEFTOVERS, "oversample.leftover", it.leftover, ", ".join(LEFTOVERS))
    _require(it.tokens in TOKENS, "oversample.tokens", it.tokens, ", ".join(TOKENS))
    _require(it.max_cuts >= 0, "oversample.max_cuts", it.max_cuts, "0 or more")
    _require(it.max_failures >= 0, "oversample.max_failures", it.max_failures, "0 or more")
    if it.rate == 0:
        return
    _check_bias(it)
    if around.engine_requests is None:
        return
    launched = math.ceil(round((1 + it.rate) * around.train_batch_size, 9)) * around.samples_per_group
    highest = around.engine_requests // around.samples_per_group / around.train_batch_size - 1
    _require(
        launched <= around.engine_requests,
        "oversample.rate",
        it.rate,
        f"it would launch {launched} responses and the engines hold {around.engine_requests} at once, so "
        + (f"at most {math.floor(highest * 1000) / 1000:g}" if highest >= 0 else "only 0, or larger or more engines"),
    )


def _check_bias(it: OversamplingPolicy) -> None:
    """Both look on-policy, and train what was drawn until it was short."""
    for key, given, biased, instead in (("leftover", it.leftover, "drop", "requeue"), ("tokens", it.tokens, "restart", "resume")):
        _require(
            given != biased or it.accept_length_bias,
            f"oversample.{key}",
            given,
            f"{instead}; {biased} trains short responses more often than long ones, which is not on-policy: "
            f"{ROOT}.oversample.accept_length_bias=true where that is wanted all the same",
        )


def _check_lag(config: RolloutConfig) -> None:
    _require(config.max_lag is None or config.max_lag >= 0, "max_lag", config.max_lag, "0 versions or more, or null")
    _require(config.max_lag_strategy in STRATEGIES, "max_lag_strategy", config.max_lag_strategy, ", ".join(STRATEGIES))
    _require(
        config.max_lag is None or config.keeps_tokens,
        "max_lag",
        config.max_lag,
        "null where no response goes on under newer weights (oversample.rate with tokens=resume, segments.segment_length)",
    )
    _require(
        config.segments.segment_length is None or config.oversample.max_cuts == OversamplingPolicy().max_cuts,
        "oversample.max_cuts",
        config.oversample.max_cuts,
        f"its default with {ROOT}.segments.segment_length, where {ROOT}.max_lag says how old a response may become",
    )


def _check_segments(it: SegmentsConfig, around: Surroundings) -> None:
    _require(it.treatment in TREATMENTS, "segments.treatment", it.treatment, ", ".join(TREATMENTS))
    _require(it.max_segments >= 1, "segments.max_segments", it.max_segments, "1 or more")
    if it.max_length is not None:
        limit = around.max_response_length
        _require(1 <= it.max_length <= limit, "segments.max_length", it.max_length, f"1 to data.max_response_length={limit}")
    if it.segment_length is not None:
        longest = it.max_length or around.max_response_length
        _require(1 <= it.segment_length <= longest, "segments.segment_length", it.segment_length, f"1 to {longest}, the maximum")


def _check_dispatch(it: DispatchConfig) -> None:
    _require(it.order in ("auto", *ORDERS), "dispatch.order", it.order, f"auto, {', '.join(ORDERS)}")
    _require(it.predictor in PREDICTORS, "dispatch.predictor", it.predictor, ", ".join(PREDICTORS))
    try:
        make_predictor(it.predictor)
    except UserError as error:
        raise UserError(f"{ROOT}.dispatch.predictor: {error}") from None


def _check_migration(it: MigrationPolicy) -> None:
    _require(0 < it.threshold <= 1, "migration.threshold", it.threshold, "above 0, at most 1")
    _require(it.min_gain_s >= 0, "migration.min_gain_s", it.min_gain_s, "0 node-seconds or more")
    _require(it.max_slowdown >= 0, "migration.max_slowdown", it.max_slowdown, "0 or more")


def _check_growth(it: GrowthPolicy, around: Surroundings) -> None:
    _require(it.min_gain_s >= 0, "growth.min_gain_s", it.min_gain_s, "0 seconds or more")
    if it.own is not None:
        nodes = list(around.rollout_nodes)
        allowed = (
            f"some of mux.nodes.rollout={nodes}, and not all"
            if len(nodes) > 1
            else "null with one rollout node, or where the coordinator chooses them"
        )
        _require(0 < len(set(it.own)) < len(nodes) and set(it.own) <= set(nodes), "growth.own", it.own, allowed)


def _check_tail(config: RolloutConfig) -> None:
    _require(config.tail in TAILS, "tail", config.tail, ", ".join(TAILS))
    _require(
        config.defer.window is None or config.defer.window >= 2, "defer.window", config.defer.window, "2 steps or more, or null"
    )
    _require(config.defer.max_mean > 1, "defer.max_mean", config.defer.max_mean, "above 1")


def _check_speculative(config: RolloutConfig, around: Surroundings) -> None:
    _require(config.speculative in SPECULATIVE, "speculative", config.speculative, ", ".join(SPECULATIVE))
    if config.speculative != "none" and around.trainer_mode not in _MUX_MODES:
        why = "its engines take actor_rollout_ref.rollout.engine_kwargs alone"
        raise UserError(_not_with("speculative", config.speculative, around.trainer_mode, _MUX_MODES, why))
    _require(
        config.speculative == "none" or around.on_gpu,
        "speculative",
        config.speculative,
        "none without a GPU: SGLang 0.5.12 verifies drafts by CUDA kernels only",
    )
    _require(
        config.speculative == "none" or not around.seeded_sampling,
        "speculative",
        config.speculative,
        "none with mux.seeded_sampling=true, which draws each token from its request's seed",
    )


def _check_trigger(it: TriggerPolicy) -> None:
    _require(it.n_min >= 1, "trigger.n_min", it.n_min, "1 prompt group or more")
    _require(it.t_max_s > 0, "trigger.t_max_s", it.t_max_s, "above 0 seconds")
    entropy = it.entropy
    _require(entropy.low < entropy.high, "trigger.entropy.low", entropy.low, f"below high={entropy.high}")
    widest = (entropy.high - entropy.low) / 2
    _require(0 <= entropy.margin <= widest, "trigger.entropy.margin", entropy.margin, f"0 to {widest:g}, half way to low")
    for name, lowest in (("n_min_bounds", 1), ("t_max_s_bounds", 1e-3)):
        low, high = getattr(entropy, name)
        _require(lowest <= low <= high, f"trigger.entropy.{name}", [low, high], f"{lowest} <= lowest <= highest")


_MUX_MODES = ("mux_separate", "mux_colocate")
_STREAMING_MODES = ("colocate_async", "separate_async")
_WHY_NOT = {
    "sync": "its trainer offers no place to cut requests off",
    "colocate_async": "it cuts off and resumes unfinished responses already",
    "separate_async": "it has no barrier whose tail could be cut off",
}


def _cuts(config: RolloutConfig) -> dict[str, Any]:
    """The keys that let requests be cut off, None where they do not."""
    rate = config.oversample.rate if config.oversample.rate > 0 else None
    return {"oversample.rate": rate, "segments.segment_length": config.segments.segment_length}


def _check_cuts_go_with(config: RolloutConfig, mode: str) -> None:
    for key, given in _cuts(config).items():
        if given is not None and mode not in _MUX_MODES:
            why = _WHY_NOT.get(mode, "what it would do there is not known")
            raise UserError(_not_with(key, given, mode, _MUX_MODES, why))


def _check_combination(config: RolloutConfig, around: Surroundings) -> None:
    mode = around.trainer_mode
    if config.trigger.enable:
        _check_trigger_goes_with(config.trigger, around)
    if config.migration.enable:
        _check_migration_goes_with(config, around)
    if config.growth.own is not None:
        _check_growth_goes_with(config, around)
    if config.dispatch.order != "fifo" and mode not in _MUX_MODES:
        raise UserError(_not_with("dispatch.order", config.dispatch.order, mode, _MUX_MODES, "its trainer hands prompts out"))
    if config.defers:
        _check_defer_goes_with(config, around)
    if all(given is not None for given in _cuts(config).values()):
        _check_both_cuts(config.oversample)
    if around.bypasses_old_log_probs and config.keeps_tokens and config.segments.treatment != "sais":
        raise UserError(
            f"{ROOT}.segments.treatment={config.segments.treatment} needs old log-probs of the present weights, which "
            "algorithm.rollout_correction.bypass_mode=True leaves out; allowed: bypass_mode=False, or treatment=sais"
        )


def _check_migration_goes_with(config: RolloutConfig, around: Surroundings) -> None:
    if around.trainer_mode != "mux_separate":
        why = "only a rollout pool of its own has nodes to give back while the rollout runs"
        raise UserError(_not_with("migration.enable", True, around.trainer_mode, ("mux_separate",), why))
    if config.cuts:
        raise UserError(_not_together("over-sampling and segments cut the tail off that migration would gather"))
    if list(around.rollout_nodes) != ["auto"] and len(around.rollout_nodes) == 1:
        raise UserError(_not_together(f"mux.nodes.rollout={list(around.rollout_nodes)} names one node; two or more are needed"))


def _check_growth_goes_with(config: RolloutConfig, around: Surroundings) -> None:
    given = list(config.growth.own or ())
    if around.trainer_mode != "mux_separate":
        why = "only a rollout pool of its own has nodes that come and go while the rollout runs"
        raise UserError(_not_with("growth.own", given, around.trainer_mode, ("mux_separate",), why))
    others = {**_cuts(config), "migration.enable": config.migration.enable or None}
    for key, value in others.items():
        if value is not None:
            raise UserError(
                f"{ROOT}.growth.own={given} is not possible with {ROOT}.{key}={value}: both say which engines a rollout's last "
                "responses run on; allowed: one of the two"
            )


def _check_defer_goes_with(config: RolloutConfig, around: Surroundings) -> None:
    if around.trainer_mode not in _MUX_MODES:
        raise UserError(_not_with("tail", config.tail, around.trainer_mode, _MUX_MODES, "its trainer hands prompts out"))
    for key, given in _cuts(config).items():
        if given is not None:
            raise UserError(
                f"{ROOT}.tail=defer is not possible with {ROOT}.{key}={given}: rounds of whole responses leave no tail to cut "
                f"off; allowed: one of the two"
            )


def _check_trigger_goes_with(it: TriggerPolicy, around: Surroundings) -> None:
    if around.trainer_mode not in _STREAMING_MODES:
        why = "its trainer waits for whole batches of one version of the weights"
        raise UserError(_not_with("trigger.enable", True, around.trainer_mode, _STREAMING_MODES, why))
    most = around.train_batch_size
    _require(it.n_min <= most, "trigger.n_min", it.n_min, f"1 to data.train_batch_size={most} prompt groups")
    if it.entropy.enable and around.bypasses_old_log_probs:
        raise UserError(
            f"{ROOT}.trigger.entropy.enable=True needs the entropy that verl computes with old log-probs, which "
            "algorithm.rollout_correction.bypass_mode=True leaves out; allowed: false"
        )


def _not_together(why: str) -> str:
    return f"{ROOT}.migration.enable=True is not possible: {why}"


def _check_both_cuts(it: OversamplingPolicy) -> None:
    for key, given, needed in (("leftover", it.leftover, "requeue"), ("tokens", it.tokens, "resume")):
        if given != needed:
            raise UserError(
                f"{ROOT}.oversample.{key}={given} contradicts {ROOT}.segments.segment_length: segments keep what is "
                f"unfinished; use {key}={needed} or switch one of them off"
            )


def _not_with(key: str, given: Any, mode: str, allowed: tuple[str, ...], why: str) -> str:
    return (
        f"{ROOT}.{key}={given} does not go with trainer.v1.trainer_mode={mode}: {why}; "
        f"allowed trainer modes: {', '.join(allowed)}"
    )
