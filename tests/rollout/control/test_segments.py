"""Segment rollout: the unfinished and the experience pool, and steps of rounds over them, in which no sample is lost."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.exploring import examples
from verl_mux.rollout.control.segments import End, SampleKey, SegmentLimits, SegmentPools, SegmentSteps, State
from verl_mux.rollout.instructions import Abort, Draw, Drop, Finish, Launch, Segment, merged

LIMITS = SegmentLimits(segment_length=10, max_segments=4, max_length=35)


def pools(*groups: str, samples: int = 1) -> SegmentPools:
    out = SegmentPools(LIMITS)
    for group in groups:
        out.add(group, samples)
    return out


def test_end_of_sequence_makes_experience():
    it = pools("a")
    assert it.start() == [(SampleKey("a", 0), 0, 10)]
    assert it.ended(SampleKey("a", 0), 4, 1, End.EOS) is State.EXPERIENCE
    [[sample]] = it.take(5)
    assert sample.segments == [Segment(4, 1)]
    assert not sample.truncated


def test_a_full_segment_is_unfinished_and_goes_first_in_the_next_step():
    it = pools("a")
    it.start()
    assert it.ended(SampleKey("a", 0), 10, 1, End.LENGTH) is State.UNFINISHED
    it.add("b", 1)
    assert it.start() == [(SampleKey("a", 0), 10, 10), (SampleKey("b", 0), 0, 10)]


def test_the_maximum_truncates_and_the_last_budget_is_what_is_left():
    it = pools("a")
    budgets = []
    for version in range(4):
        [start] = it.start()
        budgets.append(start.budget)
        state = it.ended(SampleKey("a", 0), start.budget, version, End.LENGTH)
    assert budgets == [10, 10, 10, 5]
    assert state is State.EXPERIENCE
    [[sample]] = it.take(1)
    assert sample.truncated


def test_an_end_of_sequence_at_the_maximum_is_not_truncated():
    it = SegmentPools(SegmentLimits(10, 1, 10))
    it.add("a", 1)
    it.start()
    it.ended(SampleKey("a", 0), 10, 0, End.EOS)
    assert not it.take(1)[0][0].truncated


def test_an_abort_keeps_its_tokens_and_a_failure_only_the_earlier_segments():
    it = pools("a", "b")
    it.start()
    it.ended(SampleKey("a", 0), 3, 1, End.ABORT)
    it.ended(SampleKey("b", 0), 3, 1, End.FAILED)
    assert it.start() == [(SampleKey("a", 0), 3, 10), (SampleKey("b", 0), 0, 10)]
    it.ended(SampleKey("b", 0), 1, 2, End.EOS)
    assert it.take(1)[0][0].lost_tokens == 3


def test_only_whole_prompt_groups_are_trained():
    it = pools("a", "b", samples=2)
    it.start()
    for key in (SampleKey("a", 0), SampleKey("b", 0), SampleKey("b", 1)):
        it.ended(key, 2, 1, End.EOS)
    it.ended(SampleKey("a", 1), 10, 1, End.LENGTH)
    assert it.ready() == ["b"]


def test_a_dropped_group_is_gone_and_the_others_run_on():
    it = pools("a", "b", samples=2)
    it.start()
    it.ended(SampleKey("a", 0), 2, 1, End.EOS)
    it.drop("a")
    assert {name: [sample.state for sample in group] for name, group in it._groups.items()} == {"b": [State.RUNNING] * 2}


def test_an_illegal_report_raises_and_changes_nothing():
    it = pools("a")
    before = it.to_dict()
    with pytest.raises(RuntimeError, match="new, budget 0"):
        it.ended(SampleKey("a", 0), 2, 1, End.EOS)
    it.start()
    with pytest.raises(RuntimeError, match="11 tokens"):
        it.ended(SampleKey("a", 0), 11, 1, End.EOS)
    with pytest.raises(RuntimeError, match="no sample"):
        it.ended(SampleKey("z", 0), 1, 1, End.EOS)
    assert it.to_dict() == before


def test_boundaries_and_versions_survive_a_checkpoint():
    it = pools("a", samples=2)
    for version in (3, 5):
        it.start()
        it.ended(SampleKey("a", 0), 10, version, End.LENGTH)
        it.ended(SampleKey("a", 1), 7, version, End.ABORT)
    again = SegmentPools(LIMITS)
    again.restore(json.loads(json.dumps(it.to_dict())))
    again.start()
    for key in (SampleKey("a", 0), SampleKey("a", 1)):
        again.ended(key, 1, 6, End.EOS)
    first, second = again.take(1)[0]
    assert first.segments == [(10, 3), (10, 5), (1, 6)]
    assert second.segments == [(7, 3), (7, 5), (1, 6)]


def test_neighbouring_segments_of_one_version_merge():
    assert merged([Segment(3, 1), Segment(4, 1), Segment(5, 2)]) == (Segment(7, 1), Segment(5, 2))
    assert merged([]) == ()


@settings(max_examples=examples(60), stateful_step_count=40)
class NothingIsLost(RuleBasedStateMachine):
    """Segments end, abort and fail, groups are dropped, and the job resumes, in any order."""

    @initialize(segment=st.integers(1, 5), segments=st.integers(1, 4), maximum=st.integers(1, 20))
    def create(self, segment, segments, maximum):
        self.limits = SegmentLimits(segment, segments, maximum)
        self.pools = SegmentPools(self.limits)
        self.added = self.groups = self.version = 0
        self.trained: set[SampleKey] = set()
        self.dropped: set[SampleKey] = set()

    def _all(self):
        return [sample.key for group in self.pools._groups.values() for sample in group]

    def _running(self):
        return [key for key in self._all() if self.pools._find(key).state is State.RUNNING]

    @rule(samples=st.integers(1, 3))
    def add(self, samples):
        self.pools.add(f"g{self.groups}", samples)
        self.groups, self.added = self.groups + 1, self.added + samples

    @rule()
    def start(self):
        self.version += 1
        unfinished = {key for key in self._all() if self.pools._find(key).state is State.UNFINISHED}
        again = [start.key in unfinished for start in self.pools.start()]
        assert again == sorted(again, reverse=True), "unfinished ones start before new ones"

    @precondition(lambda self: self._running())
    @rule(data=st.data(), why=st.sampled_from(End))
    def end(self, data, why):
        key = data.draw(st.sampled_from(self._running()))
        budget = self.pools._find(key).budget
        length = budget if why is End.LENGTH else data.draw(st.integers(0, budget))
        self.pools.ended(key, length, self.version, why)

    @rule(count=st.integers(0, 3))
    def take(self, count):
        for group in self.pools.take(count):
            for sample in group:
                assert sample.key not in self.trained
                assert sample.length <= self.limits.longest
                versions = [segment.version for segment in sample.segments]
                assert versions == sorted(versions)
                self.trained.add(sample.key)

    @precondition(lambda self: self.pools._groups)
    @rule(data=st.data())
    def drop(self, data):
        dropped = self.pools.drop(data.draw(st.sampled_from(sorted(self.pools._groups))))
        self.dropped |= {sample.key for sample in dropped}

    @rule()
    def resume(self):
        saved = json.loads(json.dumps(self.pools.to_dict()))
        self.pools = SegmentPools(self.limits)
        self.pools.restore(saved)

    @invariant()
    def every_sample_is_somewhere_once(self):
        known = [*self._all(), *self.trained, *self.dropped]
        assert len(known) == len(set(known)) == self.added


TestNothingIsLost = NothingIsLost.TestCase


# ---------------------------------------------------------------- steps of rounds

FORTY = SegmentLimits(segment_length=10, max_segments=4, max_length=40)


class Rollout:
    """Plays the workers: group g's responses are `length(g)` tokens long."""

    def __init__(self, length, samples=2, rate=0.0, **kwargs) -> None:
        self.steps = SegmentSteps(FORTY, samples, rate, **kwargs)
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
        why = why or (End.EOS if left <= it.budget and it.kept + new < FORTY.longest else End.LENGTH)
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
    steps = SegmentSteps(FORTY, 1)
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
    steps = SegmentSteps(FORTY, 1, rate=1.0)
    assert steps.begin(1) == [Draw(2)]
    steps.drawn(["a", "b"])
    out = steps.ended(SampleKey("a", 0), 5, 0, End.EOS)
    assert out == [Abort("b", 0)]
    assert steps.ended(SampleKey("b", 0), 3, 0, End.ABORT) == [Finish(("a",))]
    assert steps.begin(1) == [Draw(1)]
    launches = steps.drawn(["c"])
    assert launches == [Launch("b", 0, 3, 10), Launch("c", 0, 0, 10)]


def test_a_second_report_of_a_sample_changes_nothing():
    steps = SegmentSteps(FORTY, 2)
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
            rollout.steps = SegmentSteps(FORTY, 2, rate)
            rollout.steps.restore(saved)
        trained += len(rollout.step(count, version, why=lambda key: next(fate, None)))
        left = [sample for group in rollout.steps.pools._groups.values() for sample in group]
        assert len(left) + 2 * trained + 2 * len(rollout.dropped) == 2 * rollout.drawn
        assert not any(sample.state is State.RUNNING for sample in left)
