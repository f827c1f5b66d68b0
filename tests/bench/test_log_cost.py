"""The measure of what an event costs; its figures are for `verl-mux bench log`, not for a test."""

import subprocess
import sys
import time

import pytest

from verl_mux.bench.log_cost import measure
from verl_mux.bench.log_cost_in_run import ProcessorTime, between, compare_steps, own_cost, step_ends
from verl_mux.errors import Failure
from verl_mux.profiling.eventlog.log import EventLog


def test_it_measures_every_event_and_loses_none():
    found = measure(requests=16, turns=2, rounds=2)
    assert found["events"] == 16 * 2 * 4 * 2  # requests, turns, events a turn, rounds
    assert found["dropped"] == 0


def test_steps_with_the_log_are_compared_with_those_without(tmp_path):
    log = EventLog(tmp_path, role="coordinator", job="coordinator")
    at = 1e9
    for step in range(1, 23):
        at += 10.0 if step % 2 else 10.1
        log.log("step_report", extra={"job": "a"}, step=step, timestamp=at)
    log.close()
    told = compare_steps(between(step_ends(tmp_path)))
    assert (told["steps_on"], told["steps_off"]) == (10, 10)
    assert told["overhead_percent"] == pytest.approx(1.0, abs=0.01)
    assert told["noise_percent"] == pytest.approx(0.0, abs=0.01)


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
    with pytest.raises(Failure, match="no process told"):
        own_cost(tmp_path, {1: 10.0})


def test_processor_time_counts_descendants_that_have_ended():
    burn = "import time\nwhile time.process_time() < 0.6: pass"
    began = time.time()
    with ProcessorTime(every_s=0.02) as processor:
        subprocess.run([sys.executable, "-c", burn], check=True)
    ended = time.time()
    used = between(processor.at({1: began, 2: ended}))
    assert 0.4 < used[2] < 60.0


def test_a_process_is_counted_to_its_end_whatever_it_is_called_later():
    burn = "import time\nwhile time.process_time() < {}: pass"
    renamed = f"{burn.format(0.3)}\nimport os, sys\nos.execv({sys.executable!r}, ['later', '-c', {burn.format(0.8)!r}])"
    began = time.time()
    with ProcessorTime(every_s=0.02) as processor:
        subprocess.run(["first", "-c", renamed], executable=sys.executable, check=True)
    ended = time.time()
    assert between(processor.at({1: began, 2: ended}, ("first",)))[2] > 0.6
    assert between(processor.at({1: began, 2: ended}, ("nobody",)))[2] == 0
