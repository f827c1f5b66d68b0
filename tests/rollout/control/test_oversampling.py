"""Over-sampling: which groups are launched, cut off and left over; that no prompt is ever lost; and the limit of lag, by its rule
alone and through both machines, over-sampling and segments."""

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

WANTED = 2


class Steps:
    """Carries a machine's instructions out, with a data set of `prompts`, and knows by itself which step wrote which token.

    most: the limit of lag, asserted of each token that is trained.
    """

    def __init__(self, machine, most=10**6, samples=1, prompts=10_000) -> None:
        self.machine, self.most, self.samples, self.left = machine, most, samples, prompts
        self.step, self.drawn, self.in_step, self.wanted = 0, 0, False, 0
        self.running: dict[tuple[str, int], Launch] = {}
        self.aborted: set[tuple[str, int]] = set()
        self.launched: list[str] = []  # groups, in this step
        self.tokens: dict[tuple[str, int], list[int]] = {}  # step of each token
        self.batch: tuple[str, ...] | None = None
        self.trained: list[str] = []
        self.dropped: list[str] = []

    def begin(self, wanted=WANTED):
        self.step, self.in_step, self.wanted, self.launched, self.batch = self.step + 1, True, wanted, [], None
        self.carry_out(self.machine.begin(wanted))

    def carry_out(self, instructions):
        for it in instructions:
            match it:
                case Draw(count):
                    names = [f"p{self.drawn + at}" for at in range(min(count, self.left))]
                    self.drawn, self.left = self.drawn + len(names), self.left - len(names)
                    self.carry_out(self.machine.drawn(names))
                case Launch(group, sample):
                    assert (group, sample) not in self.running
                    self.running[group, sample] = it
                    self.launched.append(group)
                    self.tokens[group, sample] = self.tokens.get((group, sample), [])[: it.kept]
                case Abort(group, sample):
                    assert (group, sample) in self.running
                    self.aborted.add((group, sample))
                case Drop(group, _):
                    self.dropped.append(group)
                    self.running = {key: launch for key, launch in self.running.items() if key[0] != group}
                case Finish(groups):
                    assert not self.running and len(groups) <= self.wanted
                    assert len(groups) == self.wanted or self.left == 0
                    self.in_step, self.batch = False, groups
                    for group in groups:
                        written = [at for number in range(self.samples) for at in self.tokens[group, number]]
                        assert all(self.step - at <= self.most for at in written), (group, self.step, written)
                    self.trained += groups

    def say(self, key, kind, new, why):
        """The sample reports its end (why: eos | length), its cut (abort) or its failure, after `new` more tokens."""
        launch = self.running.pop(key)
        new = new if launch.budget is None else min(new, launch.budget)
        self.aborted.discard(key)
        self.tokens[key] += [self.step] * new
        total = len(self.tokens[key])
        if kind == "failed":
            del self.tokens[key][launch.kept if launch.budget is not None else 0 :]
        self.carry_out(self.machine.report(Report(kind, *key, new, total, self.step, why)))

    def end(self, group, tokens=10, sample=0):
        """`tokens`, here and below: of the response, with those of earlier steps."""
        self.say((group, sample), "done", tokens - len(self.tokens[group, sample]), "eos")

    def filter(self, group, sample=0):
        """It ends, and with it a group without a signal."""
        assert self.machine.completes(Report("done", group, sample, 0, 0, 0, "eos"))
        self.say((group, sample), "filtered", 3, "eos")

    def cut(self, group, tokens=5, sample=0):
        self.say((group, sample), "paused", tokens - len(self.tokens[group, sample]), "abort")

    def fail(self, group):
        self.say((group, 0), "failed", 0, "failed")

    def cut_all_aborted(self):
        for group, sample in sorted(self.aborted):
            self.cut(group, max(5, len(self.tokens[group, sample])), sample)

    def run(self, pick, last=()):
        """To the step's end: what is aborted is cut off, what else runs ends, `pick` (min: the oldest) first but for `last`."""
        while self.in_step:
            key = next(iter(self.aborted), None) or pick(
                (key for key in self.running if key[0] not in last), key=lambda key: int(key[0][1:])
            )
            self.say(key, *(("paused", 3, "abort") if key in self.aborted else ("done", 3, "eos")))


def started(samples: int = 1, wanted: int = 4, **keys) -> Steps:
    it = Steps(Oversampler(samples, **keys), samples=samples)
    it.begin(wanted)
    return it


