"""What values `mux.rollout` may take, alone, together, and with a trainer mode. Each refusal names the key and the way out.

Called in the driver before Ray starts, and by verl_mux/what_if; pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verl_mux.config.rollout_keys import DispatchConfig, OversampleConfig, RolloutConfig, SegmentsConfig, TriggerConfig
from verl_mux.errors import UserError
from verl_mux.rollout.control.launch_order import ORDERS
from verl_mux.rollout.control.oversampling import MAX_CUTS, STRATEGIES, groups_to_launch
from verl_mux.rollout.control.segments import TREATMENTS
from verl_mux.rollout.control.tail_rounds import TAILS
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


def check_rollout(config: RolloutConfig, around: Surroundings) -> None:
    """All the checks.

    Raises:
        UserError: naming the key, what was given and what is allowed.
    """
    # The mode first: elsewhere a better value would not help.
    for key, given in _cuts(config).items():
        if given is not None:
            _check_mode(key, given, around, _MUX_MODES, _WHY_NOT.get(around.trainer_mode, "what it would do there is not known"))
    _check_oversample(config.oversample, around)
    _check_segments(config.segments, around)
    _check_lag(config)
    _check_dispatch(config.dispatch, around)
    _require(config.tail in TAILS, "tail", config.tail, ", ".join(TAILS))
    _check_trigger(config.trigger, around)
    _check_migration(config, around)
    _check_growth(config, around)
    _check_defer(config, around)
    if around.bypasses_old_log_probs and config.cuts:
        raise UserError(
            f"{ROOT}.segments.treatment={config.segments.treatment} needs old log-probs of the present weights, which "
            "algorithm.rollout_correction.bypass_mode=True leaves out; allowed: bypass_mode=False"
        )


def _require(ok: bool, key: str, given: Any, allowed: str) -> None:
    if not ok:
        raise UserError(f"{ROOT}.{key}={given} is not possible; allowed: {allowed}")


_MUX_MODES = ("mux_separate", "mux_colocate")
_STREAMING_MODES = ("colocate_async", "separate_async")
_WHY_NOT = {
    "sync": "its trainer offers no place to cut requests off",
    "colocate_async": "it cuts off and resumes unfinished responses already",
    "separate_async": "it has no barrier whose tail could be cut off",
}


def _check_mode(key: str, given: Any, around: Surroundings, allowed: tuple[str, ...], why: str) -> None:
    if around.trainer_mode not in allowed:
        raise UserError(
            f"{ROOT}.{key}={given} does not go with trainer.v1.trainer_mode={around.trainer_mode}: {why}; "
            f"allowed trainer modes: {', '.join(allowed)}"
        )


def _cuts(config: RolloutConfig) -> dict[str, Any]:
    """The keys that let requests be cut off, None where they do not."""
    rate = config.oversample.rate if config.oversample.rate > 0 else None
    return {"oversample.rate": rate, "segments.segment_length": config.segments.segment_length}


def _check_oversample(it: OversampleConfig, around: Surroundings) -> None:
    _require(it.rate >= 0, "oversample.rate", it.rate, "0 (off) or more")
    _require(it.max_cuts >= 0, "oversample.max_cuts", it.max_cuts, "0 or more")
    if it.rate == 0 or around.engine_requests is None:
        return
    launched = groups_to_launch(it.rate, around.train_batch_size) * around.samples_per_group
    highest = around.engine_requests // around.samples_per_group / around.train_batch_size - 1
    _require(
        launched <= around.engine_requests,
        "oversample.rate",
        it.rate,
        f"it would launch {launched} responses and the engines hold {around.engine_requests} at once, so "
        + (f"at most {math.floor(highest * 1000) / 1000:g}" if highest >= 0 else "only 0, or larger or more engines"),
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


def _check_lag(config: RolloutConfig) -> None:
    _require(config.max_lag is None or config.max_lag >= 0, "max_lag", config.max_lag, "0 versions or more, or null")
    _require(config.max_lag_strategy in STRATEGIES, "max_lag_strategy", config.max_lag_strategy, ", ".join(STRATEGIES))
    _require(
        config.max_lag is None or config.cuts,
        "max_lag",
        config.max_lag,
        "null where no response goes on under newer weights (oversample.rate, segments.segment_length)",
    )
    _require(
        config.segments.segment_length is None or config.oversample.max_cuts == MAX_CUTS,
        "oversample.max_cuts",
        config.oversample.max_cuts,
        f"its default with {ROOT}.segments.segment_length, where {ROOT}.max_lag limits how old a response may become",
    )


def _check_dispatch(it: DispatchConfig, around: Surroundings) -> None:
    _require(it.order in ("auto", *ORDERS), "dispatch.order", it.order, f"auto, {', '.join(ORDERS)}")
    _require(it.predictor in PREDICTORS, "dispatch.predictor", it.predictor, ", ".join(PREDICTORS))
    try:
        make_predictor(it.predictor)
    except UserError as error:
        raise UserError(f"{ROOT}.dispatch.predictor: {error}") from None
    if it.order != "fifo":
        _check_mode("dispatch.order", it.order, around, _MUX_MODES, "its trainer hands prompts out")


def _check_trigger(it: TriggerConfig, around: Surroundings) -> None:
    _require(it.t_max_s > 0, "trigger.t_max_s", it.t_max_s, "above 0 seconds")
    if it.entropy is not None:
        _require(0 <= it.entropy[0] < it.entropy[1], "trigger.entropy", list(it.entropy), "[low, high], 0 <= low < high, in nats")
    if it.n_min is None:
        return
    why = "its trainer waits for whole batches of one version of the weights"
    most = around.train_batch_size
    _require(it.n_min >= 1, "trigger.n_min", it.n_min, f"1 to data.train_batch_size={most} prompt groups, or null")
    _check_mode("trigger.n_min", it.n_min, around, _STREAMING_MODES, why)
    _require(it.n_min <= most, "trigger.n_min", it.n_min, f"1 to data.train_batch_size={most} prompt groups, or null")
    if it.entropy is not None and around.bypasses_old_log_probs:
        raise UserError(
            f"{ROOT}.trigger.entropy={list(it.entropy)} needs the entropy that verl computes with old log-probs, which "
            "algorithm.rollout_correction.bypass_mode=True leaves out; allowed: null"
        )


def _check_migration(config: RolloutConfig, around: Surroundings) -> None:
    if not config.migration:
        return
    why = "only a rollout pool of its own has nodes to give back while the rollout runs"
    _check_mode("migration", True, around, ("mux_separate",), why)
    refused = f"{ROOT}.migration=True is not possible: "
    if config.cuts:
        raise UserError(refused + "over-sampling and segments cut the tail off that migration would gather")
    if list(around.rollout_nodes) != ["auto"] and len(around.rollout_nodes) == 1:
        raise UserError(refused + f"mux.nodes.rollout={list(around.rollout_nodes)} names one node; two or more are needed")


def _check_growth(config: RolloutConfig, around: Surroundings) -> None:
    own = config.growth.own
    if own is None:
        return
    nodes = list(around.rollout_nodes)
    some = f"some of mux.nodes.rollout={nodes}, and not all"
    allowed = some if len(nodes) > 1 else "null with one rollout node, or where the coordinator chooses them"
    _require(0 < len(set(own)) < len(nodes) and set(own) <= set(nodes), "growth.own", own, allowed)
    why = "only a rollout pool of its own has nodes that come and go while the rollout runs"
    _check_mode("growth.own", own, around, ("mux_separate",), why)
    for key, value in {**_cuts(config), "migration": config.migration or None}.items():
        if value is not None:
            raise UserError(
                f"{ROOT}.growth.own={own} is not possible with {ROOT}.{key}={value}: both choose which engines a rollout's last "
                "responses run on; allowed: one of the two"
            )


def _check_defer(config: RolloutConfig, around: Surroundings) -> None:
    if not config.defers:
        return
    _check_mode("tail", config.tail, around, _MUX_MODES, "its trainer hands prompts out")
    for key, given in _cuts(config).items():
        if given is not None:
            raise UserError(
                f"{ROOT}.tail=defer is not possible with {ROOT}.{key}={given}: rounds of whole responses leave no tail to cut "
                f"off; allowed: one of the two"
            )
