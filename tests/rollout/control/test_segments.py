"""Segment rollout: steps of rounds, in which no sample is lost."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_mux.rollout.control.segments import SegmentLimits, SegmentSteps
from verl_mux.rollout.instructions import Abort, Draw, Drop, Finish, Launch, Report, Segment, merged

FORTY = SegmentLimits(segment_length=10, max_segments=4, max_length=40)


def started(*groups: str, limits: SegmentLimits = FORTY, samples: int = 1, wanted: int = 1, **keys) -> SegmentSteps:
    """In the first round of its first step."""
    steps = SegmentSteps(limits, samples, **keys)
    steps.begin(wanted)
    steps.drawn(groups)
    return steps


def ended(steps: SegmentSteps, group: str, new: int, why: str, version: int = 0, sample: int = 0) -> list:
    return steps.report(Report("", group, sample, new, -1, version, why))


def segments(steps: SegmentSteps) -> dict[str, list]:
    return {name: [sample["segments"] for sample in samples] for name, samples in steps.to_dict()["groups"].items()}


def test_a_full_segment_goes_first_in_the_next_round():
    steps = started("a")
    assert ended(steps, "a", 10, "length") == [Draw(1)]
    assert steps.drawn(["b"]) == [Launch("a", 0, 10, 10), Launch("b", 0, 0, 10)]


def test_the_maximum_ends_a_response_and_the_last_budget_is_what_is_left():
    steps = SegmentSteps(SegmentLimits(segment_length=10, max_segments=4, max_length=35), 1)
    steps.begin(1)
    budgets, out = [], steps.drawn(["a"])
    while isinstance(out[0], Launch):
        budgets.append(out[0].budget)
        out = ended(steps, "a", out[0].budget, "length", version=len(budgets))
        out = steps.drawn([]) if isinstance(out[0], Draw) else out
    assert budgets == [10, 10, 10, 5] and out == [Finish(("a",))] and steps.metrics.kept == [35]


def test_an_abort_keeps_its_tokens_and_a_failure_only_the_earlier_segments():
    steps = started("a", "b", wanted=2)
    ended(steps, "a", 3, "abort")
    assert ended(steps, "b", 3, "failed") == [Draw(2)]
    assert steps.drawn([]) == [Launch("a", 0, 3, 10), Launch("b", 0, 0, 10)] and steps.metrics.wasted_tokens == 3


def test_only_whole_prompt_groups_are_trained():
    steps = started("a", "b", samples=2)
    for group, sample in (("a", 0), ("b", 0), ("b", 1)):
        assert ended(steps, group, 2, "eos", sample=sample) == []
    assert ended(steps, "a", 10, "length", sample=1) == [Finish(("b",))]


def test_a_report_over_the_budget_raises_and_changes_nothing():
    steps = started("a")
    before = steps.to_dict()
    with pytest.raises(RuntimeError, match="11 tokens .* budget 10"):
        ended(steps, "a", 11, "eos")
    assert ended(steps, "z", 1, "eos") == []  # no such sample
    assert steps.to_dict() == before


def test_boundaries_and_versions_survive_a_checkpoint():
    steps = started("a", "b", samples=2)
    for version in (3, 5):
        for sample, new, why in ((0, 10, "length"), (1, 7, "abort")):
            ended(steps, "a", new, why, version, sample)
            ended(steps, "b", 10, "length", version, sample)
        steps.drawn([])
    again = SegmentSteps(FORTY, 2)
    again.restore(json.loads(json.dumps(steps.to_dict())))
    assert segments(again) == segments(steps) == {
        "a": [[[10, 3], [10, 5]], [[7, 3], [7, 5]]], "b": [[[10, 3], [10, 5]]] * 2,
    }  # fmt: skip


def test_neighbouring_segments_of_one_version_merge():
    assert merged([Segment(3, 1), Segment(4, 1), Segment(5, 2)]) == (Segment(7, 1), Segment(5, 2))
    assert merged([]) == ()


def test_over_sampling_cuts_a_round_off_when_enough_are_ready():
    steps = SegmentSteps(FORTY, 1, rate=1.0)
    assert steps.begin(1) == [Draw(2)]
    steps.drawn(["a", "b"])
    assert ended(steps, "a", 5, "eos") == [Abort("b", 0)]
    assert ended(steps, "b", 3, "abort") == [Finish(("a",))]
    assert steps.begin(1) == [Draw(1)]
    assert steps.drawn(["c"]) == [Launch("b", 0, 3, 10), Launch("c", 0, 0, 10)]


# ---------------------------------------------------------------- whole steps


class Rollout:
    """Plays the workers: group g's responses are `length(g)` tokens long. Keeps the segments of each sample by itself."""

    def __init__(self, length, limits=FORTY, rate=0.0, **keys) -> None:
        self.limits, self.steps = limits, SegmentSteps(limits, 2, rate, **keys)
        self.length, self.drawn, self.dropped = length, 0, []
        self.segments: dict[tuple[str, int], list[Segment]] = {}
        self.launched: set[tuple[str, int]] = set()

    def step(self, wanted, version, why=lambda group: None) -> tuple:
        out = list(self.steps.begin(wanted))
        while True:
            self._check_order([it for it in out if isinstance(it, Launch)])
            it = out.pop(0)
            if isinstance(it, Finish):
                assert not out
                return it.groups
            if isinstance(it, Draw):
                names = [f"g{self.drawn + at}" for at in range(it.count)]
                self.drawn += it.count
                out += self.steps.drawn(names)
            elif isinstance(it, Launch):
                out += self._end(it, version, why(it.group))
            elif isinstance(it, Drop):
                self.dropped.append(it.group)
                out = [other for other in out if not (isinstance(other, Launch) and other.group == it.group)]
            else:
                assert isinstance(it, Abort)

    def _check_order(self, launches: list[Launch]) -> None:
        again = [(it.group, it.sample) in self.launched for it in launches]
        assert again == sorted(again, reverse=True), "unfinished ones start before new ones"

    def _end(self, it: Launch, version: int, why: str | None) -> list:
        self.launched.add((it.group, it.sample))
        known = self.segments.setdefault((it.group, it.sample), [])
        assert it.kept == sum(segment.length for segment in known)
        left = self.length(int(it.group[1:])) - it.kept
        new = min(it.budget, left)
        why = why or ("eos" if left <= it.budget and it.kept + new < self.limits.longest else "length")
        new = new // 2 if why == "abort" else new
        if new and why != "failed":
            known.append(Segment(new, version))
        assert sum(segment.length for segment in known) <= self.limits.longest
        return ended(self.steps, it.group, new, why, version, it.sample)


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


