"""The unfinished and the experience pool."""

from __future__ import annotations

import json

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.exploring import examples
from verl_mux.rollout.control.segments import End, SampleKey, SegmentLimits, SegmentPools, State
from verl_mux.rollout.messages import Segment, merged

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
    again = SegmentPools.from_dict(LIMITS, json.loads(json.dumps(it.to_dict())))
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
        self.pools = SegmentPools.from_dict(self.limits, json.loads(json.dumps(self.pools.to_dict())))

    @invariant()
    def every_sample_is_somewhere_once(self):
        known = [*self._all(), *self.trained, *self.dropped]
        assert len(known) == len(set(known)) == self.added


TestNothingIsLost = NothingIsLost.TestCase
