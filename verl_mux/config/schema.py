"""Declare every key under `mux`: its type, bound, default and meaning stand here and nowhere else.

`mux/default.yaml`, which Hydra composes, is written from this file: `python -m verl_mux.config.schema`.
Runs in the job's driver before Ray starts, and in `verl-mux report --what-if`; reads a config and writes nothing.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from verl_mux.errors import UserError
from verl_mux.platform.charges import DeviceSettings
from verl_mux.rollout.control.oversampling import MAX_CUTS, LagLimit
from verl_mux.rollout.control.segments import SegmentLimits

_T = TypeVar("_T")


class Refusal(UserError):
    """Why a job does not start, in one line that names `key` and what it was `given`."""

    def __init__(self, line: str, key: str, given: Any = None) -> None:
        super().__init__(line)
        self.key, self.given = key, given


def raise_first(found: Iterable[Refusal]) -> None:
    """A start ends at its first refusal; `verl-mux doctor --job` shows all."""
    for refusal in found:
        raise refusal


def _doc(text: str, **bounds: float) -> Meta:
    return Meta(description=text, **bounds)  # type: ignore[call-overload]


_Count = Annotated[int, Meta(ge=1)]


class Keys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A section of keys."""


class NodesConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The coordinator's nodes this job runs on. A colocated job names the same nodes on both sides. `mux.nodes=auto`: a
    coordinator with `placement: scheduler` chooses them."""

    rollout: list[str] = msgspec.field(default_factory=lambda: ["rollout0"])
    train: list[str] = msgspec.field(default_factory=lambda: ["train0"])


class ProfiledConfig(Keys, frozen=True):
    """Seconds of each phase of at least three steps of this job alone, measured before: the coordinator places the job by these
    figures instead of by bounds. The weight sync and the engines' wake-up count as part of the rollout."""

    rollout: list[float] = msgspec.field(default_factory=list)
    train: list[float] = msgspec.field(default_factory=list)


class ProfileConfig(Keys, frozen=True):
    """The event log, which `verl-mux report DIR` reads."""

    enable: Annotated[bool, _doc("Write the log.")] = True
    dir: Annotated[str | None, _doc("Its folder; null: <trainer.default_local_dir>/events.")] = None
    every: Annotated[int, _doc("Log only steps that are multiples of this; 1: all.", ge=1)] = 1
    texts: Annotated[float, _doc("Share of the requests whose prompt and response are logged as text.", ge=0, le=1)] = 0.0
    stalls: Annotated[
        Literal["off", "stacks", "trace"],
        _doc(
            "What to record when an engine with requests stands still, from the second time on. stacks: the stacks of its"
            " processes (by py-spy where it is installed). trace: also SGLang's own profile of the next passes."
        ),
    ] = "stacks"


class SyncConfig(Keys, frozen=True):
    """The weight sync from the trainer to the rollout engines; docs/sync.md."""

    verify: Annotated[bool, _doc("Check every piece of the weights by digest on arrival.")] = True
    timeout_s: Annotated[float, _doc("A peer that is silent for this time is lost: the sync names it and fails.", gt=0)] = 120.0
    interface: Annotated[
        str | None, _doc("Network interface by whose address other hosts reach this one; null: the one that Ray uses.")
    ] = None
    transport: Annotated[
        Literal["sockets", "nixl"],
        _doc("What carries the weights between hosts. nixl: RDMA where there is some, by the package of this name."),
    ] = "sockets"


class OversampleConfig(Keys, frozen=True):
    """Launch more prompt groups than a step trains, and cut off those that are not complete in time. They go first in the next
    step and go on from their tokens."""

    rate: Annotated[float, _doc("Prompt groups beyond data.train_batch_size, as a share of it; 0: off.", ge=0)] = 0.0
    max_cuts: Annotated[
        int, _doc("A group that was cut off this number of times runs to its end; the step waits for it.", ge=0)
    ] = MAX_CUTS


class SegmentsConfig(Keys, frozen=True):
    """Let each response grow by a bounded number of tokens a step."""

    segment_length: Annotated[
        _Count | None, _doc("Tokens a response may grow in one step; an unfinished one goes on in the next. null: off.")
    ] = None
    max_segments: Annotated[int, _doc("Segments of a response, at most.", ge=1)] = 4
    max_length: Annotated[_Count | None, _doc("Tokens of a response, at most; null: data.max_response_length.")] = None
    treatment: Annotated[
        Literal["tis", "mask", "pois"],
        _doc(
            "Tokens that older weights wrote, here and with over-sampling. tis: weighted by verl's rollout correction, at most 2."
            " mask: no loss on earlier segments. pois: the old policy is taken for the current one; nothing is corrected."
        ),
    ] = "tis"


class DispatchConfig(Keys, frozen=True):
    """Which prompts start first."""

    order: Annotated[
        Literal["fifo", "sjf", "auto"], _doc("sjf: shortest first. auto: sjf where the tail is cut off, else fifo.")
    ] = "fifo"
    predictor: Annotated[str, _doc("The length predictor that orders them.")] = "default"