def test_a_group_that_fails_too_often_is_dropped():
    rollout = Rollout(lambda g: 5)
    rollout.steps.max_failures = 2
    rollout.step(1, 0, why=lambda group: "failed" if group == "g0" else None)
    assert rollout.dropped == ["g0"]


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    wanted=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    rate=st.sampled_from([0.0, 0.5]),
    ends=st.lists(st.sampled_from([None, None, None, "abort", "failed"]), min_size=1, max_size=40),
    resume_at=st.integers(0, 6),
    limits=st.sampled_from([FORTY, SegmentLimits(3, 4, 11), SegmentLimits(5, 1, 20)]),
)
def test_every_prompt_is_trained_waiting_or_dropped(lengths, wanted, rate, ends, resume_at, limits):
    """Its segments' lengths add up to its tokens, its versions never fall, and the machine has them as they were written."""
    rollout = Rollout(lambda g: lengths[g % len(lengths)], limits, rate)
    fate, trained = iter(ends * 5), []
    for version, count in enumerate(wanted):
        if version == resume_at:
            saved = json.loads(json.dumps(rollout.steps.to_dict()))
            rollout.steps = SegmentSteps(limits, 2, rate)
            rollout.steps.restore(saved)
        trained += rollout.step(count, version, why=lambda group: next(fate, None))
        left = segments(rollout.steps)
        assert sorted([*left, *trained, *rollout.dropped]) == sorted(f"g{at}" for at in range(rollout.drawn))
        for name, samples in left.items():
            for number, known in enumerate(samples):
                assert known == [list(it) for it in rollout.segments.get((name, number), [])]
                assert [it[1] for it in known] == sorted(it[1] for it in known)
