"""Expected lengths in numbers."""

from __future__ import annotations

import json

import numpy as np
import pytest

from verl_mux.rollout.control.length_estimates import LengthEstimates, ranks_of
from verl_mux.rollout.lengths.baselines import Fifo, PromptLength
from verl_mux.rollout.lengths.rows import Prompt

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
