"""How old tokens may be when they are trained on: by the rule alone, and through both machines, whatever happens."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.exploring import examples
from verl_mux.rollout.control.lag_limit import LagLimit, must_train
from verl_mux.rollout.control.oversampling import Oversampler, OversamplingPolicy
from verl_mux.rollout.control.segment_steps import SegmentSteps
from verl_mux.rollout.control.segments import SegmentLimits
from verl_mux.rollout.messages import Abort, Draw, Drop, Finish, Launch, Report

WANTED = 2


@pytest.mark.parametrize(
    ("ages", "most", "count"),
    [
        ([], 2, 0),
        ([0, 0], 2, 0),
        ([2, 0], 2, 1),
        ([1, 1, 1, 1], 2, 2),  # four within two steps of two each: two of them now
        ([1, 1, 0, 0], 2, 0),
        ([0, 0], 0, 2),
        ([1, 1, 0, 0], 1, 2),
    ],
)
def test_so_many_of_the_oldest_have_to_be_trained_now(ages, most, count):
    assert must_train(ages, WANTED, most) == count


class Steps:
    """Carries a machine's instructions out, and knows by itself which step wrote which token."""

    def __init__(self, machine, most, samples=1) -> None:
        self.machine, self.most, self.samples = machine, most, samples
        self.step, self.drawn, self.in_step = 0, 0, False
        self.running: dict[tuple[str, int], Launch] = {}
        self.aborted: set[tuple[str, int]] = set()
        self.tokens: dict[tuple[str, int], list[int]] = {}  # step of each token
        self.trained: list[str] = []
        self.dropped: list[str] = []

    def begin(self):
        self.step, self.in_step = self.step + 1, True
        self.carry_out(self.machine.begin(WANTED))

    def carry_out(self, instructions):
        for it in instructions:
            match it:
                case Draw(count):
                    names = [f"p{self.drawn + at}" for at in range(count)]
                    self.drawn += count
                    self.carry_out(self.machine.drawn(names))
                case Launch(group, sample):
                    self.running[group, sample] = it
                    self.tokens[group, sample] = self.tokens.get((group, sample), [])[: it.kept]
                case Abort(group, sample):
                    self.aborted.add((group, sample))
                case Drop(group, _):
                    self.dropped.append(group)
                    self.running = {key: launch for key, launch in self.running.items() if key[0] != group}
                case Finish(groups):
                    self.in_step = False
                    for group in groups:
                        written = [at for n in range(self.samples) for at in self.tokens[group, n]]
                        assert all(self.step - at <= self.most for at in written), (group, self.step, written)
                    self.trained += groups

    def say(self, key, kind, new, why):
        launch = self.running.pop(key)
        new = new if launch.budget is None else min(new, launch.budget)
        self.aborted.discard(key)
        self.tokens[key] += [self.step] * new
        total = len(self.tokens[key])
        if kind == "failed":
            del self.tokens[key][launch.kept if launch.budget is not None else 0 :]
        self.carry_out(self.machine.report(Report(kind, *key, new, total, self.step, why)))


def over(strategy, most, **policy) -> Steps:
    return Steps(Oversampler(OversamplingPolicy(rate=1.0, max_cuts=99, **policy), 1, LagLimit(most, strategy)), most)


def test_a_group_at_the_limit_has_a_seat_and_the_step_waits_for_it():
    it = over("protect", 1)
    it.begin()
    for name in ("p1", "p2"):
        it.say((name, 0), "done", 5, "eos")
    it.say(("p0", 0), "paused", 5, "abort")
    it.say(("p3", 0), "paused", 5, "abort")
    it.begin()
    assert set(it.running) == {("p0", 0), ("p3", 0)}, "their tokens are one step old: they are trained now or never"
    it.say(("p0", 0), "done", 5, "eos")
    assert it.in_step and not it.aborted
    it.say(("p3", 0), "done", 5, "eos")
    assert set(it.trained[2:]) == {"p0", "p3"}


def test_wait_cuts_nobody_off_while_a_group_at_the_limit_runs_and_protect_does():
    for strategy, cut in (("protect", True), ("wait", False)):
        it = over(strategy, 1)
        it.begin()
        it.say(("p1", 0), "done", 5, "eos")
        it.say(("p2", 0), "done", 5, "eos")
        it.say(("p0", 0), "paused", 5, "abort")
        it.say(("p3", 0), "paused", 0, "abort")  # it never began
        it.begin()
        it.say(("p4", 0), "done", 5, "eos")  # with p0's seat the batch is full
        assert (("p3", 0) in it.aborted) == cut


def test_no_more_are_begun_than_can_be_trained_in_time():
    it = over("drop", 0)
    it.begin()
    assert len(it.running) == WANTED


def test_drop_gives_up_what_is_older():
    it = over("drop", 1)
    for _ in range(3):
        it.begin()
        while it.in_step:
            key = next(iter(it.aborted), None) or next(key for key in it.running if key != ("p0", 0))
            it.say(key, *(("paused", 5, "abort") if key in it.aborted else ("done", 5, "eos")))
    assert it.dropped == ["p0"]