class GrowthConfig(Keys, frozen=True):
    """Use nodes that no other job wants."""

    own: Annotated[
        list[str] | None,
        _doc("Those of mux.nodes.rollout that every rollout waits for; the others are used while they are idle. null: all."),
    ] = None


class TriggerConfig(Keys, frozen=True):
    """When a streaming trainer mode (colocate_async, separate_async) trains."""

    n_min: Annotated[_Count | None, _doc("Train as soon as this many prompt groups are ready; null: verl's own way.")] = None
    t_max_s: Annotated[float, _doc("Train after this time with at least one.", gt=0)] = 60.0
    entropy: Annotated[
        tuple[float, float] | None,
        _doc("[low, high] in nats: below low both thresholds double, above high they are halved. null: entropy changes nothing."),
    ] = None


class RolloutConfig(Keys, frozen=True):
    """What shortens the rollout's tail; docs/rollout.md. Every part is off by default."""

    oversample: OversampleConfig = OversampleConfig()
    max_lag: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        _doc(
            "Versions of the weights by which a trained token may be old, where responses go on under newer weights."
            " null: trainer.v1.sampler.max_off_policy_threshold less one."
        ),
    ] = None
    max_lag_strategy: Annotated[
        Literal["protect", "wait", "drop"],
        _doc(
            "A group that must be trained in this step. protect: it has a seat and runs to its end. wait: until then nothing is"
            " cut off. drop: it is given up."
        ),
    ] = "protect"
    segments: SegmentsConfig = SegmentsConfig()
    dispatch: DispatchConfig = DispatchConfig()
    migration: Annotated[
        bool, _doc("Gather a rollout's last responses on few replicas when another job waits for the nodes.")
    ] = False
    growth: GrowthConfig = GrowthConfig()
    tail: Annotated[
        Literal["none", "defer"],
        _doc("defer: prompts whose responses are likely to be long share rounds of their own. On-policy; no length is selected."),
    ] = "none"
    trigger: TriggerConfig = TriggerConfig()
    sample_timeout_s: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        _doc("A sample that takes longer, its time in the queue included, fails; null: a tool that hangs holds the step up."),
    ] = None

    @property
    def cuts(self) -> bool:
        """Are responses cut off before their end, to go on under newer weights?"""
        return self.oversample.rate > 0 or self.segments.segment_length is not None

    @property
    def defers(self) -> bool:
        """Are prompts with long responses gathered into rounds of their own?"""
        return self.tail == "defer"

    @property
    def controlled(self) -> bool:
        """Does the trainer launch samples one by one, instead of verl? An order needs that too: priorities go with launches."""
        return self.cuts or self.migration or self.growth.own is not None or self.dispatch.order != "fifo"

    @property
    def needs_rollout_log_probs(self) -> bool:
        """Does the treatment of older tokens read the log-probs they were generated with?"""
        return self.cuts and self.segments.treatment != "pois"

    @property
    def launch_order(self) -> str:
        return self.dispatch.order if self.dispatch.order != "auto" else "sjf" if self.cuts else "fifo"

    def lag_limit(self, max_off_policy_threshold: int | None) -> LagLimit | None:
        """How old tokens may be; None without a limit. verl's threshold counts the versions that a trajectory spans."""
        most = self.max_lag
        if most is None and max_off_policy_threshold is not None:
            most = max_off_policy_threshold - 1
        return None if most is None or not self.cuts else LagLimit(most, self.max_lag_strategy)

    def segment_limits(self, max_response_length: int) -> SegmentLimits | None:
        """None where segments are off."""
        if self.segments.segment_length is None:
            return None
        longest = self.segments.max_length or max_response_length
        return SegmentLimits(self.segments.segment_length, self.segments.max_segments, longest)


class LaunchConfig(Keys, frozen=True):
    """How the job's processes start."""

    warm: Annotated[
        bool | None,
        _doc(
            "Import torch and SGLang once, and start the job's processes on its driver's host as forks of the process that has."
            " null: yes where there is no GPU and `verl-mux run` starts the job with a Ray of its own."
        ),
    ] = None


class MuxConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Keys of verl_mux. `python -m verl.trainer.main_ppo +mux=default ...` or `--config-name mux_ppo_trainer` brings them in."""

    job: Annotated[str | None, _doc("Name of this job at the coordinator; null: trainer.experiment_name.")] = None
    coordinator: Annotated[
        str | None,
        _doc("Address of `verl-mux coordinator`, e.g. tcp://10.0.0.1:5570. null: the job runs alone, every lease is granted."),
    ] = None
    keys: Annotated[
        str | None,
        _doc(
            "Folder of the coordinator's keys (`verl-mux keys DIR`), on every host where the trainer may run: server.key and"
            " job.key_secret. null: VERL_MUX_KEYS, or on the coordinator's machine the user's own."
        ),
    ] = None
    nodes: NodesConfig = msgspec.field(default_factory=NodesConfig)
    slo: Annotated[
        Annotated[float, Meta(ge=1)] | None,
        _doc("With mux.nodes=auto: how many times its iteration alone an iteration may last; null: the coordinator's."),
    ] = None
    profiled: ProfiledConfig = ProfiledConfig()
    move_note: Annotated[
        str | None,
        _doc(
            "Absolute path of a file that the job writes when the coordinator has asked it to leave its nodes: it has saved, and"
            " its launcher starts it again with trainer.resume_mode=auto. null, or trainer.save_freq not above 0, or checkpoints"
            " saved in the background: the job is never asked. `verl-mux run` sets it."
        ),
    ] = None
    seed: Annotated[int, _doc("Seed of the sampling where seeded_sampling is on.")] = 0
    seeded_sampling: Annotated[
        bool,
        _doc(
            "One seed per request, from (seed, step, prompt, sample): the job samples the same tokens whatever runs beside it."
            " CPU engine only; SGLang's own deterministic mode serves GPUs."
        ),
    ] = False
    launch: LaunchConfig = LaunchConfig()
    profile: ProfileConfig = ProfileConfig()
    sync: SyncConfig = SyncConfig()
    device: DeviceSettings = DeviceSettings()
    rollout: RolloutConfig = RolloutConfig()


# ---------------------------------------------------------------- plain mappings to structs


def convert(values: Any, kind: type[_T], root: str) -> _T:
    """`values` as a struct of this kind, whose keys lie under `root`; "3" is a number too, as an environment has it.
    Raises Refusal: the first of `wrong_keys`."""
    raise_first(wrong_keys(values, kind, root))
    return msgspec.convert(values, kind, strict=False)


def wrong_keys(values: Any, kind: type, path: str) -> Iterator[Refusal]:
    """Each unknown key, value of the wrong kind or out of its bounds, and number that is not finite."""
    types = _types(kind)
    if not isinstance(values, Mapping):
        yield Refusal(f"{path} is {values!r}; it holds the keys {', '.join(types)}", path, values)
        return
    for key, value in values.items():
        name = f"{path}.{key}"
        if key not in types:
            yield Refusal(f"unknown key {name}; allowed here: {', '.join(types)}", name, value)
        elif _is_section(types[key]):
            yield from wrong_keys(value, types[key], name)
        elif not _is_possible(value, types[key]):
            yield Refusal(f"{name}={value!r} is not possible; allowed: {_allowed(types[key], name)}", name, value)


def _types(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {name: hints[name] for name in kind.__struct_fields__}  # type: ignore[attr-defined]


def leaves(kind: type, root: str) -> list[str]:
    """All keys of a struct, with dots."""
    out: list[str] = []
    for name, annotation in _types(kind).items():
        key = f"{root}.{name}"
        out += leaves(annotation, key) if _is_section(annotation) else [key]
    return out


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, msgspec.Struct)


def _is_possible(value: Any, annotation: Any) -> bool:
    try:
        converted = msgspec.convert(value, annotation, strict=False)
    except msgspec.ValidationError:
        return False
    return not isinstance(converted, float) or math.isfinite(converted)


def _split(annotation: Any) -> tuple[Any, Meta, str]:
    """The type without its annotations, its bounds, and its description."""
    if get_origin(annotation) is Annotated:
        bare, meta = get_args(annotation)
        inner, bounds, _ = _split(bare)
        return inner, meta if inner is bare else bounds, meta.description or ""
    if get_origin(annotation) is UnionType or get_origin(annotation) is Union:
        bare, bounds, _ = _split(get_args(annotation)[0])
        return bare | None, bounds, ""
    return annotation, Meta(), ""


def _choices(bare: Any) -> tuple[str, ...]:
    return get_args(bare) if get_origin(bare) is Literal else ()


def _allowed(annotation: Any, path: str) -> str:
    bare, bounds, _ = _split(annotation)
    name = ", ".join(_choices(bare)) or (bare.__name__ if isinstance(bare, type) and not get_args(bare) else str(bare))
    unit = " seconds" if path.endswith("_s") else ""
    if bounds.gt is not None:
        return f"{name}, above {bounds.gt:g}{unit}"
    if bounds.le is not None:
        return f"{name}, {bounds.ge or 0:g} to {bounds.le:g}"
    return name if bounds.ge is None else f"{name}, {bounds.ge:g}{unit} or more"


# ---------------------------------------------------------------- the YAML


def default_yaml() -> str:
    """What `mux/default.yaml` says: every key with its default, under its description."""
    return "\n".join(_lines(MuxConfig, "")) + "\n"


def _lines(kind: type, indent: str) -> list[str]:
    out, plain = [], msgspec.to_builtins(kind())
    for name, annotation in _types(kind).items():
        bare, _, description = _split(annotation)
        text = " ".join((bare.__doc__ if _is_section(bare) else description).split())
        if choices := _choices(bare):
            text = f"{', '.join(choices)}. {text}"
        out += textwrap.wrap(text, 128, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
        if _is_section(bare):
            out += [f"{indent}{name}:", *_lines(bare, indent + "  ")]
        else:
            out += [f"{indent}{name}: {msgspec.json.encode(plain[name]).decode()}"]
    return out


if __name__ == "__main__":
    print(default_yaml(), end="")
