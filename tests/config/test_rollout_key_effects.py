"""Each key under mux.rollout does something: with another value something else comes out, by the code that the product runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from verl_mux.config.keys import convert
from verl_mux.config.rollout_checks import Surroundings, check_rollout
from verl_mux.config.rollout_keys import RolloutConfig
from verl_mux.coordinator.bus.messages import LearnerStateUpdate
from verl_mux.errors import UserError
from verl_mux.rollout.control.growth_plan import pull, seconds_won
from verl_mux.rollout.control.launch_order import LaunchOrder
from verl_mux.rollout.control.length_estimates import Expected
from verl_mux.rollout.control.migration_plan import EngineSpeed, Replica, Request, plan
from verl_mux.rollout.control.oversampling import Oversampler
from verl_mux.rollout.control.segment_loss import WEIGHTED, segment_map, treat
from verl_mux.rollout.control.segment_steps import SegmentSteps
from verl_mux.rollout.control.tail_rounds import TailRounds
from verl_mux.rollout.control.trigger import TrainingTrigger
from verl_mux.rollout.engine.record import engines
from verl_mux.rollout.lengths.predictor import make_predictor
from verl_mux.rollout.lengths.rows import Prompt
from verl_mux.rollout.messages import Launch, Segment
from verl_mux.rollout.worker.prompt_groups import PromptGroups
from verl_mux.rollout.worker.response import Response, current

AROUND = Surroundings("mux_separate", train_batch_size=2, samples_per_group=1, max_response_length=1000)


def over(config: RolloutConfig) -> Any:
    """Steps in which one group is cut off again and again: every instruction and figure."""
    machine = Oversampler(config.oversample, 1, config.lag_limit(8))
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
    where = segment_map([[Segment(2, 1), Segment(2, 2)]], 4)
    arrays = np.ones((1, 4)), np.zeros((1, 4)), np.full((1, 4), -1.0)
    loss = treat(config.segments.treatment, where, 2, *arrays)
    return loss.loss_mask.tolist(), loss.old_log_probs.tolist(), WEIGHTED.get(config.segments.treatment)


def reward(config: RolloutConfig) -> float:
    response = Response("g", 0, lambda report: None)
    response.truncated = True
    output = SimpleNamespace(reward_score=1.0)
    token = current.set(response)
    PromptGroups(config.segments.truncated_reward).score(output)
    current.reset(token)
    return output.reward_score


def order(config: RolloutConfig) -> list[int]:
    prompts = [Prompt(str(at), "x" * size) for at, size in enumerate((5, 50, 20))]
    made = LaunchOrder(config.launch_order, make_predictor(config.dispatch.predictor))
    return made.place([p.id for p in prompts], prompts).tolist()


def migration(config: RolloutConfig) -> Any:
    replicas = [
        Replica("r0", ("r0",), tuple(Request(f"a{n}", 100, 90.0) for n in range(3)), 9, 10**6),
        Replica("r1", ("r1",), tuple(Request(f"b{n}", 100, 100.0) for n in range(3)), 9, 10**6),
    ]
    found = plan(replicas, 75, 100, [["r0"]], EngineSpeed(8000.0, 0.02, 0.001), config.migration)
    return type(found).__name__, config.controlled


def growth(config: RolloutConfig) -> Any:
    """Whether a rollout takes a node that wins half of what it takes alone."""
    busy, joining = (
        Replica("r0", ("r0",), (Request("a", 1, 90.0), Request("b", 1, 90.0)), 9, 10**6),
        Replica("r1", ("r1",), (), 9, 9),
    )
    speed = EngineSpeed(8000.0, 0.001, 0.01)
    won = seconds_won([busy], joining, pull([busy], joining, (), speed), speed)
    return config.growth.own, config.controlled, won >= config.growth.min_gain_s


def rounds(config: RolloutConfig) -> Any:
    mean = np.array([9.0, 9.0, *[1.0] * 6])
    known = SimpleNamespace(expect=lambda prompts: Expected(mean, np.zeros(8), mean), knows=lambda prompt: True)
    made = TailRounds(config.defer, 2, known)
    made.gather(list("abcdefgh"), [Prompt(name, name) for name in "abcdefgh"])
    return made.take(2), made.policy.window, config.defers


def trigger(config: RolloutConfig) -> Any:
    it = TrainingTrigger(config.trigger)
    out = [config.trigger.enable]
    for version, entropy in enumerate((0.95, 0.25, 0.5, 2.0, 0.93, 0.1, 0.22)):
        it.learner_state(LearnerStateUpdate(entropy=entropy, policy_version=version))
        out += [it.n_min, it.t_max_s, it.mood.name]
    return out


CUT = {"oversample": {"rate": 1.0}}
ON = {"segments": {"segment_length": 100}}
FEEDBACK = {"trigger": {"entropy": {"enable": True}}}
# key -> (how to look, a value that is not the default, what else has to be set)
EFFECTS: dict[str, tuple[Any, Any, dict]] = {
    "oversample.rate": (over, 1.0, {}),
    "oversample.leftover": (over, "drop", CUT | {"oversample": {"rate": 1.0, "accept_length_bias": True}}),
    "oversample.tokens": (over, "restart", CUT | {"oversample": {"rate": 1.0, "accept_length_bias": True}}),
    "oversample.max_cuts": (over, 0, CUT),
    "oversample.max_failures": (over, 0, CUT),
    "oversample.accept_length_bias": ("allowed", True, {"oversample": {"rate": 1.0, "tokens": "restart"}}),
    "max_lag": (over, 0, CUT),
    "max_lag_strategy": (lambda config: config.lag_limit(8), "wait", CUT),
    "segments.segment_length": (segment, 100, {}),
    "segments.max_segments": (segment, 2, ON),
    "segments.max_length": (segment, 50, {"segments": {"segment_length": 40}}),
    "segments.treatment": (treated, "sais", ON),
    "segments.truncated_reward": (reward, -1.0, ON),
    "dispatch.order": (order, "sjf", {"dispatch": {"predictor": "prompt_length"}}),
    "dispatch.predictor": (order, "prompt_length", {"dispatch": {"order": "sjf"}}),
    "migration.enable": (migration, True, {}),
    "migration.threshold": (migration, 0.5, {}),
    "migration.min_gain_s": (migration, 1e9, {"migration": {"threshold": 0.5}}),
    "migration.max_slowdown": (migration, 0.0, {"migration": {"threshold": 0.5, "min_gain_s": 0.0}}),
    "growth.own": (growth, ["r0"], {}),
    "growth.min_gain_s": (growth, 0.5, {}),
    "tail": (rounds, "defer", {}),
    "defer.window": (rounds, 4, {}),
    "defer.max_mean": (rounds, 9.0, {}),
    "speculative": (lambda config: engines()["sglang"].speculative_arguments.get(config.speculative), "ngram", {}),
    "trigger.enable": (trigger, True, {}),
    "trigger.n_min": (trigger, 2, {}),
    "trigger.t_max_s": (trigger, 5.0, {}),
    "trigger.entropy.enable": (trigger, True, {}),
    "trigger.entropy.high": (trigger, 0.9, FEEDBACK),
    "trigger.entropy.low": (trigger, 0.3, FEEDBACK),
    "trigger.entropy.margin": (trigger, 0.01, FEEDBACK),
    "trigger.entropy.n_min_bounds": (trigger, (20, 40), FEEDBACK),
    "trigger.entropy.t_max_s_bounds": (trigger, (50.0, 70.0), FEEDBACK),
}


def keys(kind: Any, before: str = "") -> list[str]:
    """All keys of a struct, with dots."""
    out = []
    for field in msgspec.structs.fields(kind):
        nested = isinstance(field.type, type) and issubclass(field.type, msgspec.Struct)
        out += keys(field.type, f"{before}{field.name}.") if nested else [before + field.name]
    return out


def config_of(given: dict, key: str | None = None, value: Any = None) -> RolloutConfig:
    merged = msgspec.json.decode(msgspec.json.encode(given))
    if key is not None:
        at = merged
        *path, last = key.split(".")
        for part in path:
            at = at.setdefault(part, {})
        at[last] = value
    return convert(merged, RolloutConfig, "mux.rollout")


def allowed(config: RolloutConfig) -> bool:
    try:
        check_rollout(config, AROUND)
    except UserError:
        return False
    return True


def test_every_key_is_here():
    assert sorted(EFFECTS) == sorted(keys(RolloutConfig))


@pytest.mark.parametrize("key", EFFECTS)
def test_another_value_makes_a_difference(key):
    look, value, given = EFFECTS[key]
    look = allowed if look == "allowed" else look
    assert look(config_of(given)) != look(config_of(given, key, value)), key
