"""Segment rollout by steps: rounds, pools, nothing lost."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from verl_mux.rollout.control.segment_steps import SegmentSteps
from verl_mux.rollout.control.segments import End, SampleKey, SegmentLimits, State
from verl_mux.rollout.messages import Abort, Draw, Drop, Finish, Launch

LIMITS = SegmentLimits(segment_length=10, max_segments=4, max_length=40)


class Rollout:
    """Plays the workers: group g's responses are `length(g)` tokens long."""

    def __init__(self, length, samples=2, rate=0.0, **kwargs) -> None:
        self.steps = SegmentSteps(LIMITS, samples, rate, **kwargs)
        self.length, self.drawn, self.dropped = length, 0, []

    def step(self, wanted, version, why=lambda key: None) -> tuple:
        out = list(self.steps.begin(wanted))
        while True:
            it = out.pop(0)
            if isinstance(it, Finish):
                assert not out
                return it.groups
            if isinstance(it, Draw):
                names = [f"g{self.drawn + i}" for i in range(it.count)]
                self.drawn += it.count
                out += self.steps.drawn(names)
            elif isinstance(it, Launch):
                out += self._end(it, version, why(SampleKey(it.group, it.sample)))
            elif isinstance(it, Drop):
                self.dropped.append(it.group)
            else:
                assert isinstance(it, Abort)

    def _end(self, it: Launch, version: int, why: End | None) -> list:
        left = self.length(int(it.group[1:])) - it.kept
        new = min(it.budget, left)
        why = why or (End.EOS if left <= it.budget and it.kept + new < LIMITS.longest else End.LENGTH)
        return self.steps.ended(SampleKey(it.group, it.sample), new if why is not End.ABORT else new // 2, version, why)


def test_short_responses_are_ready_after_one_round():
    rollout = Rollout(lambda g: 5)
    assert rollout.step(3, 0) == ("g0", "g1", "g2")
    assert (rollout.steps.metrics.rounds, rollout.drawn) == (1, 3)


def test_the_pool_fills_until_one_round_a_step_is_enough():
    rollout = Rollout(lambda g: 35 if g % 4 == 0 else 5)
    rounds = []
    for version in range(20):
        rollout.step(8, version)
        rounds.append(rollout.steps.metrics.rounds)
    assert rounds[0] > 1 and rounds[-10:] == [1] * 10


def test_the_unfinished_start_before_the_new():
    steps = SegmentSteps(LIMITS, 1)
    steps.begin(1)
    steps.drawn(["a"])
    assert steps.ended(SampleKey("a", 0), 10, 0, End.LENGTH) == [Draw(1)]
    assert steps.drawn(["b"]) == [Launch("a", 0, 10, 10), Launch("b", 0, 0, 10)]


def test_a_longest_response_is_truncated_and_trained():
    rollout = Rollout(lambda g: 400)
    groups = rollout.step(1, 0)
    assert groups == ("g0",)
    assert rollout.steps.metrics.kept == [40, 40]


def test_a_group_that_fails_too_often_is_dropped():
    rollout = Rollout(lambda g: 5, max_failures=2)
    rollout.step(1, 0, why=lambda key: End.FAILED if key.group == "g0" else None)
    assert rollout.dropped == ["g0"]


def test_over_sampling_cuts_a_round_off_when_enough_are_ready():
    steps = SegmentSteps(LIMITS, 1, rate=1.0)
    assert steps.begin(1) == [Draw(2)]
    steps.drawn(["a", "b"])
    out = steps.ended(SampleKey("a", 0), 5, 0, End.EOS)
    assert out == [Abort("b", 0)]
    assert steps.ended(SampleKey("b", 0), 3, 0, End.ABORT) == [Finish(("a",))]
    assert steps.begin(1) == [Draw(1)]
    launches = steps.drawn(["c"])
    assert launches == [Launch("b", 0, 3, 10), Launch("c", 0, 0, 10)]


def test_a_second_report_of_a_sample_changes_nothing():
    steps = SegmentSteps(LIMITS, 2)
    steps.begin(1)
    steps.drawn(["a"])
    steps.ended(SampleKey("a", 0), 5, 0, End.EOS)
    assert steps.ended(SampleKey("a", 0), 5, 0, End.EOS) == []


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    wanted=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    rate=st.sampled_from([0.0, 0.5]),
    ends=st.lists(st.sampled_from([None, None, None, End.ABORT, End.FAILED]), min_size=1, max_size=40),
    resume_at=st.integers(0, 6),
)
def test_every_prompt_is_trained_waiting_or_dropped(lengths, wanted, rate, ends, resume_at):
    rollout = Rollout(lambda g: lengths[g % len(lengths)], rate=rate)
    fate = iter(ends * 5)
    trained = 0
    for version, count in enumerate(wanted):
        if version == resume_at:
            saved = json.loads(json.dumps(rollout.steps.to_dict()))
            rollout.steps = SegmentSteps.from_dict(LIMITS, 2, saved, rate)
        trained += len(rollout.step(count, version, why=lambda key: next(fate, None)))
        left = [sample for group in rollout.steps.pools._groups.values() for sample in group]
        assert len(left) + 2 * trained + 2 * len(rollout.dropped) == 2 * rollout.drawn
        assert not any(sample.state is State.RUNNING for sample in left)
