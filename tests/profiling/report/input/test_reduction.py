"""Reduction: in pieces or at once, in any order, the tables are the same."""

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from tests.profiling.made_logs import Lines, Made, make_run, read_run
from verl_mux.profiling.report.input import run_log
from verl_mux.profiling.report.input.reduction import make_turns
from verl_mux.profiling.report.measures.analysis import Analysis

NAMES = ["requests", "turns", "totals", "spans"]


def tables(directory):
    made = read_run(directory).tables
    return {name: getattr(made, name) for name in NAMES}


def same(one, other):
    for name in NAMES:
        floats = pl.selectors.float()
        key = [column for column in one[name].columns if one[name].schema[column] not in (pl.List(pl.String),)]
        assert_frame_equal(
            one[name].sort(key).with_columns(floats.round(6)), other[name].sort(key).with_columns(floats.round(6)),
            check_row_order=False, abs_tol=1e-5,
        )  # fmt: skip


def test_small_pieces_give_the_same_tables_as_one(tmp_path, monkeypatch):
    make_run(tmp_path, Made(steps=1, workers=2, requests=8))
    whole = tables(tmp_path)
    monkeypatch.setattr(run_log, "PIECE_BYTES", 3000)
    monkeypatch.setattr(run_log, "PIECE_LINES", 20)
    same(whole, tables(tmp_path))


def test_the_order_of_lines_does_not_matter(tmp_path):
    make_run(tmp_path, Made(steps=1, workers=2, requests=20))
    whole = tables(tmp_path)
    for path in tmp_path.rglob("*.jsonl"):
        path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    same(whole, tables(tmp_path))


def test_two_processes_give_the_same_tables_as_one(tmp_path, monkeypatch):
    make_run(tmp_path, Made(steps=1, workers=2, requests=20))
    monkeypatch.setattr(run_log, "PARALLEL_BYTES", 0)
    parallel = read_run(tmp_path, processes=2).tables
    same({name: getattr(parallel, name) for name in NAMES}, tables(tmp_path))


def test_a_requests_parts_are_summed_and_what_is_left_is_other(tmp_path):
    lines = Lines(3, 1)
    about = {"request_id": "a"}
    lines.add(0.0, "request_start", extra=about)
    lines.add(1.0, "turn_pre_process", 1.0, about | {"turn": 0})
    lines.add(4.0, "turn_engine_call", 3.0, about | {"turn": 0, "generated_tokens": 30})
    lines.add(4.5, "turn_tool_parsing", 0.2, about | {"turn": 0})
    lines.add(4.5, "turn_post_process", 0.5, about | {"turn": 0})
    lines.add(6.5, "tool_execution", 2.0, about | {"turn": 1})
    lines.add(7.5, "reward_calculation", 1.0, about)
    lines.add(10.0, "async_rollout_request_complete", 10.0, about | {"turns": 1})
    lines.write(tmp_path)
    row = Analysis(read_run(tmp_path)).requests.row(0, named=True)
    told = {part: row[part] for part in ("preprocess", "engine", "postprocess", "tool_parse", "tool", "reward")}
    assert told == pytest.approx(
        {"preprocess": 1.0, "engine": 3.0, "postprocess": 0.3, "tool_parse": 0.2, "tool": 2.0, "reward": 1.0}
    )
    assert row["other"] == pytest.approx(2.5)
    assert (row["tokens"], row["turns"], row["worker"]) == (30, 1, 3)


@pytest.mark.parametrize("first", [0, 1])
def test_the_first_turn_is_1_however_the_log_counts(tmp_path, first):
    lines = Lines(0, 1)
    for turn in range(3):
        lines.add(turn + 1.0, "turn_engine_call", 1.0, {"request_id": "a", "turn": turn + first})
    lines.write(tmp_path)
    assert make_turns(read_run(tmp_path).tables)["turn"].to_list() == [1, 2, 3]


def test_turns_without_numbers_are_counted_in_order_of_time(tmp_path):
    lines = Lines(0, 1)
    for end, seconds in ((2.0, 2.0), (9.0, 7.0)):
        lines.add(end, "turn_engine_call", seconds, {"request_id": "a"})
    lines.write(tmp_path)
    assert make_turns(read_run(tmp_path).tables).select("turn", "engine").rows() == [(1, 2.0), (2, 7.0)]


def test_the_engines_own_time_counts_where_the_callers_is_missing(tmp_path):
    lines = Lines(0, 1)
    lines.add(5.0, "engine_async_generate_actual", 4.0, {"request_id": "a"})
    lines.add(6.0, "async_rollout_request_complete", 6.0, {"request_id": "a"})
    lines.write(tmp_path)
    assert Analysis(read_run(tmp_path)).requests["engine"].to_list() == [4.0]


def test_other_spellings_are_understood(tmp_path):
    lines = Lines(0, 1)
    lines.add(3.0, "reward", 1.0, {"request_id": "a"})
    lines.add(4.0, "request_end", 4.0, {"request_id": "a"})
    lines.write(tmp_path)
    row = Analysis(read_run(tmp_path)).requests.row(0, named=True)
    assert (row["status"], row["reward"]) == ("complete", 1.0)
