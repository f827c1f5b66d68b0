"""Percentiles of completion, and t80 over total."""

import pytest

from tests.profiling.made_logs import Lines, read_run
from verl_mux.profiling.report.measures.analysis import Analysis


def analysed(directory, ends, worker=0, **extra):
    lines = Lines(worker, 1)
    for number, end in enumerate(ends):
        lines.add(end, "async_rollout_request_complete", end, {"request_id": str(number), **extra})
    lines.write(directory)
    return Analysis(read_run(directory))


def test_four_fifths_in_the_first_two_fifths_of_the_time(tmp_path):
    ends = [0.4 * (i + 1) for i in range(80)] + [32 + 2.4 * (i + 1) for i in range(20)]
    row = analysed(tmp_path, ends).by_step.row(0, named=True)
    assert row["total"] == pytest.approx(80.0)
    assert row["p80"] == pytest.approx(32.0)
    assert row["t80_over_total"] == pytest.approx(0.4)


def test_a_quantile_is_the_first_moment_at_which_that_part_is_done(tmp_path):
    row = analysed(tmp_path, [1.0, 2.0, 3.0]).by_step.row(0, named=True)
    assert (row["p50"], row["p80"], row["p99"]) == (pytest.approx(2.0), pytest.approx(3.0), pytest.approx(3.0))


def test_a_step_is_counted_from_its_first_start_over_all_workers(tmp_path):
    analysed(tmp_path, [5.0, 6.0], worker=0)
    analysis = analysed(tmp_path, [50.0], worker=1)
    assert analysis.by_step.row(0, named=True)["total"] == pytest.approx(50.0)
    assert analysis.by_worker["total"].to_list() == pytest.approx([6.0, 50.0])


def test_validation_requests_are_left_out(tmp_path):
    assert analysed(tmp_path, [1.0, 2.0], validate=True).by_step.is_empty()


def test_aborted_requests_are_not_completions(tmp_path):
    lines = Lines(0, 1)
    lines.add(3.0, "async_rollout_request_complete", 3.0, {"request_id": "a"})
    lines.add(9.0, "aborted_request_with_cancelled_error", 9.0, {"request_id": "b"})
    lines.write(tmp_path)
    analysis = Analysis(read_run(tmp_path))
    assert analysis.by_step["requests"].to_list() == [1]
    assert set(analysis.requests["status"]) == {"complete", "aborted"}


def test_a_log_without_ends_takes_each_requests_last_event(tmp_path):
    lines = Lines(0, 1)
    lines.add(3.0, "turn_engine_call", 3.0, {"request_id": "a", "turn": 0})
    lines.add(7.0, "turn_engine_call", 4.0, {"request_id": "a", "turn": 1})
    lines.write(tmp_path)
    analysis = Analysis(read_run(tmp_path))
    row = analysis.requests.row(0, named=True)
    assert (row["status"], row["turns"], row["engine"]) == ("complete", 2, 7.0)
    assert row["seconds"] == pytest.approx(7.0)


def test_what_a_cut_at_half_more_than_t80_would_take_and_save(tmp_path):
    row = analysed(tmp_path, [10.0] * 80 + [14.0] * 15 + [16.0, 17.0, 18.0, 19.0, 30.0]).by_step.row(0, named=True)
    assert (row["beyond_cut"], row["cut_saves"]) == (5, pytest.approx(0.5))
