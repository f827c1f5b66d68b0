"""The figures of `verl-mux bench rollout` from what jobs wrote."""

from __future__ import annotations

from collections import Counter

import pytest

from bench.rollouts.modes import EPOCH_STEPS, GROUPS, MODES, SAMPLES, Run, figures, overrides, read_run


def made_run(mode, seed, step_s, reward, **rollout) -> Run:
    metrics = {
        step: {
            "timing_s/gen": step_s / 2,
            "timing_s/step": step_s if step > 1 else 9.0,
            "critic/score/mean": 0.1 * step,
            **{f"mux/rollout/{k}": v for k, v in rollout.items()},
        }
        for step in range(1, 5)
    }
    metrics[4]["val-core/sums/reward/mean@4"] = reward
    return Run(mode, seed, metrics)


def test_ratios_are_taken_seed_by_seed_and_the_warm_up_is_left_out():
    runs = [made_run("sync", 1, 2.0, 0.50), made_run("sync", 2, 4.0, 0.54)]
    runs += [made_run("oversample", 1, 1.0, 0.49, generated_tokens=100, wasted_tokens=10),
             made_run("oversample", 2, 3.0, 0.51, generated_tokens=100, wasted_tokens=10)]  # fmt: skip
    modes = figures(runs, warmup=1)["modes"]
    assert modes["sync"]["time_ratio_to_sync"] == 1.0
    assert modes["oversample"]["time_ratio_to_sync_by_seed"] == [0.5, 0.75]
    assert modes["oversample"]["wasted_token_fraction"] == pytest.approx(0.1)
    assert modes["sync"]["reward_spread"] == pytest.approx(0.04)
    assert modes["oversample"]["reward_minus_sync"] == pytest.approx(-0.02)
    assert modes["oversample"]["reward_within_spread"]


def test_a_run_is_read_from_its_console(tmp_path):
    (tmp_path / "job.log").write_text(
        "(TaskRunner pid=1) step:2 - critic/score/mean:0.25 - mux/rollout/wasted_tokens:12 - "
        "val-core/a/b/reward/mean@4:np.float64(0.5) - timing_s/gen:1e-1\n"
    )
    run = read_run("sync", 1, tmp_path)
    assert run.metrics[2] == {
        "critic/score/mean": 0.25, "mux/rollout/wasted_tokens": 12.0, "val-core/a/b/reward/mean@4": 0.5, "timing_s/gen": 0.1,
    }  # fmt: skip


def test_four_segments_span_the_longest_response():
    assert "mux.rollout.segments.segment_length=64" in overrides("segments", 1.0, 256)
    assert "mux.rollout.segments.segment_length=50" in overrides("segments", 1.0, 197)
    assert overrides("oversample", 0.5, 256)[0] == "mux.rollout.oversample.rate=0.5"
    assert all(overrides(mode, 0.5, 256) is not None for mode in MODES)


def made_epochs(mode, seed, step_s, length=100.0, prompts=range(EPOCH_STEPS * GROUPS)) -> Run:
    """Two epochs, with the prompts of each in the order given."""
    steps = [list(prompts)[at : at + GROUPS] for at in range(0, EPOCH_STEPS * GROUPS, GROUPS)] * 2
    metrics = {at: {"timing_s/step": step_s, "timing_s/gen": 1.0, "response_length/mean": length} for at in range(1, 13)}
    return Run(mode, seed, metrics, {at: Counter(dict.fromkeys(map(str, step), SAMPLES)) for at, step in enumerate(steps, 1)})


def test_a_mode_stands_beside_the_bases_that_had_its_data():
    runs = [made_run("sync", 1, 1.0, 0.5), made_run("plain", 1, 1.0, 0.5)]
    runs += [made_epochs("sync_epochs", 1, 4.0), made_epochs("plain_epochs", 1, 2.0), made_epochs("defer", 1, 1.0)]
    defer = figures(runs, warmup=1)["modes"]["defer"]
    assert (defer["time_ratio_to_sync"], defer["time_ratio_to_plain"]) == (0.25, 0.5)


def test_an_epoch_trains_each_of_its_prompts_once():
    base = made_epochs("plain_epochs", 1, 2.0)
    shuffled = made_epochs("defer", 1, 1.0, length=101.0, prompts=[*reversed(range(EPOCH_STEPS * GROUPS))])
    modes = figures([base, shuffled], warmup=1)["modes"]
    assert modes["defer"]["length_ratio_by_epoch"] == pytest.approx([1.01, 1.01])
    assert (modes["defer"]["prompts_lost"], modes["defer"]["prompts_doubled"]) == (0, 0)
    twice = made_epochs("defer", 1, 1.0)
    twice.trained[1]["0"] += twice.trained[2].pop("9")
    modes = figures([base, twice], warmup=1)["modes"]
    assert (modes["defer"]["prompts_lost"], modes["defer"]["prompts_doubled"]) == (1, 1)
