"""When a streaming trainer trains."""

from __future__ import annotations

import math

import pytest

from verl_mux.coordinator.bus.messages import LearnerStateUpdate
from verl_mux.rollout.control.trigger import Mood, Train, TrainingTrigger, Wait

FEEDBACK = (0.4, 2.0)  # its margin is 0.2


def trigger(n_min: int = 8, t_max_s: float = 10.0, feedback: tuple[float, float] | None = None) -> TrainingTrigger:
    made = TrainingTrigger(n_min, t_max_s, feedback)
    made.waits(0.0)
    return made


@pytest.mark.parametrize(
    "history",
    [
        [(7, 1.0, Wait(10.0)), (9, 2.0, Train(9, "enough"))],
        [(1, 9.9, Wait(10.0)), (1, 10.0, Train(1, "waited"))],
        [(0, 100.0, Wait(None)), (1, 100.0, Train(1, "waited"))],
    ],
    ids=["enough", "one, after the longest wait", "never on nothing, then at once"],
)
def test_it_trains_on_what_is_ready(history):
    it = trigger()
    for ready, now, decided in history:
        it.ready(ready)
        assert it.decide(now) == decided


def test_training_is_no_wait():
    it = trigger(t_max_s=60.0)
    it.ready(8)
    assert it.decide(0.0) == Train(8, "enough")
    it.waits(104.0)  # the step took so long, and five groups became ready meanwhile
    it.ready(5)
    assert it.decide(104.0) == Wait(164.0)
    assert it.decide(164.0) == Train(5, "waited")


def test_a_wait_goes_on_however_often_it_is_told():
    it = trigger()
    it.ready(1)
    it.waits(5.0)
    assert it.decide(10.0) == Train(1, "waited")


def test_without_feedback_entropy_changes_nothing():
    it = trigger()
    it.learner_state(LearnerStateUpdate(entropy=9.0, policy_version=1))
    assert (it.n_min, it.t_max_s, it.mood) == (8, 10.0, Mood.STEADY)


@pytest.mark.parametrize(
    ("entropy", "n_min", "t_max_s"), [(2.5, 4, 5.0), (1.0, 8, 10.0), (0.3, 16, 20.0)], ids=["high", "steady", "low"]
)
def test_high_entropy_halves_both_thresholds_and_low_doubles_them(entropy, n_min, t_max_s):
    it = trigger(feedback=FEEDBACK)
    it.learner_state(LearnerStateUpdate(entropy=entropy, policy_version=1))
    assert (it.n_min, it.t_max_s) == (n_min, t_max_s)


def test_a_mood_is_left_only_beyond_the_margin():
    it = trigger(feedback=FEEDBACK)
    moods = []
    for version, entropy in enumerate([2.0, 1.9, 1.95, 1.79, 1.9, 0.4, 0.5, 0.59, 0.61]):
        it.learner_state(LearnerStateUpdate(entropy=entropy, policy_version=version))
        moods.append(it.mood.name[0])
    assert "".join(moods) == "EEESSCCCS"


def test_late_news_and_no_number_are_ignored():
    it = trigger(feedback=FEEDBACK)
    it.learner_state(LearnerStateUpdate(entropy=2.5, policy_version=5))
    it.learner_state(LearnerStateUpdate(entropy=0.1, policy_version=4))
    it.learner_state(LearnerStateUpdate(entropy=math.nan, policy_version=6))
    assert it.mood is Mood.EXPLORING


def test_a_single_group_is_never_halved_to_none():
    it = trigger(n_min=1, feedback=FEEDBACK)
    it.learner_state(LearnerStateUpdate(entropy=2.5, policy_version=1))
    assert it.n_min == 1
