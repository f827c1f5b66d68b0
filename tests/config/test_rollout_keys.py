"""Keys under mux.rollout: what is refused, and with which line."""

from __future__ import annotations

import dataclasses

import pytest

from verl_mux.config.job_checks import Surroundings, check_rollout
from verl_mux.config.schema import RolloutConfig, convert
from verl_mux.errors import UserError
from verl_mux.rollout.control.oversampling import LagLimit
from verl_mux.rollout.control.segments import SegmentLimits

AROUND = Surroundings("mux_separate", train_batch_size=8, samples_per_group=4, max_response_length=1000, engine_requests=64)


def load(given, around) -> RolloutConfig:
    config = convert(given, RolloutConfig, "mux.rollout")
    check_rollout(config, around)
    return config


def around(**changes) -> Surroundings:
    return dataclasses.replace(AROUND, **changes)


def test_nothing_given_is_the_default_and_every_part_is_off():
    config = load({}, AROUND)
    assert config == RolloutConfig()
    assert config.segment_limits(1000) is None
    assert not config.migration
    assert config.trigger.n_min is None
    assert config.oversample.rate == 0


def test_given_keys_are_taken():
    config = load({"oversample": {"rate": 1, "max_cuts": 3}, "dispatch": {"order": "sjf"}}, AROUND)
    assert (config.oversample.rate, config.oversample.max_cuts) == (1.0, 3)
    assert config.launch_order == "sjf"


def test_auto_order_follows_whether_the_tail_is_cut():
    auto = {"dispatch": {"order": "auto"}}
    assert load({}, AROUND).launch_order == "fifo"
    assert load(auto, AROUND).launch_order == "fifo"
    assert load({**auto, "segments": {"segment_length": 100}}, AROUND).launch_order == "sjf"


def test_segment_limits_fall_back_on_the_response_length():
    assert load({"segments": {"segment_length": 100}}, AROUND).segment_limits(1000) == SegmentLimits(100, 4, 1000)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"oversample": {"rate": -0.1}}, "mux.rollout.oversample.rate=-0.1 is not possible; allowed: float, 0 or more"),
        ({"oversample": {"rate": 1.5}}, "would launch 80 responses and the engines hold 64 at once, so at most 1"),
        ({"oversample": {"rate": "much"}}, "mux.rollout.oversample.rate='much' is not possible; allowed: float"),
        ({"oversample": {"rate": float("nan")}}, "rate=nan is not possible; allowed: float"),
        ({"oversample": {"max_cuts": 1.5}}, "max_cuts=1.5 is not possible; allowed: int"),
        ({"oversample": {"ratio": 1}}, "unknown key mux.rollout.oversample.ratio; allowed here: rate, max_cuts"),
        ({"overSample": {}}, "unknown key mux.rollout.overSample; allowed here: oversample, max_lag"),
        ({"oversample": 3}, "mux.rollout.oversample is 3; it holds the keys rate, max_cuts"),
        ({"segments": {"segment_length": 2000}}, "segments.segment_length=2000 is not possible; allowed: 1 to 1000"),
        ({"segments": {"segment_length": 600, "max_length": 500}}, "allowed: 1 to 500, the maximum"),
        ({"segments": {"max_length": 2000}}, "1 to data.max_response_length=1000"),
        (
            {"segments": {"treatment": "tois"}},
            "segments.treatment='tois' is not possible; allowed: tis, mask, pois",
        ),
        ({"max_lag": 1}, "max_lag=1 is not possible; allowed: null where no response goes on under newer weights"),
        ({"max_lag": -1, "segments": {"segment_length": 9}}, "max_lag=-1 is not possible; allowed: int | None, 0 or more"),
        ({"max_lag_strategy": "stop"}, "max_lag_strategy='stop' is not possible; allowed: protect, wait, drop"),
        (
            {"segments": {"segment_length": 9}, "oversample": {"max_cuts": 1}},
            "oversample.max_cuts=1 is not possible; allowed: its default with mux.rollout.segments.segment_length",
        ),
        ({"tail": "cut"}, "mux.rollout.tail='cut' is not possible; allowed: none, defer"),
        ({"tail": "defer", "oversample": {"rate": 1}}, "tail=defer is not possible with mux.rollout.oversample.rate=1.0"),
        ({"dispatch": {"order": "lifo"}}, "dispatch.order='lifo' is not possible; allowed: fifo, sjf, auto"),
        ({"dispatch": {"predictor": "bert"}}, "dispatch.predictor=bert is not possible; allowed: default, fifo"),
        ({"migration": "perhaps"}, "migration='perhaps' is not possible; allowed: bool"),
        (
            {"migration": True, "oversample": {"rate": 0.5}},
            "mux.rollout.migration=True is not possible: over-sampling and segments cut the tail off",
        ),
        ({"trigger": {"n_min": 0}}, "trigger.n_min=0 is not possible; allowed: int | None, 1 or more"),
        ({"trigger": {"t_max_s": 0}}, "trigger.t_max_s=0 is not possible; allowed: float, above 0 seconds"),
        (
            {"trigger": {"entropy": [0.2, 0.1]}},
            "entropy=[0.2, 0.1] is not possible; allowed: [low, high], 0 <= low < high",
        ),
        ({"trigger": {"entropy": 3}}, "entropy=3 is not possible; allowed: tuple[float, float] | None"),
        ({"trigger": {"n_min": 4}}, "mux.rollout.trigger.n_min=4 does not go with trainer.v1.trainer_mode=mux_separate"),
    ],
)
def test_bad_values_are_refused_in_one_line(given, said):
    with pytest.raises(UserError) as error:
        load(given, AROUND)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("mode", "given", "said"),
    [
        ("colocate_async", {"oversample": {"rate": 0.5}}, "it cuts off and resumes unfinished responses already"),
        ("separate_async", {"segments": {"segment_length": 9}}, "it has no barrier whose tail could be cut off"),
        ("sync", {"oversample": {"rate": 1}}, "allowed trainer modes: mux_separate, mux_colocate"),
        ("mux_colocate", {"migration": True}, "allowed trainer modes: mux_separate"),
        ("sync", {"tail": "defer"}, "allowed trainer modes: mux_separate, mux_colocate"),
        ("sync", {"dispatch": {"order": "sjf"}}, "allowed trainer modes: mux_separate, mux_colocate"),
        ("colocate_async", {"dispatch": {"order": "auto"}}, "its trainer hands prompts out"),
    ],
)
def test_what_makes_no_sense_in_a_trainer_mode_is_refused_by_name(mode, given, said):
    with pytest.raises(UserError, match=f"trainer_mode={mode}") as error:
        load(given, around(trainer_mode=mode, engine_requests=None))
    assert said in str(error.value)


