"""What is learnt of a job from its steps, and when it is other than it was placed by."""

import random

import pytest

from tests.placement.made_jobs import make_job
from verl_mux.placement.estimator import LEAST, RECENT, Observed, drifted, learnt


def seen(rollouts, trains, between=()):
    return Observed(rollout=tuple(rollouts), train=tuple(trains), between=tuple(between))


def test_a_few_steps_are_needed_and_the_time_between_phases_holds_no_node():
    job = make_job("a", 100, 100, sync_s=5)
    assert learnt(job, seen([50.0] * (LEAST - 1), [40.0] * (LEAST - 1))) is job
    now = learnt(job, seen([50.0] * LEAST, [40.0] * LEAST, [2.0]))
    assert (now.rollout_hold_s, now.train.seconds, now.iteration_s) == (50.0, 40.0, 92.0)


def test_only_the_last_steps_count_and_a_drift_does_not_look_like_noise():
    grown = [100.0 * (1 + step / 300) for step in range(300)]
    now = learnt(make_job("a", 100, 100), seen(grown, grown))
    assert now.rollout.seconds == pytest.approx(sum(grown[-RECENT:]) / RECENT) and now.rollout.cv < 0.06


def test_noise_alone_is_no_drift_and_twice_the_length_is():
    rng = random.Random(1)
    noisy = [100 * rng.lognormvariate(0, 0.1) for _ in range(RECENT)]
    job = learnt(make_job("a", 100, 100), seen(noisy, noisy))
    again = [100 * rng.lognormvariate(0, 0.1) for _ in range(RECENT)]
    assert not drifted(job, learnt(job, seen(again, again)))
    assert drifted(job, learnt(job, seen([2 * s for s in again], again)))
