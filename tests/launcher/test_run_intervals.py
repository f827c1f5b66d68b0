"""A run's event logs as spans, and where jobs ran by the agents' logs."""

from datetime import datetime, timezone

import pytest

from tests.launcher.made_run import ORIGIN, MadeRun
from verl_mux.launcher import run_intervals
from verl_mux.launcher.run_file import JobSpec
from verl_mux.launcher.run_intervals import hosts_by_side
from verl_mux.profiling.eventlog.events import REQUEST_COMPLETE
from verl_mux.profiling.plain.lines import Line

T0 = ORIGIN.timestamp()


@pytest.fixture
def made(tmp_path) -> MadeRun:
    return MadeRun(tmp_path)


def test_events_become_spans_of_their_kind(made):
    made.phase("a", "rollout", 1, 10, 14, "r0", "r1")
    made.wait("a", "train", 1, 14, 15, "t0")
    made.event("a", "sync", 1, 10, 11, version=0)
    made.event("a", "sleep", 1, 13, 14, role="server", tag="weights")
    made.steps("a", [20])
    read = run_intervals.read(made.directory, ["a"])
    (phase,) = read.phases
    assert (phase.job, phase.name, phase.step, phase.nodes) == ("a", "rollout", 1, ("r0", "r1"))
    assert (phase.start, phase.end, phase.seconds) == (T0 + 10, T0 + 14, 4)
    assert [(s.name, s.seconds) for s in read.waits] == [("train", 1)]
    assert [s.name for s in read.parts] == ["sync", "sleep"]
    assert [s.step for s in read.steps] == [1]


def test_of_the_thousands_of_lines_of_a_step_only_what_is_asked_for_is_kept(made):
    for at in range(20):
        made.event("a", REQUEST_COMPLETE, 1, 0, (at * 7) % 20, role="rollout", worker=at, turns=1)
        made.event("a", "async_rollout_turn_engine_call", 1, 0, at, role="rollout", worker=at)
        made.event("a", "update_actor", 1, 0, at)
    read = run_intervals.read(made.directory, ["a"])
    assert not (read.parts or read.phases or read.steps or read.waits)


def test_spans_stand_in_order_of_their_ends_whatever_file_they_are_in(made):
    for step, end in ((10, 100), (9, 90), (2, 20)):
        made.phase("a", "train", step, end - 5, end, "t0")
    made.phase("b", "train", 1, 40, 55, "t0")
    assert [s.end - T0 for s in run_intervals.read(made.directory, ["a", "b"]).phases] == [20, 55, 90, 100]


def test_validation_torn_and_foreign_lines_and_other_jobs_are_passed_over(made):
    made.event("a", REQUEST_COMPLETE, 1, 1, 2, role="rollout", validate=True)
    made.phase("a", "train", 1, 0, 5, "t0")
    made.raw("a", "trainer", 1, 0, '{"timestamp": "2026-01-05T09:00:07", "event": "pha')
    made.raw("a", "trainer", 1, 0, "null")
    made.raw("a", "trainer", 1, 0, '{"event": "phase"}')
    made.phase("a", "train", 1, 5, 9, "t0")
    made.phase("other", "train", 1, 0, 5, "t0")
    read = run_intervals.read(made.directory, ["a", "without_a_log"])
    assert [s.seconds for s in read.phases] == [5, 4]
    assert not (read.waits or read.parts or read.steps)


def test_a_real_event_log_is_read(tmp_path):
    from verl_mux.profiling.eventlog.log import EventLog

    log = EventLog(tmp_path / "a" / "events", worker=0, role="trainer", job="a")
    log.log("phase", 2.5, extra={"phase": "rollout", "nodes": ["r0"], "token": 4}, step=3, timestamp=T0)
    log.log("sleep", 0.5, step=3, timestamp=T0)
    log.close()
    read = run_intervals.read(tmp_path, ["a"])
    assert [(s.start, s.end, s.step, s.nodes) for s in read.phases] == [(T0 - 2.5, T0, 3, ("r0",))]
    assert "sleep" in [s.name for s in read.parts]


def test_a_step_that_was_done_again_after_a_start_stands_once(made):
    made.start("a", 0)
    made.steps("a", [10, 20, 30])
    made.start("a", 100)
    for step, end in ((3, 110), (4, 120)):
        made.event("a", "step", step, end - 5, end)
    read = run_intervals.read(made.directory, ["a"])
    assert [(s.step, s.end - T0) for s in read.steps] == [(1, 10), (2, 20), (3, 110), (4, 120)]
    assert read.unbroken("a", T0 + 10, T0 + 20) and not read.unbroken("a", T0 + 20, T0 + 110)


JOBS = {
    "wide": JobSpec(nodes={"rollout": ["r0", "r1"], "train": ["t0"]}),
    "one": JobSpec(nodes={"rollout": ["t0"], "train": ["t0"]}),
}


def held(job, node, host, num_bytes=1, event="device_memory"):
    extra = {"job": job, "node": node, "host": host, "bytes": num_bytes}
    when = datetime.fromtimestamp(0, timezone.utc)
    return Line(timestamp=when, event=event, duration_sec=None, extra=extra, workid=0, step=0, role="agent", job="agent")


def test_each_side_has_the_hosts_on_which_memory_was_held_for_its_nodes():
    lines = [held("wide", "r1", "b"), held("wide", "r0", "a"), held("wide", "r0", "a"), held("wide", "t0", "c")]
    assert hosts_by_side(lines, JOBS)["wide"] == {"rollout": ["a", "b"], "train": ["c"]}


def test_a_node_of_both_sides_counts_for_both_and_one_of_neither_is_told_apart():
    found = hosts_by_side([held("one", "t0", "c"), held("one", "r0", "a")], JOBS)
    assert found == {
        "one": {"rollout": ["c"], "train": ["c"], "elsewhere": ["a"]},
        "wide": {"rollout": [], "train": []},
    }


def test_memory_that_went_and_others_lines_are_passed_over():
    lines = [held("wide", "r0", "a", num_bytes=0), held("stranger", "r0", "a"), held("wide", "r0", "a", event="agent_killed")]
    assert hosts_by_side(lines, JOBS)["wide"] == {"rollout": [], "train": []}
