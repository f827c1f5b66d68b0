"""The keys that a recorded rollout can be run again under."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from verl_mux.config.rollout_checks import Surroundings, check_rollout
from verl_mux.config.rollout_keys import DispatchConfig, RolloutConfig, SegmentsConfig
from verl_mux.errors import UserError
from verl_mux.rollout.control.lag_limit import STRATEGIES, LagLimit
from verl_mux.rollout.control.launch_order import ORDERS
from verl_mux.rollout.control.migration_plan import MigrationPolicy
from verl_mux.rollout.control.oversampling import LEFTOVERS, TOKENS, OversamplingPolicy
from verl_mux.rollout.control.segments import SegmentLimits
from verl_mux.rollout.control.tail_rounds import TAILS, DeferPolicy
from verl_mux.what_if.recording import Recording

_OFF = ("none", "null", "off")
_PARTS = ("oversample", "defer", "migration")  # of `mux.rollout`, kept as a whole


@dataclass(frozen=True)
class Settings:
    """wanted: prompt groups that a step trains. samples: of a group. longest: most tokens of a response. slots: requests that one
    replica runs at once. segment: tokens of a round; None: off. order: fifo, sjf or auto; predictor: what
    it is told by. threshold: verl's
    max_off_policy_threshold; None where the log does not say. at_once: requests that all engines may run; None likewise."""

    wanted: int
    samples: int
    longest: int
    slots: int
    oversample: OversamplingPolicy
    segment: int | None = None
    max_segments: int = 4
    order: str = "fifo"
    max_lag: int | None = None
    max_lag_strategy: str = "protect"
    predictor: str = "default"
    mode: str = ""
    tail: str = "none"
    defer: DeferPolicy = DeferPolicy()
    migration: MigrationPolicy = MigrationPolicy()
    threshold: int | None = None
    at_once: int | None = None

    @property
    def rollout(self) -> RolloutConfig:
        """The same as a job's keys."""
        return RolloutConfig(
            oversample=self.oversample,
            max_lag=self.max_lag,
            max_lag_strategy=self.max_lag_strategy,
            segments=SegmentsConfig(segment_length=self.segment, max_segments=self.max_segments),
            dispatch=DispatchConfig(order=self.order, predictor=self.predictor),
            migration=self.migration,
            tail=self.tail,
            defer=self.defer,
        )

    @property
    def limits(self) -> SegmentLimits | None:
        return self.rollout.segment_limits(self.longest)

    @property
    def lag(self) -> LagLimit | None:
        return self.rollout.lag_limit(self.threshold)

    @property
    def launch_order(self) -> str:
        return self.rollout.launch_order

    @property
    def is_possible(self) -> bool:
        """Whether the job would start under these; one whose log names no trainer mode is taken to have one of ours."""
        around = Surroundings(self.mode or "mux_separate", self.wanted, self.samples, self.longest, self.at_once)
        try:
            check_rollout(self.rollout, around)
        except UserError:
            return False
        return True