@pytest.mark.parametrize(("rate", "wanted", "launched"), [(0.0, 4, 4), (0.5, 4, 6), (0.1, 10, 11), (0.25, 5, 7), (1.0, 3, 6)])
def test_launches_the_ceiling_of_one_plus_rate_times_the_wanted_groups(rate, wanted, launched):
    assert len(started(rate=rate, wanted=wanted).running) == launched


def test_the_rest_is_aborted_when_enough_groups_are_complete():
    it = started(rate=0.5)
    for name in ("p5", "p0", "p1"):
        it.end(name)
    assert not it.aborted
    it.end("p2")
    assert it.aborted == {("p3", 0), ("p4", 0)} and it.batch is None
    it.cut_all_aborted()
    assert set(it.batch) == {"p0", "p1", "p2", "p5"}


def test_left_over_groups_go_first_and_whole_in_the_next_step():
    it = started(samples=2, rate=0.5, wanted=2)
    for name in ("p1", "p2"):
        it.end(name, sample=0)
        it.end(name, sample=1)
    it.cut("p0", 7, 0)
    it.cut("p0", 3, 1)
    assert set(it.batch) == {"p1", "p2"}
    it.begin(2)
    assert it.launched[:2] == ["p0", "p0"]
    assert (it.running["p0", 0].kept, it.running["p0", 1].kept) == (7, 3) and it.machine.metrics.generated_tokens == 0
    it.end("p0", 9, 0)
    assert (it.machine.metrics.generated_tokens, it.machine.metrics.wasted_tokens) == (2, 0)


def test_a_group_cut_off_often_enough_runs_to_its_end_and_the_step_waits_for_it():
    it = started(rate=1.0, wanted=1, max_cuts=2)
    for step in range(2):
        it.end(f"p{step + 1}")
        it.cut_all_aborted()
        it.begin(1)
    assert set(it.running) == {("p0", 0)}, "its seat is the only one: any other group would be cut off at once"
    assert it.batch is None
    it.end("p0")
    assert it.batch == ("p0",)


def test_a_sample_that_ends_while_its_abort_is_under_way_is_kept_for_the_next_step():
    it = started(rate=0.5, wanted=2)
    for name, tokens in (("p1", 10), ("p2", 10), ("p0", 30)):
        it.end(name, tokens)
    assert set(it.batch) == {"p1", "p2"}
    it.begin(2)
    assert "p0" not in it.launched
    it.end("p3")
    it.cut_all_aborted()
    assert set(it.batch) == {"p0", "p3"}


def test_a_failed_sample_starts_again_until_its_group_failed_too_often():
    it = started(rate=0.0, wanted=1)
    it.machine.max_failures = 1
    it.fail("p0")
    assert it.running == {("p0", 0): Launch("p0", 0)}
    it.fail("p0")
    assert it.dropped == ["p0"]
    assert list(it.running) == [("p1", 0)], "another prompt fills the batch"


def test_a_group_without_a_signal_is_given_up_and_one_to_spare_takes_its_place():
    it = started(rate=0.5, wanted=2)
    it.filter("p0")
    assert it.dropped == ["p0"] and set(it.running) == {("p1", 0), ("p2", 0)}
    it.filter("p1")
    assert set(it.running) == {("p2", 0), ("p3", 0), ("p4", 0)}, "one is missing, and half as many again are drawn"
    it.end("p2")
    it.end("p4")
    it.cut_all_aborted()
    assert set(it.batch) == {"p2", "p4"} and it.machine.metrics.wasted_tokens == 6


def test_only_the_end_of_a_groups_last_sample_completes_it():
    it = started(samples=2, wanted=1)
    done = Report("done", "p0", 0, 0, 0, 0, "eos")
    assert not it.machine.completes(done) and not it.machine.completes(done._replace(group="p9"))
    it.end("p0", sample=1)
    assert it.machine.completes(done)


def test_segments_draw_another_group_for_one_without_a_signal():
    it = Steps(SegmentSteps(SegmentLimits(4, 4, 16), 1))
    it.begin()
    it.filter("p0")
    it.end("p1", 4)
    assert it.dropped == ["p0"] and set(it.running) == {("p2", 0)}
    it.end("p2", 4)
    assert set(it.batch) == {"p1", "p2"}


