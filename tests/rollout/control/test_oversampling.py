"""Over-sampling: which groups are launched, cut off and left over; and that no prompt is ever lost."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.exploring import examples
from verl_mux.rollout.control.oversampling import Oversampler, OversamplingPolicy, State
from verl_mux.rollout.messages import Abort, Draw, Drop, Finish, Launch


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
        self._gone(group, sample)
        self.carry_out(self.core.sample_done(group, sample, tokens))

    def cut(self, group: str, tokens: int = 5, sample: int = 0) -> None:
        self._gone(group, sample)
        self.carry_out(self.core.sample_cut(group, sample, tokens))

    def fail(self, group: str, sample: int = 0) -> None:
        self._gone(group, sample)
        self.carry_out(self.core.sample_failed(group, sample))

    def cut_all_aborted(self) -> None:
        for group, sample in sorted(self.aborted):
            self.cut(group, 5, sample)

    def _gone(self, group: str, sample: int) -> None:
        del self.running[group, sample]
        self.aborted.discard((group, sample))


def started(samples: int = 1, wanted: int = 4, **policy) -> Rollout:
    rollout = Rollout(Oversampler(OversamplingPolicy(**policy), samples))
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


def test_restarted_groups_begin_at_their_prompt_and_their_tokens_are_wasted():
    rollout = started(rate=0.5, wanted=2, tokens="restart")
    rollout.end("p1", 10)
    rollout.end("p2", 10)
    rollout.cut("p0", 7)
    assert rollout.core.metrics.wasted_tokens == 7
    assert rollout.core.metrics.wasted_token_fraction == pytest.approx(7 / 27)
    rollout.begin(2)
    assert rollout.running["p0", 0] == 0


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


def test_dropped_groups_are_padding_and_do_not_come_back():
    rollout = started(rate=0.5, wanted=2, leftover="drop")
    rollout.end("p1")
    rollout.end("p2")
    rollout.cut("p0", 7)
    assert rollout.dropped == ["p0"]
    assert len(rollout.dropped) == 1
    rollout.begin(2)
    assert "p0" not in rollout.launched_in_step


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
    rollout = Rollout(Oversampler(OversamplingPolicy(rate=0.5), 1), prompts=3)
    rollout.begin(4)
    for name in ("p0", "p1", "p2"):
        rollout.end(name)
    assert set(rollout.batch) == {"p0", "p1", "p2"}


def test_without_a_rate_what_is_wanted_is_launched_and_nothing_cut():
    rollout = Rollout(Oversampler(OversamplingPolicy(rate=0.0), 1))
    rollout.begin(5)
    assert len(rollout.running) == 5
    for name, _ in list(rollout.running):
        rollout.end(name)
    assert len(rollout.batch) == 5


def test_length_bias_says_that_the_batch_leans_short():
    rollout = started(rate=0.5, wanted=2)
    rollout.end("p1", 10)
    rollout.end("p2", 20)
    rollout.cut("p0", 60)
    assert rollout.core.metrics.length_bias == pytest.approx(0.25)
    assert rollout.core.metrics.as_dict()["aborted_ratio"] == pytest.approx(1 / 3)


def test_a_step_does_not_begin_in_a_step():
    with pytest.raises(RuntimeError, match="step is running"):
        started().core.begin(1)


@settings(max_examples=examples(60), stateful_step_count=60, suppress_health_check=list(HealthCheck))
class NothingIsLost(RuleBasedStateMachine):
    """Ends, aborts, failures, late reports and resumes in any order."""

    @initialize(
        rate=st.sampled_from([0.0, 0.3, 1.5]),
        leftover=st.sampled_from(["requeue", "drop"]),
        tokens=st.sampled_from(["resume", "restart"]),
        max_cuts=st.integers(0, 2),
        samples=st.integers(1, 3),
        prompts=st.integers(0, 30),
    )
    def create(self, rate, leftover, tokens, max_cuts, samples, prompts):
        self.policy = OversamplingPolicy(rate=rate, leftover=leftover, tokens=tokens, max_cuts=max_cuts, max_failures=1)
        self.samples = samples
        self.rollout = Rollout(Oversampler(self.policy, samples), prompts)
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
            assert self.rollout.core.sample_done(f"p{name}", sample, 3) == []

    @rule()
    def resume(self):
        saved = self.rollout.core.to_dict()
        fresh = Rollout(Oversampler.from_dict(self.policy, self.samples, saved), self.rollout.left)
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
        assert not any(group.state in (State.TRAINED, State.DROPPED) for group in self.rollout.core._groups.values())

    @invariant()
    def a_step_under_way_can_end(self):
        core = self.rollout.core
        assert not core._in_step or self.rollout.running, "a step waits for nothing"

    @invariant()
    def protected_groups_are_cut_only_when_they_fail(self):
        for name, _ in self.rollout.aborted:
            group = self.rollout.core._groups[name]
            assert group.cuts < self.policy.max_cuts or group.failures > self.policy.max_failures


TestNothingIsLost = NothingIsLost.TestCase
