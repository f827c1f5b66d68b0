"""Tail rounds: which prompts share a step; and that each is handed out once, whatever happens in between."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.exploring import examples
from verl_mux.rollout.control.tail_rounds import Expected, LengthEstimates, TailRounds, plan, ranks_of
from verl_mux.rollout.lengths.predictors import Fifo, Prompt


def sure(*lengths: float) -> Expected:
    mean = np.array(lengths, dtype=np.float64)
    return Expected(mean, np.zeros(len(mean)))


def test_the_long_prompts_share_a_round():
    rounds = plan(sure(9, 1, 1, 9, 1, 1, 1, 1), batch=2, most=9)
    assert sorted(rounds) == [[0, 3], [1, 2], [4, 5], [6, 7]]


def test_a_round_that_would_be_too_long_is_filled_up_with_the_shortest():
    rounds = plan(sure(9, 1, 1, 9, 2, 2, 2, 2), batch=2, most=5)
    assert sorted(rounds) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_prompt_that_is_too_long_by_itself_gets_the_shortest_beside_it():
    assert sorted(plan(sure(100, 1, 2, 3), batch=2, most=5)) == [[0, 1], [2, 3]]


def test_doubt_about_lengths_leaves_room_below_the_bound():
    lengths = (6, 1, 1, 6, 2, 2, 2, 2)
    doubtful = sure(*lengths)._replace(variance=np.full(8, 8.0))
    assert [0, 3] in plan(sure(*lengths), batch=2, most=6.5)
    assert [0, 3] not in plan(doubtful, batch=2, most=6.5)


def test_where_nothing_is_known_prompts_keep_their_order():
    assert plan(sure(1, 1, 1, 1, 1), batch=2, most=2) == [[0, 1], [2, 3], [4]]


def test_long_and_short_rounds_alternate():
    rounds = plan(sure(*range(32)), batch=2, most=1000)
    means = [np.mean(its) for its in rounds]
    halves = [np.mean(means[:8]), np.mean(means[8:])]
    assert abs(halves[0] - halves[1]) < 4


def test_what_is_left_of_the_room_takes_the_longest_that_fits():
    # 9 and 4 leave room for 3 beside the shortest; 3 and 2 then need not set the length of a round of their own.
    rounds = plan(sure(9, 4, 3, 2, 1, 1, 1, 1, 1), batch=3, most=16 / 3)
    assert sorted(rounds) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert [0, 3, 4] in plan(sure(9, 8, 8, 4, 1, 1, 1, 1, 1), batch=3, most=14 / 3)


@given(
    st.lists(st.tuples(st.floats(0, 1e5), st.floats(0, 1e8)), max_size=60), st.integers(1, 9), st.floats(1.1, 4)
)  # fmt: skip
def test_every_prompt_is_in_one_round_and_only_the_last_is_not_full(groups, batch, factor):
    mean, variance = (np.array([g[at] for g in groups], dtype=np.float64) for at in (0, 1))
    most = factor * float(mean.mean() if len(mean) else 1.0)
    rounds = plan(Expected(mean, variance), batch, most)
    assert sorted(at for its in rounds for at in its) == list(range(len(groups)))
    assert all(len(its) == batch for its in rounds[:-1])


LENGTHS = st.one_of(st.floats(0, 1e5), st.sampled_from([0.0, 1.0, 7.0]))


@settings(max_examples=examples(300))
@given(st.lists(st.tuples(LENGTHS, st.floats(0, 1e10)), min_size=1, max_size=60), st.integers(1, 9), st.floats(2, 4))
@example([(7.0, 1e4)] * 15 + [(0.0, 1e4)] * 49, 8, 2.0)  # doubt: one long prompt a round leaves long ones to the end
def test_no_round_is_expected_beyond_the_bound_whatever_the_doubt(groups, batch, factor):
    mean, variance = (np.array([g[at] for g in groups], dtype=np.float64) for at in (0, 1))
    most = factor * float(mean.mean())
    for its in plan(Expected(mean, variance), batch, most):
        too_long_by_itself = mean[its].max() > (batch * (factor - 1) + 1) * float(mean.mean()) * (1 - 1e-6)
        assert mean[its].mean() <= most * (1 + 1e-6) or too_long_by_itself


class Said:
    """Estimates that say what they are told to, and learn nothing."""

    def __init__(self, mean, variance) -> None:
        self.said = dict(enumerate(zip(mean, variance, strict=True)))

    def observe(self, prompt, epoch, lengths) -> None:
        """Nothing."""

    def knows(self, prompt) -> bool:
        """Always."""
        return True

    def expect(self, prompts) -> Expected:
        mean, variance = np.array([self.said[int(prompt.id)] for prompt in prompts]).T
        return Expected(mean, variance)


@settings(max_examples=examples(150))
@given(
    st.lists(st.one_of(st.floats(1, 3), st.sampled_from([1.0, 3.0])), min_size=30, max_size=90), st.integers(2, 8), st.data()
)  # fmt: skip
def test_steps_keep_within_the_bound_where_groups_are_lost_and_windows_fill_no_batch(lengths, batch, data):
    rounds, kept = TailRounds(batch, Said(lengths, [0.0] * len(lengths))), []
    half = len(lengths) // 2
    for window in (range(half), range(half, len(lengths))):
        rounds.gather([str(at) for at in window], [Prompt(str(at), "") for at in window])
        step = kept + rounds.take(batch - len(kept))
        while len(step) == batch:
            lost = data.draw(st.integers(0, 1))
            instead = rounds.take(lost)
            rounds.trained({name: [lengths[int(name)]] for name in step[lost:] + instead} | dict.fromkeys(step[:lost], ()), 0)
            if not lost:
                assert rounds.mix.expected <= 2 * (1 + 1e-6)
            step = rounds.take(batch)
        kept = step


def test_a_lost_group_is_replaced_by_the_shortest_and_the_others_get_new_rounds():
    lengths = [9, 9, 9, 9, 1, 1, 1, 1, 1, 1, 1, 2]
    rounds = TailRounds(4, Said(lengths, [0.0] * 12))
    rounds.gather([str(at) for at in range(12)], [Prompt(str(at), "") for at in range(12)])
    first, instead = rounds.take(4), rounds.take(1)
    assert [lengths[int(name)] for name in instead] == [1]
    later = [rounds.take(4), rounds.take(4)]
    assert sorted(sum(lengths[int(name)] for name in its) for its in [first, *later]) == [3, 12, 29]


def test_a_step_tells_its_mix_as_it_was_expected_and_as_it_was():
    rounds = TailRounds(2, Said([8, 8, 2, 2, 2, 2], [0.0] * 6))
    rounds.gather(list("abcdef"), [Prompt(str(at), "") for at in range(6)])
    means = {}
    for drawn in ({"a": [8, 10], "b": [9, 9]}, {}, {}):
        step = rounds.take(2)
        rounds.trained({name: drawn.get(name, [2, 2]) for name in step}, 0)
        means["".join(step)] = rounds.mix
    # Of 4 tokens that the window was expected to have on average, and 26 / 6 that it had.
    assert means["ab"].expected == 2.0
    assert means["ab"].measured == pytest.approx(9 / (26 / 6))
    assert [mix.above for mix in means.values()] == [1, 1, 1]


def test_what_earlier_epochs_taught_decides_and_the_bound_is_of_the_whole_window():
    rounds = TailRounds(2, LengthEstimates(Fifo(), 2))
    names = [f"p{at}" for at in range(8)]
    long = {"p1", "p6"}
    for epoch in (0, 1):
        rounds.gather([f"{n}@{epoch}" for n in names], [Prompt(n, n) for n in names])
        steps = [rounds.take(2) for _ in range(4)]
        if epoch == 0:
            assert steps == [[f"p{at}@0", f"p{at + 1}@0"] for at in (0, 2, 4, 6)]
        else:
            assert ["p1@1", "p6@1"] in steps
        for step in steps:
            rounds.trained({name: [30, 30] if name.split("@")[0] in long else [10, 10] for name in step}, epoch)


class Windows(RuleBasedStateMachine):
    """Windows, rounds, groups replaced one by one, groups lost, and a resume from what a checkpoint keeps."""

    @initialize(batch=st.integers(1, 5))
    def begin(self, batch):
        self.batch, self.drawn, self.handed_out, self.under_way = batch, 0, [], []
        self.prompts = {}
        self.estimates = LengthEstimates(Fifo(), 2)
        self.rounds = TailRounds(batch, self.estimates)

    @rule(count=st.integers(1, 30))
    def gather(self, count):
        names = [str(self.drawn + at) for at in range(count)]
        prompts = [Prompt(str(int(name) % 20), name) for name in names]
        self.drawn += count
        self.prompts |= dict(zip(names, prompts, strict=True))
        self.rounds.gather(names, prompts)

    @rule(count=st.integers(1, 6))
    def take(self, count):
        left = self.rounds.left
        taken = self.rounds.take(count)
        assert len(taken) == min(count, left)
        self.handed_out += taken
        self.under_way += taken

    @precondition(lambda self: self.under_way)
    @rule(lengths=st.lists(st.lists(st.integers(0, 10_000), max_size=2), min_size=1, max_size=5))
    def train(self, lengths):
        step, self.under_way = self.under_way[: len(lengths)], self.under_way[len(lengths) :]
        self.rounds.trained(dict(zip(step, lengths, strict=False)), 0)
        assert self.rounds.mix.measured >= 0 and self.rounds.mix.expected >= 0

    @rule()
    def resume(self):
        saved, known = json.loads(json.dumps([self.rounds.to_dict(), self.estimates.to_dict()]))
        self.estimates = LengthEstimates(Fifo(), 2)
        self.estimates.restore(known)
        self.rounds, self.under_way = TailRounds(self.batch, self.estimates), []
        self.rounds.restore(saved, self.prompts)

    @invariant()
    def nothing_is_lost_or_doubled(self):
        assert len(set(self.handed_out)) == len(self.handed_out)
        assert len(self.handed_out) + self.rounds.left == self.drawn


TestWindows = Windows.TestCase
TestWindows.settings = settings(max_examples=examples(40), stateful_step_count=25)


# ---------------------------------------------------------------- expected lengths in numbers

PROMPTS = [Prompt(str(at), "x" * at) for at in range(200)]


def taught(predictor=None, chance: float = 0.2, seed: int = 0) -> tuple[LengthEstimates, np.ndarray]:
    """Estimates after one epoch of four samples a prompt, and the lengths that each prompt really has."""
    rng = np.random.default_rng(seed)
    own = np.exp(5 + rng.standard_normal(len(PROMPTS)))
    estimates = LengthEstimates(predictor or Fifo(), 4)
    for prompt, mean in zip(PROMPTS, own, strict=True):
        estimates.observe(prompt, 0, (mean * np.exp(chance * rng.standard_normal(4))).astype(int).tolist())
    return estimates, own


def test_nothing_is_known_before_the_first_group():
    expected = LengthEstimates(Fifo(), 4).expect(PROMPTS[:3])
    assert expected.mean.tolist() == [1, 1, 1]


def test_a_prompt_is_expected_to_be_as_long_as_it_was():
    estimates, own = taught()
    assert np.corrcoef(np.log(estimates.expect(PROMPTS).mean), np.log(own))[0, 1] > 0.97


def test_where_chance_rules_prompts_are_expected_to_be_alike():
    rng = np.random.default_rng(0)
    estimates = LengthEstimates(Fifo(), 4)
    for prompt in PROMPTS:
        estimates.observe(prompt, 0, np.exp(5 + rng.standard_normal(4)).astype(int).tolist())
    mean = estimates.expect(PROMPTS).mean
    assert mean.std() < 0.25 * mean.mean()


def test_the_long_ones_are_not_expected_shorter_than_they_are_on_average():
    rng = np.random.default_rng(1)
    estimates, own = taught(chance=0.6)
    expected = estimates.expect(PROMPTS)
    top = np.argsort(-expected.mean)[:40]
    drawn = np.mean([(own[top] * np.exp(0.6 * rng.standard_normal(len(top)))).mean() for _ in range(20)])
    assert expected.mean[top].mean() == pytest.approx(drawn, rel=0.25)


def test_prompts_without_a_past_are_put_where_their_rank_belongs():
    class PromptLength(Fifo):
        def predict(self, prompts):
            return np.array([float(len(prompt.text)) for prompt in prompts])

    estimates = LengthEstimates(PromptLength(), 1)
    for prompt in PROMPTS:
        estimates.observe(prompt, 0, [10 * len(prompt.text) + 10])
    strangers = [Prompt(f"new {at}", "x" * (2 * at)) for at in range(100)]
    mean = estimates.expect(strangers).mean
    assert (np.diff(mean) >= 0).all()
    assert mean[-1] > 5 * mean[0]


def test_ties_share_their_middle():
    assert ranks_of(np.array([5.0, 1.0, 5.0, 9.0])) == pytest.approx([0.5, 0.125, 0.5, 0.875])


def test_estimates_go_through_a_checkpoint():
    estimates, _ = taught()
    again = LengthEstimates(Fifo(), 4)
    again.restore(json.loads(json.dumps(estimates.to_dict())))
    assert again.expect(PROMPTS).mean == pytest.approx(estimates.expect(PROMPTS).mean)
    assert again.knows(PROMPTS[0])
    assert not again.knows(Prompt("other", ""))
