"""Refuse keys of `mux.rollout` where they contradict one another or the rest of the job.

Runs where job_checks.py does, which calls it, and in `verl-mux report --what-if`; pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_mux.config.schema import Refusal, RolloutConfig
from verl_mux.coordinator.bus.messages import AUTO
from verl_mux.rollout.control.oversampling import MAX_CUTS, groups_to_launch
from verl_mux.rollout.lengths.predictors import PREDICTORS

MODES = ("mux_separate", "mux_colocate")
_STREAMING_MODES = ("colocate_async", "separate_async")
_MODE = "trainer.v1.trainer_mode"
_ROOT = "mux.rollout"
_FILTER = "algorithm.filter_groups"


@dataclass(frozen=True)
class Surroundings:
    """What the rest of the job's config says. engine_requests: all engines' together; None where unknown.

    train_batch_size: prompt groups. samples_per_group: rollout.n. bypasses_old_log_probs: rollout_correction.bypass_mode.
    filters_groups: algorithm.filter_groups.enable.
    """

    trainer_mode: str
    train_batch_size: int
    samples_per_group: int
    max_response_length: int
    engine_requests: int | None = None
    rollout_nodes: Sequence[str] = ()
    bypasses_old_log_probs: bool = False
    filters_groups: bool = False


def refused_rollout(keys: RolloutConfig, around: Surroundings) -> Iterator[Refusal]:
    """These keys together and with the rest of the job."""
    yield from _refused_modes(keys, around.trainer_mode)  # first: elsewhere a better value would not help
    for possible, key, value, allowed in _conditions(keys, around):
        if not possible:
            yield Refusal(f"{_ROOT}.{key}={value} is not possible; allowed: {allowed}", f"{_ROOT}.{key}", value)
    nodes = list(around.rollout_nodes)
    if keys.migration:
        key, why = f"{_ROOT}.migration", f"{_ROOT}.migration=True is not possible: "
        if keys.cuts:
            yield Refusal(f"{why}over-sampling and segments cut the tail off that migration would gather", key, True)
        if nodes != [AUTO] and len(nodes) == 1:
            yield Refusal(f"{why}mux.nodes.rollout={nodes} names one node; two or more are needed", key, True)
    if keys.growth.own is not None:
        why = "both say which engines a rollout's last responses run on"
        yield from _exclude("growth.own", list(keys.growth.own), {**_cuts(keys), "migration": keys.migration or None}, why)
    if keys.defers:
        yield from _exclude("tail", keys.tail, _cuts(keys), "rounds of whole responses leave no tail to cut off")
    if around.filters_groups:
        new = f"{_FILTER}.enable=True, which starts new prompts late in a step"
        yield from _refuse_with(new, "tail", keys.tail if keys.defers else None, "its rounds are planned for an epoch")
        yield from _refuse_with(new, "migration", keys.migration or None, "nodes go back when few responses are left")
    if around.bypasses_old_log_probs:
        bypass = "algorithm.rollout_correction.bypass_mode=True leaves out"
        if keys.cuts:
            key, given = f"{_ROOT}.segments.treatment", keys.segments.treatment
            what = f"{key}={given} needs old log-probs of the present weights, which {bypass}; allowed: bypass_mode=False"
            yield Refusal(what, key, given)
        if keys.trigger.n_min is not None and keys.trigger.entropy is not None:
            key, entropy = f"{_ROOT}.trigger.entropy", list(keys.trigger.entropy)
            what = f"{key}={entropy} needs the entropy that verl computes with old log-probs, which {bypass}; allowed: null"
            yield Refusal(what, key, entropy)


def _refused_modes(keys: RolloutConfig, mode: str) -> Iterator[Refusal]:
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
            line = f"{_ROOT}.{key}={value} does not go with {_MODE}={mode}: {why}; allowed trainer modes: {', '.join(allowed)}"
            yield Refusal(line, f"{_ROOT}.{key}", value)


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


def _refuse_with(other: str, key: str, value: Any, why: str) -> Iterator[Refusal]:
    if value is not None:
        line = f"{_ROOT}.{key}={value} is not possible with {other}: {why}; allowed: one of the two"
        yield Refusal(line, f"{_ROOT}.{key}", value)


def _exclude(key: str, value: Any, others: Mapping[str, Any], why: str) -> Iterator[Refusal]:
    for other, given in others.items():
        yield from _refuse_with(f"{_ROOT}.{other}={given}", key, value if given is not None else None, why)
