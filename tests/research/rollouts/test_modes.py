"""Recorded lengths through the modes of rollout control."""

from __future__ import annotations

import numpy as np
import pytest

from research.rollouts.bed import Bed
from research.rollouts.modes import DEFAULT_MODES, LAGS, MODES, Setting, measure
from research.rollouts.recorded import recording
from verl_mux.rollout.lengths.rows import LengthRow, Prompt

BED = Bed(batch=8, slots=64, step_s=4e-3, request_s=1e-4, prefill_s=2e-5, train_token_s=3e-4, switch_s=0.02)
SETTING = Setting(BED, predictor="history_mean", orders=1)


def long_tailed(prompts: int = 96, epochs: int = 4, samples: int = 4, seed: int = 0) -> list[LengthRow]:
    """One prompt in eight is long, and stays so; a prompt's responses differ by a twentieth."""
    rng = np.random.default_rng(seed)
    own = np.where(np.arange(prompts) % 8 == 3, rng.uniform(250, 350, prompts), 14 + 7 * rng.geometric(0.25, prompts))
    return [
        LengthRow(Prompt(str(at), f"prompt {at}"), epoch, int(own[at] * np.exp(0.05 * rng.standard_normal())))
        for epoch in range(epochs)
        for at in range(prompts)
        for _ in range(samples)
    ]


@pytest.fixture(scope="module")
def results():
    rows = long_tailed()
    return measure([rows, long_tailed(seed=1)], DEFAULT_MODES, SETTING)


def test_every_mode_is_measured(results):
    assert set(results) == set(DEFAULT_MODES)


def test_on_policy_modes_have_no_lag_and_lose_no_prompt(results):
    for mode in ("sync", "defer", "defer_oracle", "defer_shared"):
        it = results[mode]
        assert (it.lag_max, it.stale_token_fraction, it.wasted_token_fraction, it.prompts_lost) == (0, 0.0, 0.0, 0), mode
        assert it.length_ratio == pytest.approx(1.0, abs=1e-9), mode


def test_deferring_shortens_the_rollouts_of_a_long_tailed_job(results):
    base = results["sync"].seconds
    assert results["defer_oracle"].seconds < 0.75 * base
    assert results["defer"].seconds <= max(0.8 * base, base - 0.6 * (base - results["defer_oracle"].seconds))


def test_once_prompts_are_known_no_step_is_beyond_the_bound(results):
    assert results["defer"].steps_above_later == results["defer_oracle"].steps_above == 0
    assert results["defer"].steps == results["sync"].steps
    # Of a first epoch nobody knows anything: its steps are as they come.
    assert results["defer"].steps_above <= results["sync"].steps_above


def test_two_jobs_that_share_a_pool_end_sooner_than_in_turns(results):
    assert results["defer_shared"].seconds <= 0.75 * results["sync"].seconds


def test_cutting_the_tail_off_trains_older_tokens_and_restarting_wastes(results):
    assert results["oversample"].lag_mean > 1
    assert results["oversample"].lag_max <= 8
    assert results["segments"].stale_token_fraction > 0.3
    assert results["oversample_restart"].wasted_token_fraction > 0.2
    assert results["oversample_restart"].lag_max == 0
    assert all(results[mode].prompts_lost == 0 for mode in MODES if mode in results)


def test_a_limit_of_lag_is_kept_and_costs_time():
    rows = long_tailed(epochs=2)
    modes = [f"{kind}_lag{most}" for kind in ("oversample", "segments") for most in LAGS]
    found = measure([rows], modes, SETTING)
    for kind in ("oversample", "segments"):
        assert all(found[f"{kind}_lag{most}"].lag_max <= most for most in LAGS)
        assert all(found[f"{kind}_lag{most}"].prompts_lost == 0 for most in LAGS)
        assert found[f"{kind}_lag0"].stale_token_fraction == 0
        assert found[f"{kind}_lag8"].seconds < found[f"{kind}_lag0"].seconds


def test_restarting_selects_short_responses_where_a_prompts_lengths_differ():
    rng = np.random.default_rng(3)
    rows = [
        LengthRow(Prompt(str(at), ""), epoch, int(rng.integers(10, 30) if rng.random() < 0.75 else 400))
        for epoch in range(3) for at in range(64) for _ in range(4)
    ]  # fmt: skip
    found = measure([rows], ["oversample", "oversample_restart"], SETTING)
    assert found["oversample"].length_ratio == pytest.approx(1.0, abs=0.01)
    assert found["oversample_restart"].length_ratio < 0.9


def test_samples_that_are_missing_and_prompts_that_fill_no_batch_are_taken_as_they_are():
    rows = [LengthRow(Prompt("a", ""), 0, 5), LengthRow(Prompt("b", ""), 0, 7), LengthRow(Prompt("b", ""), 0, 0)]
    assert recording(rows, 0).samples == 2
    found = measure([rows], ["oversample", "segments", "defer", "defer_oracle"], SETTING)
    assert {it.prompts_lost for it in found.values()} == {0}


def test_the_same_lengths_give_the_same_figures(results):
    assert measure([long_tailed(), long_tailed(seed=1)], ["defer"], SETTING)["defer"] == results["defer"]
