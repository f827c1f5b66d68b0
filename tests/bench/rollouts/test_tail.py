"""`verl-mux bench tail` as a command."""

from __future__ import annotations

import json
import sys

import pytest

from verl_mux import cli

KEYS = {
    "time_ratio_to_sync", "length_ratio", "lag_mean", "lag_max", "stale_token_fraction", "wasted_token_fraction", "prompts_lost",
    "largest_step_mean_ratio", "steps", "steps_above_bound", "steps_above_bound_after_first_epoch",
}  # fmt: skip
MODES = ["sync", "oversample", "oversample_restart", "segments", "defer", "defer_oracle"]


@pytest.fixture
def tail(monkeypatch, capsys):
    """The command, in this process: exit code, stdout, stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["verl-mux", "bench", "tail", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        return (exit_.value.code or 0, *capsys.readouterr())

    return run


@pytest.fixture
def file(tmp_path):
    """Two epochs of sixteen prompts, two samples each, of which two are long."""
    rows = [
        {"id": at, "prompt": f"p {at}", "epoch": epoch, "length": 200 if at % 8 == 0 else 10 + at}
        for epoch in range(2) for at in range(16) for _ in range(2)
    ]  # fmt: skip
    path = tmp_path / "lengths.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_prints_one_json_object_and_the_bed(tail, file):
    code, out, err = tail(file, "--json", "--batch", 4, "--step-ms", 2.5)
    assert code == 0
    found = json.loads(out)
    assert list(found) == ["modes"]
    assert list(found["modes"]) == MODES
    assert all(set(figures) == KEYS for figures in found["modes"].values())
    assert found["modes"]["sync"]["time_ratio_to_sync"] == 1.0
    assert "4 prompt groups a step" in err and "2.5 ms" in err


def test_two_files_are_two_jobs_on_one_pool(tail, file):
    code, out, _ = tail(file, file, "--json", "--mode", "defer_shared", "--batch", 4)
    assert code == 0
    assert list(json.loads(out)["modes"]) == ["sync", "defer_shared"]


def test_without_json_it_is_a_table(tail, file):
    code, out, _ = tail(file, "--mode", "defer", "--mode", "oversample_lag1", "--batch", 4)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["mode", "sync", "defer", "oversample_lag1"]


def test_a_wider_bound_is_counted_by(tail, file):
    arguments = (file, "--json", "--mode", "sync", "--batch", 1, "--max-mean")
    narrow, wide = (json.loads(tail(*arguments, bound)[1])["modes"]["sync"] for bound in (2, 9))
    assert narrow["steps_above_bound"] == 12 and wide["steps_above_bound"] == 0
    assert narrow["steps"] == wide["steps"] == 96


def test_bad_input_is_one_line_and_exit_code_2(tail, file, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{")
    for arguments, said in (
        ([bad], "line 1: not JSON"),
        ([tmp_path / "none"], "cannot read"),
        ([file, "--mode", "magic"], "--mode magic: not a mode this can replay; allowed: sync, oversample"),
        ([file, "--step-ms", 0, "--request-ms", 0], "are both 0"),
        ([file, "--predictor", "bert"], "unknown length predictor 'bert'"),
    ):
        code, _, err = tail(*arguments)
        assert code == 2, err
        assert said in err
        assert len([line for line in err.strip().splitlines() if not line.startswith("bed:")]) == 1