def _switch(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


# What is far beyond any job: prompt groups are all drawn.
MOST = {"data.train_batch_size": 16_384, "mux.rollout.oversample.rate": 100.0, "mux.rollout.migration.threshold": 1.0}
LEAST = {
    "rate": 0,
    "max_cuts": 0,
    "max_lag": 0,
    "window": 2,
    "max_mean": 1.01,
    "threshold": 0.01,
    "min_gain_s": 0,
    "max_slowdown": 0,
}
# key -> (type, what is allowed)
KEYS: dict[str, tuple[Callable[[str], object], str]] = {
    "data.max_response_length": (int, "tokens, from 1 to the longest recorded response"),
    "data.train_batch_size": (int, "prompt groups, from 1 to 16384"),
    "actor_rollout_ref.rollout.max_num_seqs": (int, "requests, 1 or more"),
    "mux.rollout.oversample.rate": (float, "from 0 to 100"),
    "mux.rollout.oversample.leftover": (str, ", ".join(LEFTOVERS)),
    "mux.rollout.oversample.tokens": (str, ", ".join(TOKENS)),
    "mux.rollout.oversample.max_cuts": (int, "0 or more"),
    "mux.rollout.segments.segment_length": (int, "tokens, 1 or more, or null"),
    "mux.rollout.segments.max_segments": (int, "1 or more"),
    "mux.rollout.max_lag": (int, "versions, 0 or more, or null"),
    "mux.rollout.max_lag_strategy": (str, ", ".join(STRATEGIES)),
    "mux.rollout.dispatch.order": (str, ", ".join((*ORDERS, "auto"))),
    "mux.rollout.tail": (str, ", ".join(TAILS)),
    "mux.rollout.defer.window": (int, "2 steps or more, or null"),
    "mux.rollout.defer.max_mean": (float, "1.01 or more"),
    "mux.rollout.migration.enable": (_switch, "true, false"),
    "mux.rollout.migration.threshold": (float, "from 0.01 to 1"),
    "mux.rollout.migration.min_gain_s": (float, "node-seconds, 0 or more"),
    "mux.rollout.migration.max_slowdown": (float, "0 or more"),
}


def recorded(recording: Recording) -> Settings:
    """The settings that the recording was made under, as far as its log says them."""
    keys = recording.keys
    samples = int(keys.get("actor_rollout_ref.rollout.n", max(len(group.samples) for group in recording.groups)))
    slots = int(keys.get("actor_rollout_ref.rollout.max_num_seqs", 1 << 30))
    threshold = keys.get("trainer.v1.sampler.max_off_policy_threshold")
    settings = Settings(
        recording.wanted, samples, recording.longest, min(slots, recording.slots or slots),
        OversamplingPolicy(accept_length_bias=keys.get("mux.rollout.oversample.accept_length_bias") == "True"),
        mode=keys.get("trainer.v1.trainer_mode", ""), predictor=keys.get("mux.rollout.dispatch.predictor", "default"),
        threshold=int(threshold) if threshold else None,
        at_once=slots * recording.replicas if "actor_rollout_ref.rollout.max_num_seqs" in keys else None,
    )  # fmt: skip
    told = {key: value for key, value in keys.items() if key in KEYS}
    # What the log says of its own limit may lie above any response, which changes nothing.
    told.pop("data.max_response_length", None)
    return changed(settings, {key: value for key, value in told.items() if key != "actor_rollout_ref.rollout.max_num_seqs"})


def changed(settings: Settings, keys: Mapping[str, str]) -> Settings:
    """`settings` under other keys.

    Raises:
        UserError: a key that cannot be tried on a recording, or a value that is not possible.
    """
    for key, text in keys.items():
        settings = _with(settings, key, text)
    return settings


def _with(settings: Settings, key: str, text: str) -> Settings:
    if key not in KEYS:
        raise UserError(f"--what-if {key}: cannot be tried on a recorded run; allowed: {', '.join(KEYS)}")
    kind, allowed = KEYS[key]
    off = key.endswith(("segment_length", "max_lag", "window")) and text.lower() in _OFF
    try:
        value: object = None if off else kind(text)
    except (KeyError, ValueError):
        value = text
    if not off and not _possible(key, value, settings):
        raise UserError(f"--what-if {key}={text} is not possible; allowed: {allowed}")
    name = key.rpartition(".")[2]
    for part in _PARTS:
        if f".{part}." in key:
            return replace(settings, **{part: msgspec.structs.replace(getattr(settings, part), **{name: value})})
    field = {"max_response_length": "longest", "train_batch_size": "wanted", "max_num_seqs": "slots", "segment_length": "segment"}
    other: dict[str, Any] = {field.get(name, name): value}
    return replace(settings, **other)


def _possible(key: str, value: object, settings: Settings) -> bool:
    if key == "data.max_response_length":
        return isinstance(value, int) and 1 <= value <= settings.longest
    if key.endswith("enable"):
        return isinstance(value, bool)
    words = {"leftover": LEFTOVERS, "tokens": TOKENS, "order": (*ORDERS, "auto"), "max_lag_strategy": STRATEGIES, "tail": TAILS}
    name = key.rpartition(".")[2]
    if name in words:
        return value in words[name]
    return isinstance(value, (int, float)) and LEAST.get(name, 1) <= value <= MOST.get(key, math.inf)
