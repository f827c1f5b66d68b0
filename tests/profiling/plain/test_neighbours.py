"""Phases of the other jobs of a run directory."""

import os

import pytest

from verl_mux.profiling.eventlog.log import EventLog
from verl_mux.profiling.plain.lines import phases_beside

EPOCH = 1_700_000_000.0


@pytest.fixture
def run(tmp_path):
    """Three jobs that each held t0 for 10 s of a minute, b in a step of its own for each."""
    for number, (job, step) in enumerate((("a", 1), ("b", 7), ("b", 8), ("c", 1))):
        log = EventLog(tmp_path / job / "events", role="trainer", job=job)
        log.log("phase", 10.0, {"phase": "train", "nodes": ["t0"]}, step, EPOCH + 60 * number)
        log.log("update_actor", 9.0, {}, step, EPOCH + 60 * number)
        log.close()
    return tmp_path


def jobs(directory, since):
    return sorted((line.job, line.end - EPOCH) for line in phases_beside(directory, EPOCH + since))


def test_those_of_the_others_that_ended_since(run):
    assert jobs(run / "a" / "events", -1) == [("b", 60), ("b", 120), ("c", 180)]
    assert jobs(run / "b" / "events", 100) == [("c", 180)]


def test_files_that_were_written_long_before_are_not_opened(run):
    old = run / "b" / "events" / "trainer" / "step_7" / "worker_0.jsonl"
    os.utime(old, (EPOCH - 100, EPOCH - 100))
    assert jobs(run / "a" / "events", -1) == [("b", 120), ("c", 180)]


def test_a_log_that_lies_in_no_run_directory_has_no_neighbours(run):
    assert jobs(run / "a", -1) == [] and jobs(run / "a" / "events" / "events", -1) == []
