"""Recorded rollouts through the product's machines, with lengths drawn by chance."""

import itertools
import random

import pytest

from verl_mux.what_if.engines import Speed
from verl_mux.what_if.recording import Group, Recording, Sample
from verl_mux.what_if.rerun import Rerun
from verl_mux.what_if.settings import changed, recorded

CHANCE = random.Random(5)
GROUPS = tuple(
    Group(f"p{number}", number // 8, tuple(Sample(int(CHANCE.lognormvariate(4, 1)) + 1, 20, 0.0, 1.0) for _ in range(2)))
    for number in range(160)
)


def oldest(told, **tried):
    """Versions that the oldest token of 20 steps is behind. told: what the recording's log says of its keys."""
    recording = Recording("a", {"data.train_batch_size": "8", **told}, GROUPS, (), replicas=2, slots=None, unknown=0)
    settings = changed(recorded(recording), {f"mux.rollout.{key}": value for key, value in tried.items()})
    rerun = Rerun(settings, recording, itertools.cycle(GROUPS), Speed(0.01, 0.002, 0.1, 0.001), worst=0.0)
    return max(rerun.step().oldest for _ in range(20))


OVER = {"oversample.rate": "1", "oversample.max_cuts": "100"}
SEGMENTS = {"segments.segment_length": "40", "segments.max_segments": "100"}


@pytest.mark.parametrize("keys", [OVER, SEGMENTS], ids=["oversample", "segments"])
@pytest.mark.parametrize("told", [{"trainer.v1.sampler.max_off_policy_threshold": "3"}, {}], ids=["verl's", "ours"])
def test_no_token_is_older_than_the_limit_of_lag(keys, told):
    ours = {} if told else {"max_lag": "2"}
    assert oldest({}, **keys) > 2
    assert 0 < oldest(told, **keys, **ours) <= 2
