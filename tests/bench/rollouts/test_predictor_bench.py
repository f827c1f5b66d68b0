"""`verl-mux bench predictor` on real files, as a command."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from bench.rollouts.predictor import read_rows
from tests.rollout.lengths.length_generators import generate
from verl_mux.errors import UserError

REQUIRED = {"kendall_tau", "kendall_tau_by_epoch", "sjf_mean_completion_ratio", "ljf_makespan_ratio"}
FAST = ["--predictor", "fifo", "--predictor", "oracle", "--predictor", "history", "--predictor", "default"]


@pytest.fixture
def bench(run_main) -> Callable[..., tuple[int, str, str]]:
    return partial(run_main, "bench", "predictor")


def lines(tmp_path: Path, *rows: object) -> str:
    file = tmp_path / f"lengths{len(list(tmp_path.iterdir()))}.jsonl"
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return str(file)


def as_rows(epochs) -> list[dict]:
    return [{"id": r.prompt.id, "prompt": r.prompt.text, "epoch": r.epoch, "length": r.length} for e in epochs for r in e]


def test_prints_one_json_object_with_every_figure(bench, tmp_path):
    code, out, err = bench(lines(tmp_path, *as_rows(generate("keyword", 1, prompts=120, epochs=3))), "--json")
    assert code == 0, err
    results = json.loads(out)
    assert {"fifo", "oracle", "history", "default", "heuristic"} <= set(results)
    for name, figures in results.items():
        assert set(figures) >= REQUIRED, name
        assert len(figures["kendall_tau_by_epoch"]) == 3
        assert figures["kendall_tau"] == figures["kendall_tau_by_epoch"][-1]
    assert results["fifo"]["sjf_mean_completion_ratio"] == results["fifo"]["ljf_makespan_ratio"] == 1
    assert results["oracle"]["kendall_tau"] == 1
    assert results["oracle"]["sjf_mean_completion_ratio"] < results["default"]["sjf_mean_completion_ratio"] < 1


@pytest.mark.parametrize(
    "rows",
    [
        [{"id": 1, "prompt": "a", "epoch": 0, "length": 5}],
        [{"id": i, "prompt": "", "epoch": 0, "length": 0} for i in range(3)],
        [{"id": 1, "prompt": "a", "epoch": e, "length": n} for e in (3, 9) for n in (5, 6, 7)],
        [{"id": "x", "prompt": [{"role": "user", "content": "\u4f60\u597d"}], "epoch": 1, "length": 5.0}, ""],
        [{"id": e, "prompt": "a" * 9, "epoch": e, "length": 5} for e in (2, 1, 0)],
    ],
    ids=["one row", "no tokens", "samples and missing epochs", "messages and a blank line", "epochs out of order"],
)
def test_odd_but_valid_files_are_measured(bench, tmp_path, rows):
    code, out, err = bench(lines(tmp_path, *rows), "--json", *FAST)
    assert code == 0, err
    assert set(json.loads(out)) == {"fifo", "oracle", "history", "default"}


GOOD = {"id": 1, "prompt": "a", "epoch": 0, "length": 5}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "not JSON"),
        ("[1]", "Expected `object`, got `array`"),
        ("[" * 100_000, "Expected `object`, got `array`"),
        ({"id": 1, "prompt": "a", "epoch": 0}, "missing required field `length`"),
        (
            GOOD | {"length": -1},
            'Expected `int` >= 0 - at `$.length`, given {"id": 1, "prompt": "a", "epoch": 0, "length": -1}; a row is',
        ),
        (GOOD | {"length": True}, "Expected `int`, got `bool` - at `$.length`"),
        (GOOD | {"length": 1.5}, '"length": 1.5}; a row is'),
        ('{"id": 1, "prompt": "a", "epoch": 0, "length": 1e400}', "line 2"),
        (GOOD | {"epoch": "first"}, "Expected `int`, got `str` - at `$.epoch`"),
        (GOOD | {"prompt": None}, "Expected `str | array`, got `null` - at `$.prompt`"),
        (GOOD | {"id": None}, "Expected `int | str`, got `null` - at `$.id`"),
    ],
)
def test_a_bad_line_is_refused_by_its_number(tmp_path, row, said):
    with pytest.raises(UserError, match="line 2: ") as error:
        read_rows(Path(lines(tmp_path, GOOD, row)))
    assert said in str(error.value)


def test_bad_input_is_one_line_on_stderr_and_exit_code_2(bench, tmp_path):
    for arguments, said in (
        ([lines(tmp_path, "")], "holds no row"),
        ([str(tmp_path / "none.jsonl")], "cannot read"),
        ([str(tmp_path)], "cannot read"),
        ([lines(tmp_path, GOOD), "--predictor", "bert"], "allowed: fifo, oracle"),
    ):
        code, _, err = bench(*arguments)
        assert code == 2 and said in err and len(err.strip().splitlines()) == 1, err