def test_a_limit_of_none_trains_every_token_in_the_step_that_wrote_it():
    it = Steps(SegmentSteps(SegmentLimits(4, 4, 16), 1, lag=LagLimit(0)), 0)
    it.begin()
    assert {launch.budget for launch in it.running.values()} == {16}


def by_segments(strategy) -> Steps:
    """A second step that trains two of four; p0's first tokens are of the first step and have to be trained now."""
    it = Steps(SegmentSteps(SegmentLimits(4, 4, 16), 1, rate=1.0, lag=LagLimit(1, strategy)), 1)
    it.begin()
    for name in ("p1", "p2"):
        it.say((name, 0), "done", 2, "eos")
    it.say(("p0", 0), "paused", 4, "abort")
    it.say(("p3", 0), "paused", 0, "abort")
    assert it.trained == ["p1", "p2"]
    it.begin()
    assert sorted(name for name, _ in it.running) == ["p0", "p3", "p4", "p5"]
    return it


@pytest.mark.parametrize("strategy", ["protect", "wait"])
def test_a_segment_that_fails_is_written_again_where_its_group_has_to_be_trained_now(strategy):
    it = by_segments(strategy)
    it.say(("p0", 0), "failed", 3, "failed")
    it.say(("p3", 0), "done", 2, "eos")
    it.say(("p4", 0), "done", 2, "eos")
    it.say(("p5", 0), "paused", 2, "abort")
    assert it.in_step, "enough are ready, but p0 would be too old in the next step"
    it.say(("p0", 0), "done", 3, "eos")
    it.say(("p5", 0), "paused", 0, "abort")
    assert sorted(it.trained[2:]) == ["p0", "p3"]


def test_wait_cuts_a_round_of_segments_off_once_the_group_at_the_limit_is_complete():
    it = by_segments("wait")
    it.say(("p3", 0), "done", 2, "eos")
    it.say(("p4", 0), "done", 2, "eos")
    assert not it.aborted
    it.say(("p0", 0), "done", 3, "eos")
    assert it.aborted == {("p5", 0)}


def test_protected_groups_without_a_seat_are_not_joined_by_ever_more_new_ones():
    it = Steps(Oversampler(OversamplingPolicy(rate=1.5, max_cuts=1), 1), most=10**6)
    for _ in range(12):
        it.begin()
        while it.in_step:
            key = next(iter(it.aborted), None) or max(it.running, key=lambda key: int(key[0][1:]))
            it.say(key, *(("paused", 3, "abort") if key in it.aborted else ("done", 3, "eos")))
        assert len(it.machine.to_dict()["groups"]) <= 3


@settings(max_examples=examples(40), stateful_step_count=60, suppress_health_check=list(HealthCheck))
class LimitIsKept(RuleBasedStateMachine):
    """Ends, aborts, failures and resumes; `Steps` asserts the limit for each trained token."""

    @initialize(
        kind=st.sampled_from(["oversample", "segments"]), strategy=st.sampled_from(["protect", "wait", "drop"]),
        most=st.integers(0, 3), rate=st.sampled_from([0.0, 0.5, 2.0]), samples=st.integers(1, 2),
        max_cuts=st.sampled_from([1, 99]),
    )  # fmt: skip
    def create(self, kind, strategy, most, rate, samples, max_cuts):
        self.kind, self.lag, self.rate, self.samples = kind, LagLimit(most, strategy), rate, samples
        self.policy = OversamplingPolicy(rate=rate, max_cuts=max_cuts, max_failures=1)
        self.limits = SegmentLimits(4, 4, 16)
        self.steps = Steps(self.machine(None), most, samples)

    def machine(self, saved):
        if self.kind == "oversample":
            if saved is None:
                return Oversampler(self.policy, self.samples, self.lag)
            return Oversampler.from_dict(self.policy, self.samples, saved, self.lag)
        if saved is None:
            return SegmentSteps(self.limits, self.samples, self.rate, 1, self.lag)
        return SegmentSteps.from_dict(self.limits, self.samples, saved, self.rate, 1, self.lag)

    @precondition(lambda self: not self.steps.in_step)
    @rule()
    def begin(self):
        self.steps.begin()

    @precondition(lambda self: self.steps.running)
    @rule(data=st.data(), how=st.sampled_from(["end", "end", "cut", "fail"]))
    def report(self, data, how):
        key = data.draw(st.sampled_from(sorted(self.steps.running)))
        new = data.draw(st.integers(0, 9))
        budget = self.steps.running[key].budget
        if how == "fail":
            self.steps.say(key, "failed", new, "failed")
        elif how == "end":
            self.steps.say(key, "done", new, "eos")
        elif budget is not None and new >= budget:
            self.steps.say(key, "paused", new, "length")
        elif key in self.steps.aborted:
            self.steps.say(key, "paused", new, "abort")

    @precondition(lambda self: not self.steps.in_step)
    @rule()
    def resume(self):
        self.steps.machine = self.machine(json.loads(json.dumps(self.steps.machine.to_dict())))

    @invariant()
    def nobody_is_in_two_places(self):
        known = [*self.steps.trained, *self.steps.dropped]
        assert len(known) == len(set(known))
        assert not self.steps.in_step or self.steps.running, "a step waits for nothing"


TestLimitIsKept = LimitIsKept.TestCase
