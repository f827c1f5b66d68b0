"""Rollouts run again in virtual time: the engines' speed, and steps under the recorded and other keys."""

from __future__ import annotations

import itertools
import random

import pytest

from verl_mux.what_if.recorded_run import Group, Recording, Sample, changed, recorded
from verl_mux.what_if.rerun import Engines, Rerun, Speed

SPEED = Speed(base=0.01, each=0.002, batch=0.1, prefill=0.001)


def ends(engines):
    found = []
    while (ended := engines.next_before(float("inf"))) is not None:
        found.append((ended.name[1], ended.at))
    return found


def test_one_request_takes_its_prefill_and_its_tokens():
    engines = Engines(SPEED, replicas=1, slots=8)
    engines.submit(("g", 0), read=50, tokens=100)
    assert ends(engines) == [(0, pytest.approx(0.1 + 0.05 + 100 * 0.012))]


def test_two_at_once_slow_each_other_until_one_ends():
    engines = Engines(SPEED, replicas=1, slots=8)
    engines.submit(("g", 0), read=0, tokens=10)
    engines.submit(("g", 1), read=0, tokens=30)
    assert ends(engines) == [(0, pytest.approx(0.1 + 10 * 0.014)), (1, pytest.approx(0.1 + 10 * 0.014 + 20 * 0.012))]


def test_what_finds_no_slot_waits_for_one():
    engines = Engines(SPEED, replicas=1, slots=1)
    for number in range(2):
        engines.submit(("g", number), read=0, tokens=10)
    first, second = (at for _, at in ends(engines))
    assert second == pytest.approx(first + 0.1 + 10 * 0.012)


def test_the_least_loaded_replica_gets_the_next():
    engines = Engines(SPEED, replicas=2, slots=8)
    for number in range(2):
        engines.submit(("g", number), read=0, tokens=10)
    assert [at for _, at in ends(engines)] == [pytest.approx(0.1 + 10 * 0.012)] * 2


def test_an_abort_gives_the_tokens_so_far_and_frees_the_slot():
    engines = Engines(SPEED, replicas=1, slots=1)
    engines.submit(("g", 0), read=0, tokens=1000)
    engines.submit(("g", 1), read=0, tokens=1)
    engines.now = 0.1 + 50 * 0.012
    assert engines.abort(("g", 0)) == 50
    assert [number for number, _ in ends(engines)] == [1]


CHANCE = random.Random(5)
GROUPS = tuple(
    Group(f"p{number}", number // 8, tuple(Sample(int(CHANCE.lognormvariate(4, 1)) + 1, 20, 0.0, 1.0) for _ in range(2)))
    for number in range(160)
)


def oldest(given_words, **tried):
    """Versions that the oldest token of 20 steps is behind. recorded: what the recording's log says of its keys."""
    recording = Recording("a", {"data.train_batch_size": "8", **given_words}, GROUPS, (), replicas=2, slots=None, unknown=0)
    settings = changed(recorded(recording), {f"mux.rollout.{key}": value for key, value in tried.items()})
    rerun = Rerun(settings, recording, itertools.cycle(GROUPS), Speed(0.01, 0.002, 0.1, 0.001), worst=0.0)
    return max(rerun.step().oldest for _ in range(20))


OVER = {"oversample.rate": "1", "oversample.max_cuts": "100"}
SEGMENTS = {"segments.segment_length": "40", "segments.max_segments": "100"}


@pytest.mark.parametrize("keys", [OVER, SEGMENTS], ids=["oversample", "segments"])
@pytest.mark.parametrize("given_words", [{"trainer.v1.sampler.max_off_policy_threshold": "3"}, {}], ids=["verl's", "ours"])
def test_no_token_is_older_than_the_limit_of_lag(keys, given_words):
    ours = {} if given_words else {"max_lag": "2"}
    assert oldest({}, **keys) > 2
    assert 0 < oldest(given_words, **keys, **ours) <= 2
