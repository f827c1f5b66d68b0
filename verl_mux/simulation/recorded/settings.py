"""The keys that a recorded rollout can be run again under."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from verl_mux.errors import UserError
from verl_mux.rollout.control.launch_order import ORDERS, default_order
from verl_mux.rollout.control.oversampling import LEFTOVERS, TOKENS, OversamplingPolicy
from verl_mux.rollout.control.segments import SegmentLimits
from verl_mux.simulation.recorded.recording import Recording

_OFF = ("none", "null", "off")


@dataclass(frozen=True)
class Settings:
    """wanted: prompt groups that a step trains. samples: of a group. longest: most tokens of a response. slots: requests that one
    replica runs at once. segment: tokens of a round; None: off. order: fifo, sjf, ljf or auto."""

    wanted: int
    samples: int
    longest: int
    slots: int
    oversample: OversamplingPolicy
    segment: int | None = None
    max_segments: int = 4
    order: str = "fifo"
    mode: str = ""

    @property
    def limits(self) -> SegmentLimits | None:
        return None if self.segment is None else SegmentLimits(self.segment, self.max_segments, self.longest)

    @property
    def launch_order(self) -> str:
        cuts = self.oversample.rate > 0 or self.segment is not None
        return default_order(self.mode, aborts_tail=cuts) if self.order == "auto" else self.order


# key -> (type, what is allowed)
KEYS = {
    "data.max_response_length": (int, "tokens, from 1 to the longest recorded response"),
    "data.train_batch_size": (int, "prompt groups, 1 or more"),
    "actor_rollout_ref.rollout.max_num_seqs": (int, "requests, 1 or more"),
    "mux.rollout.oversample.rate": (float, "0 or more"),
    "mux.rollout.oversample.leftover": (str, ", ".join(LEFTOVERS)),
    "mux.rollout.oversample.tokens": (str, ", ".join(TOKENS)),
    "mux.rollout.oversample.max_cuts": (int, "0 or more"),
    "mux.rollout.segments.segment_length": (int, "tokens, 1 or more, or null"),
    "mux.rollout.segments.max_segments": (int, "1 or more"),
    "mux.rollout.dispatch.order": (str, ", ".join((*ORDERS, "auto"))),
}


def recorded(recording: Recording) -> Settings:
    """The settings that the recording was made under, as far as its log says them."""
    keys = recording.keys
    samples = int(keys.get("actor_rollout_ref.rollout.n", max(len(group.samples) for group in recording.groups)))
    slots = int(keys.get("actor_rollout_ref.rollout.max_num_seqs", 1 << 30))
    settings = Settings(
        recording.wanted, samples, recording.longest, min(slots, recording.slots or slots), OversamplingPolicy(),
        mode=keys.get("trainer.v1.trainer_mode", ""),
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
    off = key.endswith("segment_length") and text.lower() in _OFF
    try:
        value = None if off else kind(text)
    except ValueError:
        value = text
    if not off and not _possible(key, value, settings):
        raise UserError(f"--what-if {key}={text} is not possible; allowed: {allowed}")
    name = key.rpartition(".")[2]
    if ".oversample." in key:
        given = {field: getattr(settings.oversample, field) for field in OversamplingPolicy.__struct_fields__}
        return replace(settings, oversample=OversamplingPolicy(**{**given, name: value}))
    field = {"max_response_length": "longest", "train_batch_size": "wanted", "max_num_seqs": "slots", "segment_length": "segment"}
    other: dict[str, Any] = {field.get(name, name): value}
    return replace(settings, **other)


def _possible(key: str, value: object, settings: Settings) -> bool:
    if key == "data.max_response_length":
        return isinstance(value, int) and 1 <= value <= settings.longest
    words = {"leftover": LEFTOVERS, "tokens": TOKENS, "order": (*ORDERS, "auto")}.get(key.rpartition(".")[2])
    if words is not None:
        return value in words
    least = 0 if key.endswith(("rate", "max_cuts")) else 1
    return isinstance(value, (int, float)) and value >= least
