"""Reward by step, mode beside mode and seed beside seed."""

import pytest

from bench.rollouts.curves import compare, curves_of, draw
from bench.rollouts.jobs import run_all
from bench.rollouts.modes import Run
from verl_mux.launcher.run_file import JobSpec, RunFile

PLAIN = {1: [0.1, 0.3], 2: [0.3, 0.5]}


def test_a_curve_is_as_far_from_plains_as_its_mean_is_and_seeds_spread_as_far_as_their_outermost():
    found = compare({"plain": PLAIN, "colocate": {1: [0.1, 0.4], 2: [0.4, 0.5]}})
    assert found == {
        "colocate": {"apart": pytest.approx(0.05), "spread": pytest.approx(0.2), "within_spread": True, "equal": 0.5}
    }
    assert not compare({"plain": PLAIN, "colocate": {1: [0.5, 0.8], 2: [0.6, 0.7]}})["colocate"]["within_spread"]


@pytest.mark.parametrize(
    "curves", [{"colocate": PLAIN}, {"plain": PLAIN, "colocate": {1: [0.1, 0.3]}}, {m: {1: [0.1]} for m in "ab"}]
)
def test_without_the_same_seeds_of_plain_nothing_is_compared(curves):
    assert compare(curves) == {}


def test_rewards_are_those_of_training_from_the_first_step_on():
    run = Run("plain", 3, {2: {"critic/score/mean": 0.5}, 1: {"critic/score/mean": 0.25, "val-core/x/reward/mean@4": 1.0}})
    assert curves_of([run]) == {"plain": {3: [0.25, 0.5]}}


def test_they_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    draw({"plain": PLAIN, "colocate": PLAIN}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 0


def test_runs_that_are_kept_are_read_and_not_run_again(tmp_path):
    """None could be started: the run file names no model."""
    pytest.importorskip("verl")
    for seed in (1, 2):
        log = tmp_path / f"plain_{seed}" / "job.log"
        log.parent.mkdir()
        log.write_text("".join(f"step:{step} - critic/score/mean:0.{seed}{step} - timing_s/step:1\n" for step in (1, 2)))
    spec = JobSpec(nodes={"rollout": ["r0"], "train": ["t0"]}, overrides=["data.max_response_length=8"])
    run = RunFile(dir=str(tmp_path), coordinator={}, jobs={"math": spec})
    runs = run_all(run, ["plain"], steps=2, seeds=range(1, 3), rate=0.5, more=[], keep=True)
    assert curves_of(runs) == {"plain": {1: [0.11, 0.12], 2: [0.21, 0.22]}}


@pytest.mark.parametrize(
    ("path", "words"), [("curves.jpg", "a name that ends in .png"), ("file/curves.png", "cannot make its folder")]
)
def test_where_no_picture_can_be_drawn_nothing_is_run(run_main, tmp_path, path, words):
    pytest.importorskip("matplotlib")
    (tmp_path / "file").touch()
    code, out, err = run_main("bench", "rollout", "--dir", tmp_path / "runs", "--plot", tmp_path / path)
    assert (code, out) == (2, "") and words in err and not (tmp_path / "runs").exists()
