"""The measure of what an event costs; its figures are for `verl-mux bench log`, not for a test."""

import queue
import subprocess
import sys
import threading
import time

import psutil
import pytest

from bench.log_cost import measure
from bench.log_cost_in_run import ProcessorTime, between, compare_steps, engine_cost, generated, own_cost, step_ends
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
    assert told["interval_percent"] == pytest.approx([1.0, 1.0], abs=0.01)


def test_an_engines_seconds_are_told_by_step_and_by_what_it_generated(tmp_path):
    job, coordinator = (EventLog(tmp_path / role, role=role, job="a") for role in ("rollout", "coordinator"))
    for step in range(1, 23):
        coordinator.log("step_report", extra={"job": "a", "response_length": 100.0 * step}, step=step)
        for request in range(4 * (step % 2 == 0)):  # the job's log has every second step
            job.log("async_rollout_request_complete", 1.0, {"request_id": f"{request}"}, step)
    for log in (job, coordinator):
        log.close()
    tokens = generated(tmp_path / "coordinator", tmp_path / "rollout")
    assert tokens[7] == 4 * 700.0
    seconds = {step: tokens[step] / 1000 * (0.2 if step % 2 else 0.202) for step in range(2, 23)}
    told = engine_cost(seconds, tokens)
    assert (told["steps_on"], told["steps_off"]) == (10, 10)
    assert told["per_1000_tokens"]["off_s"] == 0.2
    assert told["per_1000_tokens"]["overhead_percent"] == pytest.approx(1.0, abs=0.01)
    assert told["per_1000_tokens"]["interval_percent"] == pytest.approx([1.0, 1.0], abs=0.01)


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


# Uses so many seconds of processor time, says so, and waits for a word.
BURN = "import time\nwhile time.process_time() < {}: pass\nprint(flush=True)\ninput()"


@pytest.fixture
def looked_at(monkeypatch):
    """Waits until a process of this name has been looked at anew."""
    looks, read = queue.SimpleQueue(), psutil.Process.cmdline

    def cmdline(process):
        words = read(process)
        looks.put(words[:1])
        return words

    def wait(name):
        while not looks.empty():
            looks.get()
        for _ in range(2):  # the first look may have begun before
            while looks.get(timeout=60) != [name]:
                pass

    monkeypatch.setattr(psutil.Process, "cmdline", cmdline)
    return wait


def start(code, name):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([name, "-c", code], executable=sys.executable, **pipes)


def test_processor_time_looks_before_its_block_begins(monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)
    monkeypatch.setattr(threading.Thread, "join", lambda thread: None)
    with ProcessorTime() as processor:
        assert processor.at({1: time.time()})[1] > 0


def test_processor_time_counts_descendants_that_have_ended(looked_at):
    began = time.time()
    with ProcessorTime(every_s=0.02) as processor, start(BURN.format(0.6), "burns") as child:
        child.stdout.readline()
        looked_at("burns")
        child.communicate("\n")
    assert 0.5 < between(processor.at({1: began, 2: time.time()}))[2] < 60.0


def test_a_process_is_counted_to_its_end_whatever_it_is_called_later(looked_at):
    later = f"\nimport os, sys\nos.execv({sys.executable!r}, ['later', '-c', {BURN.format(0.8)!r}])"
    began = time.time()
    with ProcessorTime(every_s=0.02) as processor, start(BURN.format(0.3) + later, "first") as child:
        child.stdout.readline()
        looked_at("first")
        child.stdin.write("\n")
        child.stdin.flush()
        child.stdout.readline()
        looked_at("later")
        child.communicate("\n")
    ended = time.time()
    assert between(processor.at({1: began, 2: ended}, ("first",)))[2] > 0.7
    assert between(processor.at({1: began, 2: ended}, ("nobody",)))[2] == 0
