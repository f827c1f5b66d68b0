"""Shares of the step."""

import pytest

from tests.profiling.made_logs import SEED_SHARES, Lines, make_shares, read_run
from verl_mux.profiling.report.measures.analysis import event_share, step_shares


def test_the_seeds_table_comes_out_to_the_digit(tmp_path):
    assert event_share(read_run(make_shares(tmp_path)).tables) == SEED_SHARES


def test_without_a_total_the_parts_are_the_whole(tmp_path):
    make_shares(tmp_path)
    for path in tmp_path.rglob("*.jsonl"):
        path.write_text("".join(line for line in path.open() if "total_step_duration" not in line))
    assert event_share(read_run(tmp_path).tables) == pytest.approx(SEED_SHARES, abs=1e-3)


def test_long_steps_do_not_outvote_short_ones(tmp_path):
    for step, (whole, part) in {1: (10.0, 5.0), 2: (1000.0, 100.0)}.items():
        lines = Lines(0, step)
        lines.add(part, "async_generate_duration", part)
        lines.add(whole, "total_step_duration", whole)
        lines.write(tmp_path)
    assert event_share(read_run(tmp_path).tables) == {"async_generate_duration": 30.0}


def test_events_of_requests_are_no_parts_of_the_step(tmp_path):
    lines = Lines(0, 1)
    lines.add(8.0, "turn_engine_call", 8.0, {"request_id": "a", "turn": 0})
    lines.add(9.0, "async_generate_duration", 9.0)
    lines.add(10.0, "total_step_duration", 10.0)
    lines.write(tmp_path)
    assert event_share(read_run(tmp_path).tables) == {"async_generate_duration": 90.0}


def test_the_trainers_step_has_shares_of_its_own(tmp_path):
    lines = Lines(0, 1)
    lines.add(4.0, "update_actor", 4.0, role="trainer")
    lines.add(9.0, "phase", 5.0, {"phase": "train"}, role="trainer")
    lines.add(10.0, "step", 10.0, role="trainer")
    lines.write(tmp_path)
    assert step_shares(read_run(tmp_path).tables).rows() == [("", "trainer", 1, "update_actor", 4.0, 0.4)]
