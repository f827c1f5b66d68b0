"""Tail rounds: which prompts share a step; and that each is handed out once, whatever happens in between."""

from __future__ import annotations

import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.exploring import examples
from verl_mux.rollout.control.length_estimates import Expected, LengthEstimates
from verl_mux.rollout.control.tail_rounds import DeferPolicy, TailRounds, plan
from verl_mux.rollout.lengths.baselines import Fifo
from verl_mux.rollout.lengths.rows import Prompt


def sure(*lengths: float) -> Expected:
    mean = np.array(lengths, dtype=np.float64)
    return Expected(mean, np.zeros(len(mean)), mean)


def test_the_long_prompts_share_a_round():
    rounds = plan(sure(9, 1, 1, 9, 1, 1, 1, 1), batch=2, most=9)
    assert sorted(rounds) == [[0, 3], [1, 2], [4, 5], [6, 7]]


def test_a_round_that_would_be_too_long_is_filled_up_with_the_shortest():
    rounds = plan(sure(9, 1, 1, 9, 2, 2, 2, 2), batch=2, most=5)
    assert sorted(rounds) == [[0, 2], [1, 3], [4, 5], [6, 7]]


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


@given(
    st.lists(st.tuples(st.floats(0, 1e5), st.floats(0, 1e8)), max_size=60), st.integers(1, 9), st.floats(1.1, 4)
)  # fmt: skip
def test_every_prompt_is_in_one_round_and_only_the_last_is_not_full(groups, batch, factor):
    mean, variance = (np.array([g[at] for g in groups], dtype=np.float64) for at in (0, 1))
    most = factor * float(mean.mean() if len(mean) else 1.0)
    rounds = plan(Expected(mean, variance, mean), batch, most)
    assert sorted(at for its in rounds for at in its) == list(range(len(groups)))
    assert all(len(its) == batch for its in rounds[:-1])
    if len(set(mean.tolist())) > 1:
        for its in rounds[:-1]:
            shortest = np.sort(mean)[: batch - 1].sum()
            assert (
                mean[its].mean() <= max(most, (mean[its].max() + shortest) / batch + mean[its].min()) + 1e-6
                or mean[its].max() > most
            )


def test_what_earlier_epochs_taught_decides_and_the_bound_is_of_the_whole_window():
    rounds = TailRounds(DeferPolicy(), 2, LengthEstimates(Fifo(), 2))
    names = [f"p{at}" for at in range(8)]
    long = {"p1", "p6"}
    for epoch in (0, 1):
        rounds.gather([f"{n}@{epoch}" for n in names], [Prompt(n, n) for n in names])
        steps = [rounds.take(2) for _ in range(4)]
        if epoch == 0:
            assert steps == [[f"p{at}@0", f"p{at + 1}@0"] for at in (0, 2, 4, 6)]
        else:
            assert ["p1@1", "p6@1"] in steps
        for name in [name for step in steps for name in step]:
            rounds.trained(name, epoch, [30, 30] if name.split("@")[0] in long else [10, 10])


class Windows(RuleBasedStateMachine):
    """Windows, rounds, groups replaced one by one, groups lost, and a resume from what a checkpoint keeps."""

    @initialize(batch=st.integers(1, 5))
    def begin(self, batch):
        self.batch, self.drawn, self.handed_out, self.under_way = batch, 0, [], []
        self.prompts = {}
        self.estimates = LengthEstimates(Fifo(), 2)
        self.rounds = TailRounds(DeferPolicy(), batch, self.estimates)

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
    @rule(lengths=st.lists(st.integers(0, 10_000), max_size=2))
    def train(self, lengths):
        self.rounds.trained(self.under_way.pop(0), 0, lengths)

    @rule()
    def resume(self):
        saved, known = json.loads(json.dumps([self.rounds.to_dict(), self.estimates.to_dict()]))
        self.estimates = LengthEstimates(Fifo(), 2)
        self.estimates.restore(known)
        self.rounds, self.under_way = TailRounds(DeferPolicy(), self.batch, self.estimates), []
        self.rounds.restore(saved, self.prompts)

    @invariant()
    def nothing_is_lost_or_doubled(self):
        assert len(set(self.handed_out)) == len(self.handed_out)
        assert len(self.handed_out) + self.rounds.left == self.drawn


TestWindows = Windows.TestCase
TestWindows.settings = settings(max_examples=examples(40), stateful_step_count=25)
