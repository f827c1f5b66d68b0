"""What a job would know of lengths beforehand."""

import random

import pytest
from scipy.stats import kendalltau

from verl_mux.rollout.lengths.rows import LengthRow
from verl_mux.what_if.foresight import Foresight
from verl_mux.what_if.recording import Group, Sample

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