def test_a_sample_that_another_part_aborted_goes_on():
    it = started(rate=0.0, wanted=1)
    it.cut("p0", 6)
    assert it.running == {("p0", 0): Launch("p0", 0, kept=6)}


def test_the_last_step_of_the_data_is_short():
    it = Steps(Oversampler(1, rate=0.5), prompts=3)
    it.begin(4)
    for name in ("p0", "p1", "p2"):
        it.end(name)
    assert set(it.batch) == {"p0", "p1", "p2"}


def test_length_bias_says_that_the_batch_leans_short():
    it = started(rate=0.5, wanted=2)
    it.end("p1", 10)
    it.end("p2", 20)
    it.cut("p0", 60)
    figures = it.machine.metrics.as_dict()
    assert (figures["length_bias"], figures["aborted_ratio"]) == (pytest.approx(0.25), pytest.approx(1 / 3))


def test_a_step_does_not_begin_in_a_step():
    with pytest.raises(RuntimeError, match="step is running"):
        started().machine.begin(1)


def test_protected_groups_without_a_seat_are_not_joined_by_ever_more_new_ones():
    it = Steps(Oversampler(1, rate=1.5, max_cuts=1))
    for _ in range(12):
        it.begin()
        it.run(max)
        assert len(it.machine.to_dict()["groups"]) <= 3


# ---------------------------------------------------------------- the limit of lag


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
def test_this_number_of_the_oldest_has_to_be_trained_now(ages, most, count):
    assert LagLimit(most).must_train(ages, WANTED) == count


def over(strategy, most) -> Steps:
    it = Steps(Oversampler(1, rate=1.0, max_cuts=99, lag=LagLimit(most, strategy)), most)
    it.begin()
    return it


def test_a_group_at_the_limit_has_a_seat_and_the_step_waits_for_it():
    it = over("protect", 1)
    for name in ("p1", "p2"):
        it.end(name)
    for name in ("p0", "p3"):
        it.cut(name)
    it.begin()
    assert set(it.running) == {("p0", 0), ("p3", 0)}, "their tokens are one step old: they are trained now or never"
    it.end("p0")
    assert it.in_step and not it.aborted
    it.end("p3")
    assert set(it.batch) == {"p0", "p3"}


@pytest.mark.parametrize(("strategy", "cut"), [("protect", True), ("wait", False)])
def test_wait_cuts_no_group_off_while_one_at_the_limit_runs_and_protect_does(strategy, cut):
    it = over(strategy, 1)
    it.end("p1")
    it.end("p2")
    it.cut("p0")
    it.cut("p3", 0)  # it never began
    it.begin()
    it.end("p4")  # with p0's seat the batch is full
    assert (("p3", 0) in it.aborted) == cut


def test_no_more_are_begun_than_can_be_trained_in_time():
    assert len(over("drop", 0).running) == WANTED


def test_drop_gives_up_what_is_older():
    it = over("drop", 1)
    it.run(min, last=["p0"])
    for _ in range(2):
        it.begin()
        it.run(min, last=["p0"])
    assert it.dropped == ["p0"]


def by_segments(strategy) -> Steps:
    """A second step that trains two of four; p0's first tokens are of the first step and have to be trained now."""
    it = Steps(SegmentSteps(SegmentLimits(4, 4, 16), 1, rate=1.0, lag=LagLimit(1, strategy)), 1)
    it.begin()
    for name in ("p1", "p2"):
        it.end(name, 2)
    it.cut("p0", 4)
    it.cut("p3", 0)
    assert it.trained == ["p1", "p2"]
    it.begin()
    assert sorted(name for name, _ in it.running) == ["p0", "p3", "p4", "p5"]
    return it


@pytest.mark.parametrize("strategy", ["protect", "wait"])
def test_a_segment_that_fails_is_written_again_where_its_group_has_to_be_trained_now(strategy):
    it = by_segments(strategy)
    it.say(("p0", 0), "failed", 3, "failed")
    it.end("p3", 2)
    it.end("p4", 2)
    it.cut("p5", 2)
    assert it.in_step, "enough are ready, but p0 would be too old in the next step"
    it.end("p0", 7)
    it.cut("p5", 2)
    assert sorted(it.batch) == ["p0", "p3"]


