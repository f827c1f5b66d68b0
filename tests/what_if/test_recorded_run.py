"""The recorded run: the order of its prompts, and what is known of lengths before they are drawn."""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice

import pytest
from scipy.stats import kendalltau

from verl_mux.rollout.lengths.predictors import LengthRow
from verl_mux.what_if.advice import _limits
from verl_mux.what_if.recorded_run import Foresight, Group, Recording, Rounds, Sample, in_order, resampled

CHANCE = random.Random(2)
GROUPS = [Group(f"g{at}", 0, (Sample(int(CHANCE.lognormvariate(5, 1)) + 1, 0, 0.0, None),), str(at)) for at in range(800)]
TRUE = [group.samples[0].tokens for group in GROUPS]


@pytest.mark.parametrize("tau", [0.3, 0.5, 0.8])
def test_a_guess_agrees_with_the_lengths_as_well_as_it_is_taken_to(tau):
    foresight = Foresight(None, 0, tau)
    prompts = [foresight.prompt(group.name, group) for group in GROUPS]
    scores = foresight.predictor().predict(prompts)
    assert kendalltau(scores, TRUE).statistic == pytest.approx(tau, abs=0.05)
    assert list(foresight.predictor().predict(prompts)) == list(scores)


def test_what_learns_knows_nothing_before_a_prompt_was_trained_and_its_own_lengths_after():
    foresight = Foresight("default", 0)
    predictor = foresight.predictor()
    prompts = [foresight.prompt(group.name, group) for group in GROUPS]
    assert set(predictor.predict(prompts)) == {0.0}
    predictor.observe([LengthRow(prompt, 1, length) for prompt, length in zip(prompts, TRUE, strict=True)])
    again = [foresight.prompt(f"{group.name} again", group) for group in GROUPS]
    assert kendalltau(predictor.predict(again), TRUE).statistic > 0.95


PROMPTS, EPOCHS, BATCH = 24, 3, 4


def _recording(named: bool) -> Recording:
    """Every sixth prompt is ten times as long, in each epoch."""
    groups = []
    for at in range(PROMPTS * EPOCHS):
        number = at % PROMPTS
        sample = Sample(1000 + at if number % 6 == 0 else 100 + at, 0, 0.0, None)
        groups.append(Group(f"g{at}", at // BATCH, (sample, sample), str(number) if named else None))
    return Recording("a", {}, tuple(groups), (), replicas=1, slots=None, unknown=0)


def test_the_recorded_order_comes_first():
    recording = _recording(named=True)
    assert tuple(islice(in_order(recording, 0), PROMPTS * EPOCHS)) == recording.groups


def test_a_step_that_is_drawn_by_chance_stays_together():
    drawn = list(islice(resampled(_recording(named=False), 1), 5 * BATCH))
    assert all(len({group.step for group in drawn[at : at + BATCH]}) == 1 for at in range(0, 5 * BATCH, BATCH))


def test_a_prompt_that_recurs_is_drawn_with_all_its_epochs_and_is_never_known_beforehand():
    drawn = list(islice(resampled(_recording(named=True), 1), 4 * PROMPTS * EPOCHS))
    assert max(Counter(group.prompt for group in drawn).values()) == EPOCHS
    assert max(Counter((group.prompt, group.name) for group in drawn).values()) == 1


def test_tail_rounds_gather_the_long_prompts_once_earlier_epochs_have_told_them():
    recording = _recording(named=True)
    foresight = Foresight("default", 0)
    rounds = Rounds(iter((*recording.groups, recording.groups[0])), BATCH, 2, foresight, PROMPTS, max_mean=9.0)
    long, seen = [], []
    for _ in range(PROMPTS * EPOCHS // BATCH):
        drawn = rounds.draw(BATCH)
        seen += [group.name for _, group in drawn]
        long.append(sum(group.samples[0].tokens >= 1000 for _, group in drawn))
        rounds.trained({name: [sample.tokens for sample in group.samples] for name, group in drawn})
    assert Counter(seen) == Counter(group.name for group in recording.groups)
    steps = PROMPTS // BATCH
    assert sorted(long[:steps]) == [0, 0, 1, 1, 1, 1]  # as they came
    assert sorted(long[steps : 2 * steps]) == sorted(long[2 * steps :]) == [0, 0, 0, 0, 0, 4]


def _scored(*rows):
    """rows: tokens and score of a response."""
    groups = tuple(Group(f"g{at}", 0, (Sample(tokens, 0, 0.0, score),)) for at, (tokens, score) in enumerate(rows))
    return Recording("a", {}, groups, (), replicas=1, slots=None, unknown=0)


@pytest.mark.parametrize(
    ("rows", "limits"),
    [
        ([(300, 1.0)] * 90 + [(1000, 0.0)] * 10, [320, 384]),  # a tail that earns nothing
        ([(300, -1.0)] * 90 + [(1000, -1.0)] * 10, [320, 384]),  # equal rewards put nothing at stake
        ([(300, 0.0)] * 90 + [(1000, 1.0)] * 10, []),  # a tail that earns it all
        ([(300, -1.0)] * 50 + [(1000, -0.5)] * 50, []),  # rewards count from the worst
        ([(100, None)], []),
    ],
)
def test_limits_are_tried_beyond_which_next_to_no_reward_lies(rows, limits):
    assert _limits(_scored(*rows)) == limits
