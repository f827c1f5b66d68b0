"""The hooks on SGLang's scheduler, on stand-ins that have what the contract with SGLang says they have (tests/upstream)."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest

from verl_mux.profiling.eventlog.log import EventLog
from verl_mux.rollout.engine.serving import Stay
from verl_mux.rollout.engine.sglang import scheduler_log
from verl_mux.rollout.engine.sglang.manager import TIMES
from verl_mux.rollout.engine.sglang.scheduler_log import SchedulerLog, add_times
from verl_mux.worker_settings import WorkerSettings

NAME = Stay("u_0", 7, 1, 2).new_name()
NAME_IN_8 = Stay("u_0", 8, 1, 2).new_name()
WHERE = {"replica": 3, "node": "r1"}


class Pool:
    def get_kv_token_stats(self):
        return 96, 0.96


def request(entered=None, **more):
    stats = SimpleNamespace(wait_queue_entry_time=entered or time.perf_counter() - 0.5, forward_entry_time=0.0)
    return SimpleNamespace(rid=NAME, priority=5, time_stats=stats, **more)


@pytest.fixture
def log(tmp_path):
    return EventLog(tmp_path, worker=3, role="server", job="a", run="11112222")


@pytest.fixture
def hooks(log):
    return SchedulerLog(log, WHERE)


@pytest.fixture
def scheduler():
    batch = SimpleNamespace(reqs=[request(), request()])
    return SimpleNamespace(
        attn_tp_rank=0, pp_rank=0, running_batch=batch, waiting_queue=[request()], get_pool_stats=lambda: Pool()
    )


def lines(log, event):
    log.flush()
    root = log.files.directory
    found = [json.loads(line) for path in root.rglob("*.jsonl") for line in path.read_text().splitlines()]
    return [line for line in found if line["event"] == event]


def test_a_request_is_told_once_for_each_wait(hooks, log, scheduler):
    it = request()
    for _chunk in range(2):
        hooks.admitted(SimpleNamespace(reqs=[it]), scheduler)
    hooks.admitted(None, scheduler)
    (line,) = lines(log, "engine_queue")
    assert line["duration_sec"] == pytest.approx(0.5, abs=0.2) and line["step"] == 7 and line["workid"] == 3
    assert line["extra"] == {"request_id": "u_0", "turn": 1, "stay": 2, **WHERE, "priority": 5}
    it.time_stats.wait_queue_entry_time = time.perf_counter() - 0.25  # thrown out, and let in again
    hooks.admitted(SimpleNamespace(reqs=[it]), scheduler)
    assert len(lines(log, "engine_queue")) == 2


def test_the_times_of_a_request_go_with_sglangs_own(hooks, log, scheduler):
    now = time.perf_counter()
    it = request(entered=now - 0.5)
    hooks.admitted(SimpleNamespace(reqs=[it]), scheduler)
    it.time_stats.forward_entry_time, it.time_stats.prefill_finished_time = now, now + 0.1
    it.time_stats.wait_queue_entry_time = time.perf_counter() - 0.25
    hooks.admitted(SimpleNamespace(reqs=[it]), scheduler)
    it.time_stats.completion_time = now + 3.1
    state = add_times({"theirs": 1}, it.time_stats)
    assert state["theirs"] == 1
    assert state[TIMES] == pytest.approx({"queue_sec": 0.75, "prefill_sec": 0.1, "decode_sec": 2.75}, abs=0.1)


def test_counters_are_told_about_once_a_second(hooks, log, scheduler, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(scheduler_log.time, "perf_counter", lambda: clock[0])
    hooks._told = 100.0
    for at in (100.4, 100.8, 101.2, 101.4):
        clock[0] = at
        hooks.decoded(None, scheduler, False, running_batch=scheduler.running_batch, num_correct_drafts=1)
        hooks.evicted(SimpleNamespace(num_tokens_evicted=10))
    (line,) = lines(log, "engine_decode")
    counted = {"running": 2, "queued": 1, "token_usage": 0.96, "tokens_per_sec": 7.5, "prefill_tokens_per_sec": 0.0}
    assert line["extra"] == {**WHERE, **counted, "retracted": 0, "evicted_tokens": 20} and line["step"] == 7


def test_after_an_idle_stretch_no_rate_is_told(hooks, log, scheduler, monkeypatch):
    monkeypatch.setattr(scheduler_log.time, "perf_counter", lambda: hooks._told + 60.0)
    hooks.prefilled(None, scheduler, scheduler.running_batch, SimpleNamespace(log_input_tokens=12))
    (line,) = lines(log, "engine_decode")
    assert line["extra"]["tokens_per_sec"] is None and line["duration_sec"] == 5.0


def test_in_a_step_that_is_not_logged_nothing_is_measured_and_counters_begin_anew_after_it(tmp_path, scheduler, monkeypatch):
    log = EventLog(tmp_path, worker=3, role="server", job="a", every=2)
    hooks, clock = SchedulerLog(log, WHERE), [100.0]
    monkeypatch.setattr(scheduler_log.time, "perf_counter", lambda: clock[0])
    it = request()
    hooks.admitted(SimpleNamespace(reqs=[it]), scheduler)  # of step 7
    clock[0] = 103.0
    hooks.decoded(None, scheduler)
    it.time_stats.prefill_finished_time = 102.0
    assert add_times({}, it.time_stats) == {}
    for running in scheduler.running_batch.reqs:
        running.rid = NAME_IN_8
    hooks.admitted(scheduler.running_batch, scheduler)
    for clock[0] in (103.5, 104.5):
        hooks.decoded(None, scheduler)
    (line,) = lines(log, "engine_decode")
    assert (line["step"], line["extra"]["tokens_per_sec"]) == (8, pytest.approx(4 / 1.5, abs=0.01))


def test_what_is_thrown_out_is_told_at_once_and_counted(hooks, log, scheduler):
    hooks.admitted(SimpleNamespace(reqs=[request()]), scheduler)
    hooks.retracted(([request()], 0.5, []), scheduler.running_batch)
    hooks.retracted(([], 0.5, []), scheduler.running_batch)
    (line,) = lines(log, "engine_retract")
    assert line["extra"] == {**WHERE, "requests": 1, "token_usage": 0.96, "request_ids": ["u_0"]}


@pytest.mark.parametrize("rank", ["attn_tp_rank", "pp_rank"])
def test_one_rank_speaks_for_its_engine(hooks, log, scheduler, rank):
    setattr(scheduler, rank, 1)
    hooks.admitted(SimpleNamespace(reqs=[request()]), scheduler)
    hooks.decoded(None, scheduler)
    assert lines(log, "engine_queue") == []


@pytest.mark.parametrize("directory", [None, "events"])
def test_hooks_are_registered_where_a_log_is_asked_for(monkeypatch, tmp_path, directory):
    registered = []
    registry = SimpleNamespace(register=lambda target, hook, kind: registered.append(target))
    monkeypatch.delenv(scheduler_log.VARIABLE, raising=False)
    scheduler_log.register(registry, SimpleNamespace(AFTER="after"))
    settings = WorkerSettings(events_dir=directory and str(tmp_path / directory), rollout_nodes=("r0", "r1"))
    monkeypatch.setenv(scheduler_log.VARIABLE, "")  # set again below; here so that it is taken away after the test
    scheduler_log.ask_for(settings, 1, "r1")
    scheduler_log.register(registry, SimpleNamespace(AFTER="after"))
    assert bool(registered) == bool(directory)