def test_migration_needs_a_second_rollout_node():
    two = dataclasses.replace(AROUND, rollout_nodes=["r0", "r1"])
    assert load({"migration": True}, two).controlled
    assert load({"migration": True}, dataclasses.replace(AROUND, rollout_nodes=["auto"])).controlled
    with pytest.raises(UserError, match="names one node; two or more are needed"):
        load({"migration": True}, dataclasses.replace(AROUND, rollout_nodes=["r0"]))


@pytest.mark.parametrize("own", [[], ["r2"], ["r0", "r1"], ["r0", "r2"]])
def test_a_rollout_that_grows_owns_some_of_its_nodes_and_not_all(own):
    two = dataclasses.replace(AROUND, rollout_nodes=["r0", "r1"])
    assert load({"growth": {"own": ["r1"]}}, two).controlled
    with pytest.raises(UserError, match=r"growth.own=.* allowed: some of mux.nodes.rollout=\['r0', 'r1'\], and not all"):
        load({"growth": {"own": own}}, two)
    with pytest.raises(UserError, match="allowed: null with one rollout node, or where the coordinator chooses them"):
        load({"growth": {"own": ["r0"]}}, dataclasses.replace(AROUND, rollout_nodes=["auto"]))


@pytest.mark.parametrize(
    ("mode", "given", "said"),
    [
        ("mux_colocate", {}, "allowed trainer modes: mux_separate"),
        ("mux_separate", {"oversample": {"rate": 0.5}}, "growth.own=['r0'] is not possible with mux.rollout.oversample.rate=0.5"),
        ("mux_separate", {"migration": True}, "is not possible with mux.rollout.migration=True"),
    ],
)
def test_growth_goes_with_its_own_mode_and_without_another_hand_on_the_tail(mode, given, said):
    two = dataclasses.replace(around(trainer_mode=mode, engine_requests=None), rollout_nodes=["r0", "r1"])
    with pytest.raises(UserError) as error:
        load({"growth": {"own": ["r0"]}, **given}, two)
    assert said in str(error.value)


def test_the_limit_of_lag_is_the_keys_or_what_verls_threshold_leaves():
    cuts = {"oversample": {"rate": 0.5}}
    assert load(cuts, AROUND).lag_limit(8) == LagLimit(7, "protect")
    assert load(cuts, AROUND).lag_limit(None) is None
    assert load({**cuts, "max_lag": 1, "max_lag_strategy": "wait"}, AROUND).lag_limit(8) == LagLimit(1, "wait")
    assert load({}, AROUND).lag_limit(8) is None


def test_an_order_is_kept_by_launching_samples_one_by_one():
    assert not load({}, AROUND).controlled
    assert load({"dispatch": {"order": "sjf"}}, AROUND).controlled
