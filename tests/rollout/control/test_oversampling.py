"""Over-sampling: which groups are launched, cut off and left over; and that no prompt is ever lost.

The limit of lag, by its rule alone and through both machines, over-sampling and segments.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.exploring import examples
from verl_mux.rollout.control.oversampling import LagLimit, Oversampler
from verl_mux.rollout.control.segments import SegmentLimits, SegmentSteps
from verl_mux.rollout.instructions import Abort, Draw, Drop, Finish, Launch, Report


class Rollout:
    """Carries instructions out: running samples, a data set, finished batches."""

    def __init__(self, core: Oversampler, prompts: int = 10_000) -> None:
        self.core, self.left, self.drawn = core, prompts, 0
        self.running: dict[tuple[str, int], int] = {}
        self.aborted: set[tuple[str, int]] = set()
        self.launched_in_step: list[str] = []
        self.batch: tuple[str, ...] | None = None
        self.dropped: list[str] = []

    def begin(self, wanted: int) -> None:
        self.batch, self.launched_in_step = None, []
        self.carry_out(self.core.begin(wanted))

    def carry_out(self, instructions: list) -> None:
        for instruction in instructions:
            match instruction:
                case Draw(count):
                    names = [f"p{self.drawn + i}" for i in range(min(count, self.left))]
                    self.drawn, self.left = self.drawn + len(names), self.left - len(names)
                    self.carry_out(self.core.drawn(names))
                case Launch(group, sample, kept):
                    assert (group, sample) not in self.running
                    self.running[group, sample] = kept
                    self.launched_in_step.append(group)
                case Abort(group, sample):
                    assert (group, sample) in self.running
                    self.aborted.add((group, sample))
                case Drop(group, _):
                    self.dropped.append(group)
                case Finish(groups):
                    assert not self.running
                    self.batch = groups

    def end(self, group: str, tokens: int = 10, sample: int = 0) -> None:
        self._report("done", group, sample, tokens)

    def cut(self, group: str, tokens: int = 5, sample: int = 0) -> None:
        self._report("paused", group, sample, tokens)

    def fail(self, group: str, sample: int = 0) -> None:
        self._report("failed", group, sample)

    def cut_all_aborted(self) -> None:
        for group, sample in sorted(self.aborted):
            self.cut(group, 5, sample)

    def _report(self, kind: str, group: str, sample: int, tokens: int = 0) -> None:
        del self.running[group, sample]
        self.aborted.discard((group, sample))
        self.carry_out(self.core.report(Report(kind, group, sample, -1, tokens, 0, "")))


def started(samples: int = 1, wanted: int = 4, **keys) -> Rollout:
    rollout = Rollout(Oversampler(samples, **keys))
    rollout.begin(wanted)
    return rollout


@pytest.mark.parametrize(("rate", "wanted", "launched"), [(0.0, 4, 4), (0.5, 4, 6), (0.1, 10, 11), (0.25, 5, 7), (1.0, 3, 6)])
def test_launches_the_ceiling_of_one_plus_rate_times_the_wanted_groups(rate, wanted, launched):
    assert len(started(rate=rate, wanted=wanted).running) == launched


def test_the_rest_is_aborted_when_enough_groups_are_complete():
    rollout = started(rate=0.5)
    for name in ("p5", "p0", "p1"):
        rollout.end(name)
    assert not rollout.aborted
    rollout.end("p2")
    assert rollout.aborted == {("p3", 0), ("p4", 0)}
    assert rollout.batch is None
    rollout.cut_all_aborted()
    assert set(rollout.batch) == {"p0", "p1", "p2", "p5"}


def test_a_group_is_complete_only_with_all_its_samples():
    rollout = started(samples=2, rate=0.0, wanted=1)
    rollout.end("p0", sample=0)
    assert rollout.batch is None
    rollout.end("p0", sample=1)
    assert rollout.batch == ("p0",)


def test_left_over_groups_go_first_and_whole_in_the_next_step():
    rollout = started(samples=2, rate=0.5, wanted=2)
    for name in ("p1", "p2"):
        rollout.end(name, sample=0)
        rollout.end(name, sample=1)
    rollout.cut("p0", 7, 0)
    rollout.cut("p0", 3, 1)
    assert set(rollout.batch) == {"p1", "p2"}
    rollout.begin(2)
    assert rollout.launched_in_step[:2] == ["p0", "p0"]
    assert rollout.running["p0", 0] == 7
    assert rollout.running["p0", 1] == 3


def test_resumed_groups_waste_nothing_and_count_only_new_tokens():
    rollout = started(rate=0.5, wanted=2)
    rollout.end("p1", 10)
    rollout.end("p2", 10)
    rollout.cut("p0", 7)
    assert rollout.core.metrics.wasted_tokens == 0
    rollout.begin(2)
    rollout.end("p0", 9)
    rollout.end("p3", 1)
    assert rollout.core.metrics.generated_tokens == 3


def test_a_group_cut_off_often_enough_runs_to_its_end_and_the_step_waits_for_it():
    rollout = started(rate=1.0, wanted=1, max_cuts=2)
    for step in range(2):
        rollout.end(f"p{step + 1}")
        rollout.cut_all_aborted()
        rollout.begin(1)
    assert set(rollout.running) == {("p0", 0)}, "its seat is the only one; who else began would be cut off at once"
    assert rollout.batch is None
    rollout.end("p0")
    assert rollout.batch == ("p0",)


def test_a_sample_that_ends_while_its_abort_is_under_way_is_kept_for_the_next_step():
    rollout = started(rate=0.5, wanted=2)
    rollout.end("p1")
    rollout.end("p2")
    rollout.end("p0", 30)
    assert set(rollout.batch) == {"p1", "p2"}
    rollout.begin(2)
    assert "p0" not in rollout.launched_in_step
    rollout.end("p3")
    rollout.cut_all_aborted()
    assert set(rollout.batch) == {"p0", "p3"}


def test_a_failed_sample_starts_again_until_its_group_failed_too_often():
    rollout = started(rate=0.0, wanted=1, max_failures=1)
    rollout.fail("p0")
    assert rollout.running == {("p0", 0): 0}
    rollout.fail("p0")
    assert rollout.dropped == ["p0"]
    assert list(rollout.running) == [("p1", 0)], "another prompt fills the batch"


def test_a_sample_aborted_by_someone_else_goes_on():
    rollout = started(rate=0.0, wanted=1)
    rollout.cut("p0", 6)
    assert rollout.running == {("p0", 0): 6}


def test_the_last_step_of_the_data_is_short():
    rollout = Rollout(Oversampler(1, rate=0.5), prompts=3)
    rollout.begin(4)
    for name in ("p0", "p1", "p2"):
        rollout.end(name)
    assert set(rollout.batch) == {"p0", "p1", "p2"}


def test_length_bias_says_that_the_batch_leans_short():
    rollout = started(rate=0.5, wanted=2)
    rollout.end("p1", 10)
    rollout.end("p2", 20)
    rollout.cut("p0", 60)
    figures = rollout.core.metrics.as_dict()
    assert (figures["length_bias"], figures["aborted_ratio"]) == (pytest.approx(0.25), pytest.approx(1 / 3))


def test_a_step_does_not_begin_in_a_step():
    with pytest.raises(RuntimeError, match="step is running"):
        started().core.begin(1)


@settings(max_examples=examples(60), stateful_step_count=60, suppress_health_check=list(HealthCheck))
class NothingIsLost(RuleBasedStateMachine):
    """Ends, aborts, failures, late reports and resumes in any order."""

    @initialize(
        rate=st.sampled_from([0.0, 0.3, 1.5]), max_cuts=st.integers(0, 2), samples=st.integers(1, 3), prompts=st.integers(0, 30)
    )  # fmt: skip
    def create(self, rate, max_cuts, samples, prompts):
        self.machine = lambda: Oversampler(samples, rate, max_cuts, max_failures=1)
        self.samples, self.max_cuts = samples, max_cuts
        self.rollout = Rollout(self.machine(), prompts)
        self.trained: list[str] = []
        self.wanted = 0
        self.counted: tuple[str, ...] | None = None

    @precondition(lambda self: not self.rollout.core._in_step)
    @rule(wanted=st.integers(0, 4))
    def begin(self, wanted):
        self.wanted = wanted
        left_over = [g.name for g in self.rollout.core._groups.values()]
        first_new = self.rollout.drawn
        self.rollout.begin(wanted)
        self._note_batch()
        launched = list(dict.fromkeys(self.rollout.launched_in_step))
        old = [name for name in launched if name in left_over]
        assert launched[: len(old)] == old, "left-over groups start before new ones"
        assert all(int(name[1:]) >= first_new for name in launched[len(old) :])

    @precondition(lambda self: self.rollout.running)
    @rule(data=st.data(), how=st.sampled_from(["end", "cut", "fail"]))
    def report(self, data, how):
        group, sample = data.draw(st.sampled_from(sorted(self.rollout.running)))
        if how == "fail":
            self.rollout.fail(group, sample)
        else:
            tokens = self.rollout.running[group, sample] + data.draw(st.integers(0, 9))
            getattr(self.rollout, how)(group, tokens, sample)
        self._note_batch()

    @rule(name=st.integers(0, 30), sample=st.integers(0, 2))
    def late_report(self, name, sample):
        if (f"p{name}", sample) not in self.rollout.running and sample < self.samples:
            assert self.rollout.core.report(Report("done", f"p{name}", sample, 3, 3, 0, "eos")) == []

    @rule()
    def resume(self):
        fresh = Rollout(self.machine(), self.rollout.left)
        fresh.core.restore(self.rollout.core.to_dict())
        fresh.drawn, fresh.dropped = self.rollout.drawn, self.rollout.dropped
        self.rollout = fresh

    def _note_batch(self):
        if self.rollout.batch is not None:
            assert len(self.rollout.batch) <= self.wanted
            assert len(self.rollout.batch) == self.wanted or self.rollout.left == 0
            self.trained += self.rollout.batch
            self.rollout.batch = None

    @invariant()
    def every_prompt_is_somewhere_once(self):
        known = [*self.rollout.core._groups, *self.trained, *self.rollout.dropped]
        assert len(known) == len(set(known)) == self.rollout.drawn

    @invariant()
    def a_step_under_way_can_end(self):
        core = self.rollout.core
        assert not core._in_step or self.rollout.running, "a step waits for nothing"

    @invariant()
    def protected_groups_are_cut_only_when_they_fail(self):
        for name, _ in self.rollout.aborted:
            group = self.rollout.core._groups[name]
            assert group.cuts < self.max_cuts or group.failures > 1


TestNothingIsLost = NothingIsLost.TestCase


# ---------------------------------------------------------------- the limit of lag

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
    assert LagLimit(most).must_train(ages, WANTED) == count


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


def over(strategy, most) -> Steps:
    return Steps(Oversampler(1, rate=1.0, max_cuts=99, lag=LagLimit(most, strategy)), most)


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
    it = Steps(Oversampler(1, rate=1.5, max_cuts=1), most=10**6)
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
        limits, lag = SegmentLimits(4, 4, 16), LagLimit(most, strategy)
        self.machine = lambda: (
            Oversampler(samples, rate, max_cuts, lag, max_failures=1)
            if kind == "oversample"
            else SegmentSteps(limits, samples, rate, lag, max_failures=1)
        )
        self.steps = Steps(self.machine(), most, samples)

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
        saved = json.loads(json.dumps(self.steps.machine.to_dict()))
        self.steps.machine = self.machine()
        self.steps.machine.restore(saved)

    @invariant()
    def nobody_is_in_two_places(self):
        known = [*self.steps.trained, *self.steps.dropped]
        assert len(known) == len(set(known))
        assert not self.steps.in_step or self.steps.running, "a step waits for nothing"


TestLimitIsKept = LimitIsKept.TestCase