def test_wait_cuts_a_round_of_segments_off_once_the_group_at_the_limit_is_complete():
    it = by_segments("wait")
    it.end("p3", 2)
    it.end("p4", 2)
    assert not it.aborted
    it.end("p0", 7)
    assert it.aborted == {("p5", 0)}


@settings(max_examples=examples(80), stateful_step_count=60, suppress_health_check=list(HealthCheck))
class NothingIsLost(RuleBasedStateMachine):
    """Ends, aborts, failures, late reports and resumes in any order; `Steps` asserts the limit for each trained token."""

    @initialize(
        kind=st.sampled_from(["oversample", "oversample", "segments"]), rate=st.sampled_from([0.0, 0.3, 0.5, 1.5, 2.0]),
        lag=st.none() | st.builds(LagLimit, st.integers(0, 3), st.sampled_from(["protect", "wait", "drop"])),
        max_cuts=st.sampled_from([0, 1, 2, 99]), samples=st.integers(1, 3), prompts=st.sampled_from([0, 7, 30, 10_000]),
    )  # fmt: skip
    def create(self, kind, rate, lag, max_cuts, samples, prompts):
        limits = SegmentLimits(4, 4, 16)

        def fresh():
            over = kind == "oversample"
            made = Oversampler(samples, rate, max_cuts, lag) if over else SegmentSteps(limits, samples, rate, lag)
            made.max_failures = 1
            return made

        self.fresh = fresh
        self.steps = Steps(self.fresh(), 10**6 if lag is None else lag.most, samples, prompts)
        # A left-over group with a limit of lag may be due, and one that is due is not cut off either.
        self.kind, self.max_cuts, self.lag = kind, max_cuts, lag

    @precondition(lambda self: not self.steps.in_step)
    @rule(wanted=st.integers(0, 4))
    def begin(self, wanted):
        old, first_new = set(self.steps.machine._groups), self.steps.drawn
        self.steps.begin(wanted if self.lag is None else WANTED)  # a limit holds for steps of one size
        launched = list(dict.fromkeys(self.steps.launched))
        again = [name in old for name in launched]
        assert again == sorted(again, reverse=True), "left-over groups start before new ones"
        assert all(int(name[1:]) >= first_new for name in launched if name not in old)

    @precondition(lambda self: self.steps.running)
    @rule(data=st.data(), how=st.sampled_from(["end", "cut", "fail", "filter"]))
    def report(self, data, how):
        key = data.draw(st.sampled_from(sorted(self.steps.running)))
        new = data.draw(st.integers(0, 9))
        budget = self.steps.running[key].budget
        if how == "fail":
            self.steps.say(key, "failed", new, "failed")
        elif how == "filter" and self.steps.machine.completes(Report("done", *key, 0, 0, 0, "eos")):
            self.steps.say(key, "filtered", new, "eos")
        elif how in ("end", "filter"):
            self.steps.say(key, "done", new, "eos")
        elif budget is not None and new >= budget:
            self.steps.say(key, "paused", new, "length")
        elif key in self.steps.aborted or self.kind == "oversample":
            self.steps.say(key, "paused", new, "abort")

    @rule(number=st.integers(0, 30), sample=st.integers(0, 2))
    def late_report(self, number, sample):
        key = f"p{number}", sample
        if key not in self.steps.running and sample < self.steps.samples:
            assert self.steps.machine.report(Report("done", *key, 3, 3, 0, "eos")) == []

    @precondition(lambda self: not self.steps.in_step or self.lag is None)  # a step that is done again makes tokens older
    @rule()
    def resume(self):
        self.steps.running, self.steps.aborted, self.steps.in_step = {}, set(), False
        saved = json.loads(json.dumps(self.steps.machine.to_dict()))
        self.steps.machine = self.fresh()
        self.steps.machine.restore(saved)

    @invariant()
    def every_prompt_is_somewhere_once(self):
        known = [*self.steps.machine._groups, *self.steps.trained, *self.steps.dropped]
        assert len(known) == len(set(known)) == self.steps.drawn

    @invariant()
    def a_step_under_way_can_end(self):
        assert not self.steps.in_step or self.steps.running, "a step waits for nothing"

    @invariant()
    def protected_groups_are_cut_only_when_they_fail(self):
        for name, _ in self.steps.aborted if self.kind == "oversample" else ():
            group = self.steps.machine._groups[name]
            assert group.cuts < self.max_cuts or group.failures > 1


TestNothingIsLost = NothingIsLost.TestCase
