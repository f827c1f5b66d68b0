"""Shares of steps and times of completion."""

import pytest

from tests.profiling.made_logs import SEED_SHARES, Lines, make_shares, read_run
from verl_mux.profiling.report.measures.analysis import Analysis, event_share, step_shares


def test_the_seeds_table_comes_out_to_the_digit(tmp_path):
    assert event_share(read_run(make_shares(tmp_path)).tables) == SEED_SHARES


def test_without_a_total_the_parts_are_the_whole(tmp_path):
    make_shares(tmp_path)
    for path in tmp_path.rglob("*.jsonl"):
        path.write_text("".join(line for line in path.open() if "total_step_duration" not in line))
    assert event_share(read_run(tmp_path).tables) == pytest.approx(SEED_SHARES, abs=1e-3)


def logged(directory, step, *events, **keys):
    """events: end, name, and what the line has besides; each lasted since 0."""
    lines = Lines(0, step)
    for end, event, *extra in events:
        lines.add(end, event, end, *extra, **keys)
    lines.write(directory)


def test_long_steps_do_not_outvote_short_ones(tmp_path):
    for step, (whole, part) in {1: (10.0, 5.0), 2: (1000.0, 100.0)}.items():
        logged(tmp_path, step, (part, "async_generate_duration"), (whole, "total_step_duration"))
    assert event_share(read_run(tmp_path).tables) == {"async_generate_duration": 30.0}


def test_events_of_requests_are_no_parts_of_the_step(tmp_path):
    request = (8.0, "turn_engine_call", {"request_id": "a", "turn": 0})
    logged(tmp_path, 1, request, (9.0, "async_generate_duration"), (10.0, "total_step_duration"))
    assert event_share(read_run(tmp_path).tables) == {"async_generate_duration": 90.0}


def test_the_trainers_step_has_shares_of_its_own(tmp_path):
    logged(tmp_path, 1, (4.0, "update_actor"), (9.0, "phase", {"phase": "train"}), (10.0, "step"), role="trainer")
    assert step_shares(read_run(tmp_path).tables).rows() == [("", "trainer", 1, "update_actor", 4.0, 0.4)]


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
