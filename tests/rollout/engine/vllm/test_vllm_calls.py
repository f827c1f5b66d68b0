"""Requests in and out of vLLM's client, and what its cores say of them; both stand in."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest

from verl_mux.profiling.eventlog import events
from verl_mux.rollout.engine.serving import StallWatch
from verl_mux.rollout.engine.vllm import vllm_calls
from verl_mux.rollout.engine.vllm.vllm_calls import REASON, EngineLog, call

WHERE = {"replica": 0, "node": "r0"}


class Log:
    def __init__(self) -> None:
        self.step, self.lines = 0, []

    def wants(self, step) -> bool:
        return True

    def log(self, event, seconds=None, extra=None, step=None, timestamp=None) -> None:
        self.lines.append((event, seconds, extra, step, timestamp))


class Engine:
    """Answers a request with what `answer` says once its core's `sends` went through."""

    def __init__(self, policy="priority") -> None:
        self.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(policy=policy))
        self.output_processor = SimpleNamespace(request_states={}, process_outputs=lambda *_: None)
        self.logger_manager = SimpleNamespace(record=lambda *args, **kwargs: None)
        self.taken: list[dict] = []
        self.sends: list = []
        self.stats = SimpleNamespace(queued_ts=1.0, scheduled_ts=3.0, first_token_ts=3.5, last_token_ts=9.0)
        self.reason = "length"

    async def generate(self, prompt, sampling_params, request_id, **keys):
        self.taken.append(keys)
        self.output_processor.request_states[f"{request_id}-internal"] = SimpleNamespace(external_req_id=request_id)
        for outputs in self.sends:
            self.output_processor.process_outputs(outputs, 0.0, None)
        yield SimpleNamespace(finished=False, request_id=request_id)
        ended = [SimpleNamespace(finish_reason=self.reason)]
        yield SimpleNamespace(finished=True, request_id=request_id, metrics=self.stats, num_cached_tokens=3, outputs=ended)


def sent(name, tokens=(), *happened, computed=None):
    """An output of a core for this request; `happened`: (what, when)."""
    of_events = [SimpleNamespace(type=kind, timestamp=at) for kind, at in happened]
    prefill = None if computed is None else SimpleNamespace(num_computed_tokens=computed)
    return SimpleNamespace(
        request_id=f"{name}-internal", new_token_ids=list(tokens), prefill_stats=prefill, events=of_events
    )  # fmt: skip


def installed(engine, log=None) -> EngineLog:
    made = EngineLog(log or Log(), WHERE, StallWatch())
    made.install(engine)
    return made


def ask(engine, name="r/1/2/3/0000abcd", priority=0):
    async def once():
        with call(priority) as answer:
            async for _ in engine.generate("prompt", None, request_id=name, priority=0):
                pass
        return answer

    return asyncio.run(once())


def test_higher_goes_first_and_vllms_lower_does():
    engine = Engine()
    installed(engine)
    ask(engine, priority=5)
    assert engine.taken == [{"priority": -5}]


def test_an_engine_without_priorities_gets_none():
    engine = Engine(policy="fcfs")
    installed(engine)
    ask(engine, priority=5)
    assert engine.taken == [{"priority": 0}]


def test_an_answer_has_its_times_and_why_it_ended():
    engine = Engine()
    installed(engine)
    answer = ask(engine)
    assert answer == {
        "cached_tokens": 3, REASON: "length", "queue_sec": 2.0, "prefill_sec": 0.5, "decode_sec": 5.5, "retractions": 0,
    }  # fmt: skip


def test_what_did_not_happen_to_a_request_has_no_time():
    engine = Engine()
    engine.stats = SimpleNamespace(queued_ts=1.0, scheduled_ts=0.0, first_token_ts=0.0, last_token_ts=0.0)
    installed(engine)
    assert not {"queue_sec", "prefill_sec", "decode_sec"} & set(ask(engine))


def test_each_wait_in_the_queue_is_an_event_and_so_is_a_request_thrown_out():
    engine, log, now = Engine(), Log(), time.monotonic()
    name = "r/1/2/3/0000abcd"
    engine.sends = [
        [sent(name, [1], (1, now - 4.0), (2, now - 1.0), computed=8)],
        [sent(name, (), (3, now - 0.5))],
        [sent(name, [2], (2, now - 0.25))],
    ]
    installed(engine, log)
    assert ask(engine, name, priority=2)["retractions"] == 1
    queued = [line for line in log.lines if line[0] == events.ENGINE_QUEUE]
    assert [round(seconds, 3) for _, seconds, *_ in queued] == [3.0, 0.25]
    _, _, extra, step, ended = queued[0]
    assert extra == {"request_id": "r", "turn": 2, "stay": 3, **WHERE, "priority": 2} and step == 1
    assert time.time() - ended == pytest.approx(1.0, abs=0.5)
    ((_, _, extra, step, _),) = [line for line in log.lines if line[0] == events.ENGINE_RETRACT]
    assert (extra["requests"], extra["request_ids"], step) == (1, ["r"], 1)


def test_the_engines_counters_are_an_event_a_second_over_all_its_cores(monkeypatch):
    engine, log, clock = Engine(), Log(), [0.0]
    monkeypatch.setattr(vllm_calls.time, "perf_counter", lambda: clock[0])
    made = installed(engine, log)
    made._known["r/1/1/1/0"] = vllm_calls._Known()
    engine.output_processor.process_outputs([sent("r/1/1/1/0", [1, 2, 3], computed=10)])
    for core, at in ((0, 0.5), (1, 2.0)):
        clock[0] = at
        stats = SimpleNamespace(num_running_reqs=2, num_waiting_reqs=1, kv_cache_usage=0.25 * (core + 1))
        engine.logger_manager.record(engine_idx=core, scheduler_stats=stats, iteration_stats=None)
    ((event, seconds, extra, *_),) = log.lines
    assert (event, seconds) == (events.ENGINE_DECODE, 2.0)
    assert extra == {
        **WHERE, "running": 4, "queued": 2, "token_usage": 0.5, "tokens_per_sec": 1.5, "prefill_tokens_per_sec": 5.0,
        "retracted": 0,
    }  # fmt: skip


def test_another_clients_request_goes_through():
    engine = Engine()
    installed(engine)

    async def once():
        return [output async for output in engine.generate("prompt", None, "theirs", priority=3)]

    assert len(asyncio.run(once())) == 2 and engine.taken == [{"priority": 3}]
