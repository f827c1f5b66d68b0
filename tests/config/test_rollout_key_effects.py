"""Each key under mux.rollout does something: with another value something else comes out, by the code that the product runs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from verl_mux.config.schema import RolloutConfig, convert, leaves
from verl_mux.coordinator.bus.messages import LearnerStateUpdate
from verl_mux.rollout.control.launch_order import LaunchOrder
from verl_mux.rollout.control.oversampling import Oversampler
from verl_mux.rollout.control.segment_loss import treat_batch
from verl_mux.rollout.control.segments import SegmentSteps
from verl_mux.rollout.control.trigger import TrainingTrigger
from verl_mux.rollout.instructions import Launch, Segment
from verl_mux.rollout.lengths.predictors import Prompt, make_predictor


def over(config: RolloutConfig) -> Any:
    """Steps in which one group is cut off again and again: every instruction and figure."""
    machine = Oversampler(1, config.oversample.rate, config.oversample.max_cuts, config.lag_limit(8))
    out: list[Any] = [machine.begin(2)]
    out.append(machine.drawn([f"a{at}" for at in range(2 if len(repr(out)) == 0 else int(repr(out[0]).split("count=")[1][0]))]))
    for step in range(4):
        launched = [it for its in out[-2:] for it in its if isinstance(it, Launch)]
        names = list(dict.fromkeys(it.group for it in launched))
        out.append(machine.sample_failed(names[-1], 0) if step == 0 else [])
        for name in [name for name in names if name != "a0"][:2]:
            out.append(machine.sample_done(name, 0, 9))
        out.append(machine.sample_cut("a0", 0, 5 + step))
        for name in names:
            out.append(machine.sample_cut(name, 0, 7))
        if machine._in_step:
            break
        out.append(machine.begin(2))
        out.append(machine.drawn([f"b{step}{at}" for at in range(machine._asked_for)]))
    return repr(out), machine.metrics.as_dict()


def segment(config: RolloutConfig) -> Any:
    limits = config.segment_limits(1000)
    if limits is None:
        return None
    machine = SegmentSteps(limits, 1, lag=config.lag_limit(8))
    return repr([machine.begin(2), machine.drawn(["a", "b"])]), limits.longest


def treated(config: RolloutConfig) -> Any:
    nested = lambda *row: torch.nested.as_nested_tensor([torch.tensor(row)], layout=torch.jagged)  # noqa: E731
    segments = [[Segment(2, 1), Segment(2, 2)]]
    tensors = nested(1, 1, 1, 1), nested(0.0, 0.0, 0.0, 0.0), nested(-1.0, -1.0, -1.0, -1.0)
    return sorted(treat_batch(config.segments.treatment, segments, 2, *tensors).fields)


def order(config: RolloutConfig) -> list[int]:
    prompts = [Prompt(str(at), "x" * size) for at, size in enumerate((5, 50, 20))]
    made = LaunchOrder(config.launch_order, make_predictor(config.dispatch.predictor))
    return made.place([p.id for p in prompts], prompts).tolist()


def trigger(config: RolloutConfig) -> Any:
    it = TrainingTrigger(config.trigger.n_min or 32, config.trigger.t_max_s, config.trigger.entropy)
    out = [config.trigger.n_min]
    for version, entropy in enumerate((0.95, 0.25, 0.5, 2.0, 0.93, 0.1, 0.22)):
        it.learner_state(LearnerStateUpdate(entropy=entropy, policy_version=version))
        out += [it.n_min, it.t_max_s, it.mood.name]
    return out


CUT = {"oversample": {"rate": 1.0}}
ON = {"segments": {"segment_length": 100}}
# key -> (how to look, a value that is not the default, what else has to be set)
EFFECTS: dict[str, tuple[Any, Any, dict]] = {
    "oversample.rate": (over, 1.0, {}),
    "oversample.max_cuts": (over, 0, CUT),
    "max_lag": (over, 0, CUT),
    "max_lag_strategy": (lambda config: config.lag_limit(8), "wait", CUT),
    "segments.segment_length": (segment, 100, {}),
    "segments.max_segments": (segment, 2, ON),
    "segments.max_length": (segment, 50, {"segments": {"segment_length": 40}}),
    "segments.treatment": (treated, "mask", ON),
    "dispatch.order": (order, "sjf", {"dispatch": {"predictor": "heuristic"}}),
    "dispatch.predictor": (order, "heuristic", {"dispatch": {"order": "sjf"}}),
    "migration": (lambda config: config.controlled, True, {}),
    "growth.own": (lambda config: config.controlled, ["r0"], {}),
    "tail": (lambda config: config.defers, "defer", {}),
    "trigger.n_min": (trigger, 2, {}),
    "trigger.t_max_s": (trigger, 5.0, {}),
    "trigger.entropy": (trigger, [0.2, 1.0], {}),
}


def config_of(given: dict, key: str | None = None, value: Any = None) -> RolloutConfig:
    merged = msgspec.json.decode(msgspec.json.encode(given))
    if key is not None:
        at = merged
        *path, last = key.split(".")
        for part in path:
            at = at.setdefault(part, {})
        at[last] = value
    return convert(merged, RolloutConfig, "mux.rollout")


def test_every_key_is_here():
    assert sorted(f"mux.rollout.{key}" for key in EFFECTS) == sorted(leaves(RolloutConfig, "mux.rollout"))


@pytest.mark.parametrize("key", EFFECTS)
def test_another_value_makes_a_difference(key):
    look, value, given = EFFECTS[key]
    assert look(config_of(given)) != look(config_of(given, key, value)), key
