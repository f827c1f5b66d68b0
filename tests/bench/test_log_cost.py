"""The measure of what an event costs; its figures are for `verl-mux bench log`, not for a test."""

import pytest

from bench.log_cost import own_cost, step_seconds
from verl_mux.errors import Failure
from verl_mux.profiling.eventlog.log import EventLog


def test_a_step_lasts_from_the_end_of_the_one_before(tmp_path):
    log = EventLog(tmp_path, role="coordinator", job="coordinator")
    for step, at in ((1, 1e9), (2, 1e9 + 10.0), (4, 1e9 + 30.0)):
        log.log("step_report", extra={"job": "a"}, step=step, timestamp=at)
    log.close()
    assert step_seconds(tmp_path) == {2: pytest.approx(10.0)}


def test_what_the_logs_took_is_added_up_over_processes_and_told_by_step(tmp_path):
    for worker in range(2):
        log = EventLog(tmp_path, worker=worker, role="rollout", job="a")
        for step in (2, 4, 6, 8):
            log.log("log_cost", extra={"lines": 10, "caller_sec": 0.01, "writer_cpu_sec": 0.005 * (step == 8)}, step=step)
        log.close()
    assert own_cost(tmp_path, dict.fromkeys(range(1, 9), 10.0)) == {
        "steps": 3,
        "lines": 20,
        "cost_s": 0.02,
        "percent_of_step": 0.2,
    }
    with pytest.raises(Failure, match="no process logged"):
        own_cost(tmp_path, {1: 10.0})
