"""The tables of a step, for trackers that take some."""

import pytest

from tests.profiling.made_engines import make
from tests.profiling.made_mux import make_mux_run
from verl_mux.profiling.plain.lines import phases_beside
from verl_mux.profiling.plain.step_metrics import POINTS, SLOWEST, step_lines, step_metrics, step_tables


@pytest.fixture
def lines(tmp_path):
    make(tmp_path, seed=1, steps=2, requests=200, replicas=2, turns=2)
    return list(step_lines(tmp_path / "a" / "events", 2))


def column(table, name):
    return [row[table.columns.index(name)] for row in table.rows]


def test_the_slowest_requests_come_with_where_their_time_went(lines):
    table = step_tables(lines)["slowest_requests"]
    seconds = column(table, "seconds")
    assert len(seconds) == SLOWEST and seconds == sorted(seconds, reverse=True)
    parts = ("queue_sec", "prefill_sec", "decode_sec", "tool_s", "reward_s")
    spent = [sum(column(table, part)[at] for part in parts) for at in range(SLOWEST)]
    assert spent == pytest.approx(seconds, rel=0.05)
    assert set(column(table, "turns")) == {2} and min(column(table, "tool_s")) > 0


def test_every_replica_has_a_row(lines):
    table = step_tables(lines)["replicas"]
    assert column(table, "replica") == ["0", "1"] and column(table, "node") == ["r0", "r1"]
    assert sum(column(table, "stays")) == 2 * 200
    assert column(table, "seconds_per_token") == pytest.approx([0.04, 0.04], rel=0.05)
    assert min(column(table, "most_running")) > 0


def test_the_curve_of_completion_ends_with_the_metrics_total(lines):
    table = step_tables(lines)["completion"]
    assert len(table.rows) == POINTS
    done = column(table, "part_done")
    assert done == sorted(done) and done[-1] == 1
    assert column(table, "seconds")[-1] == pytest.approx(step_metrics(lines)["mux/completion/total"], abs=0.05)


def test_validation_is_in_none(tmp_path):
    made = make(tmp_path, seed=1, steps=1, requests=30, replicas=1, validates=7)
    tables = step_tables(step_lines(made / "a" / "events", 1))
    assert column(tables["replicas"], "stays") == [30]
    assert not [name for name in column(tables["slowest_requests"], "request_id") if "v_" in name]


def test_what_a_step_has_not_has_no_table(tmp_path):
    assert step_tables([]) == {}
    make(tmp_path, seed=1, steps=1, requests=3, replicas=1)
    assert "lease_waits" not in step_tables(step_lines(tmp_path / "a" / "events", 1))


def test_waits_for_leases_tell_behind_whom(tmp_path):
    make_mux_run(tmp_path, alone=1, together=2)
    events = tmp_path / "fibonacci" / "events"
    lines = list(step_lines(events, 3))
    table = step_tables(lines, phases_beside(events, since=0.0))["lease_waits"]
    assert column(table, "phase") == ["rollout", "train"] and column(table, "nodes") == ["r0", "t0"]
    seconds = column(table, "seconds")
    assert max(seconds) > 1
    assert column(table, "behind") == ["products" if waited else None for waited in seconds]
    assert column(table, "behind_s") == pytest.approx(seconds, abs=1e-3)
    alone = step_tables(lines)["lease_waits"]
    assert column(alone, "behind") == [None, None] and column(alone, "seconds") == seconds
