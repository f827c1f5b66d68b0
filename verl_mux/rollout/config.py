"""The keys under `mux.rollout`, checked at start.

    mux.rollout:
      oversample: {rate, leftover, tokens, max_cuts, max_failures}
      segments:   {segment_length, max_segments, max_length, treatment, truncated_reward}
      dispatch:   {order, predictor, age_weight}
      migration:  {enable, threshold, min_gain_s, max_slowdown}
      trigger:    {enable, n_min, t_max_s, entropy: {enable, high, low, margin, n_min_bounds, t_max_s_bounds}}

Every part is off, or harmless, by default.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, TypeVar

from verl_mux.errors import UserError
from verl_mux.rollout.config_checks import ROOT, Surroundings, check
from verl_mux.rollout.dispatch_order import default_order
from verl_mux.rollout.migration_plan import MigrationPolicy
from verl_mux.rollout.oversampling_messages import OversamplingPolicy
from verl_mux.rollout.segments import SegmentLimits
from verl_mux.rollout.trigger import EntropyFeedback, TriggerPolicy

_T = TypeVar("_T")


@dataclass(frozen=True)
class OversampleConfig:
    """rate 0: off. max_cuts: a prompt cut off so often runs without abort."""

    rate: float = 0.0
    leftover: str = "requeue"
    tokens: str = "resume"
    max_cuts: int = 2
    max_failures: int = 3


@dataclass(frozen=True)
class SegmentsConfig:
    """In tokens. segment_length None: off. max_length None: data.max_response_length. truncated_reward None: its score."""

    segment_length: int | None = None
    max_segments: int = 4
    max_length: int | None = None
    treatment: str = "pois"
    truncated_reward: float | None = None


@dataclass(frozen=True)
class DispatchConfig:
    """order `auto`: by trainer mode. age_weight: share of the queue a prompt moves forward for each step passed over."""

    order: str = "fifo"
    predictor: str = "default"
    age_weight: float = 0.1


@dataclass(frozen=True)
class MigrationConfig:
    """threshold: share of the responses done. min_gain_s: node-seconds. max_slowdown: share of the tail's time."""

    enable: bool = False
    threshold: float = 0.8
    min_gain_s: float = 1.0
    max_slowdown: float = 0.25


@dataclass(frozen=True)
class EntropyConfig:
    """high, low, margin: nats. Bounds: lowest and highest n_min (prompt groups) and t_max_s (seconds)."""

    enable: bool = False
    high: float = 1.0
    low: float = 0.2
    margin: float = 0.1
    n_min_bounds: tuple[int, int] = (1, 1024)
    t_max_s_bounds: tuple[float, float] = (0.1, 3600.0)


@dataclass(frozen=True)
class TriggerConfig:
    """n_min: prompt groups. t_max_s: seconds."""

    enable: bool = False
    n_min: int = 32
    t_max_s: float = 60.0
    entropy: EntropyConfig = field(default_factory=EntropyConfig)


@dataclass(frozen=True)
class RolloutConfig:
    """All of `mux.rollout`."""

    oversample: OversampleConfig = field(default_factory=OversampleConfig)
    segments: SegmentsConfig = field(default_factory=SegmentsConfig)
    dispatch: DispatchConfig = field(default_factory=DispatchConfig)
    migration: MigrationConfig = field(default_factory=MigrationConfig)
    trigger: TriggerConfig = field(default_factory=TriggerConfig)

    @property
    def cuts(self) -> bool:
        """Are responses cut off before their end?"""
        return self.oversample.rate > 0 or self.segments.segment_length is not None

    @property
    def controlled(self) -> bool:
        """Does the trainer launch samples one by one, rather than verl?"""
        return self.cuts or self.migration.enable

    @property
    def keeps_tokens(self) -> bool:
        """May a response go on under newer weights than those it began with?"""
        resumes = self.oversample.leftover == "requeue" and self.oversample.tokens == "resume"
        return self.segments.segment_length is not None or (self.oversample.rate > 0 and resumes)

    @property
    def needs_rollout_log_probs(self) -> bool:
        """Does the treatment of older tokens read the log-probs they were generated with?"""
        return self.keeps_tokens and self.segments.treatment != "pois"

    def oversampling_policy(self) -> OversamplingPolicy:
        """For Oversampler."""
        return OversamplingPolicy(**vars(self.oversample))

    def segment_limits(self, max_response_length: int) -> SegmentLimits | None:
        """For SegmentPools; None where segments are off."""
        if self.segments.segment_length is None:
            return None
        longest = self.segments.max_length or max_response_length
        return SegmentLimits(self.segments.segment_length, self.segments.max_segments, longest)

    def order(self, trainer_mode: str) -> str:
        """fifo, sjf or ljf."""
        return default_order(trainer_mode, aborts_tail=self.cuts) if self.dispatch.order == "auto" else self.dispatch.order

    def migration_policy(self) -> MigrationPolicy | None:
        """For migration_plan.plan; None where migration is off."""
        given = {key: value for key, value in vars(self.migration).items() if key != "enable"}
        return MigrationPolicy(**given) if self.migration.enable else None

    def trigger_policy(self) -> TriggerPolicy | None:
        """For TrainingTrigger; None where the trigger is off."""
        if not self.trigger.enable:
            return None
        given = {key: value for key, value in vars(self.trigger.entropy).items() if key != "enable"}
        feedback = EntropyFeedback(**given) if self.trigger.entropy.enable else None
        return TriggerPolicy(self.trigger.n_min, self.trigger.t_max_s, feedback)


def defaults() -> dict[str, Any]:
    """What `load` takes where nothing is given: plain mappings and lists."""
    return _plain(asdict(RolloutConfig()))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return list(value) if isinstance(value, tuple) else value


def load(given: Mapping[str, Any] | None, around: Surroundings) -> RolloutConfig:
    """The checked config.

    Raises:
        UserError: naming the key, what was given and what is allowed.
    """
    config = _build(RolloutConfig, given or {}, ROOT)
    check(config, around)
    return config


def _build(kind: type[_T], given: Mapping[str, Any], path: str) -> _T:
    if not isinstance(given, Mapping):
        raise UserError(f"{path} must hold keys, given {given!r}")
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    defaults = kind()
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key not in known:
            raise UserError(f"unknown key {path}.{key}; allowed here: {', '.join(known)}")
        default = getattr(defaults, key)
        nested = is_dataclass(default)
        values[key] = _build(type(default), value, f"{path}.{key}") if nested else _value(known[key].type, value, f"{path}.{key}")
    return kind(**values)


def _value(annotation: str, given: Any, path: str) -> Any:
    """The value as the annotation's type: bool, int, float, str, a pair of numbers, or one of these or None."""
    if given is None and annotation.endswith("| None"):
        return None
    kind = annotation.removesuffix(" | None")
    if kind.startswith("tuple["):
        if isinstance(given, str) or not isinstance(given, list | tuple) or len(given) != 2:
            raise UserError(f"{path} must be two numbers, the lowest and the highest, given {given!r}")
        return tuple(_value(kind[len("tuple[") : -1].split(",")[0], number, path) for number in given)
    number = isinstance(given, int | float) and not isinstance(given, bool) and math.isfinite(given)
    if kind == "float" and number:
        return float(given)
    if kind == "int" and number and given == int(given):
        return int(given)
    if kind in ("bool", "str") and type(given).__name__ == kind:
        return given
    words = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "text"}[kind]
    raise UserError(f"{path} must be {words}{' or null' if kind != annotation else ''}, given {given!r}")
