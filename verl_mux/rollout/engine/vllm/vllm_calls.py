"""What our server does with vLLM's AsyncLLM beside verl: priorities and figures of requests, what the event log has of its queue.

Runs in the server's process; called by vllm_server.py. Touches the engine client's own functions, which `install` wraps: vLLM's
scheduler sends along when it queued, admitted and threw out a request, so nothing of ours runs there. A request's priority and
figures go through a context variable that its asyncio task carries, since verl's server hands neither through.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

from verl_mux.profiling.eventlog import events
from verl_mux.rollout.engine.serving import StallWatch, keys_of, stay_of

# What the event log has of a stay.
FIGURES = ("queue_sec", "prefill_sec", "decode_sec", "cached_tokens", "retractions")
# Under which the answer's dict has vLLM's own word for why it ended.
REASON = "finish_reason"
EVERY_S = 1.0
_SCHEDULED, _PREEMPTED = 2, 3  # of vLLM's EngineCoreEventType
_LONGEST_PASS_S = 60.0


class _Request(NamedTuple):
    priority: int
    answer: dict[str, Any]


_current: ContextVar[_Request | None] = ContextVar("verl_mux_vllm_call", default=None)


@contextlib.contextmanager
def call(priority: int) -> Iterator[dict[str, Any]]:
    """Requests of this block have this priority, higher first. Yields a dict that gets FIGURES and REASON of the answer."""
    request = _Request(priority, {})
    before = _current.set(request)
    try:
        yield request.answer
    finally:
        _current.reset(before)


@dataclass
class _Known:
    """A request. since: when it entered the queue it is in, on its core's clock; None: it is in none. thrown_out: how often."""

    priority: int = 0
    since: float | None = None
    thrown_out: int = 0


class EngineLog:
    """What one engine, of one core or several, says of its requests and of its queue. `where`: replica and node."""

    def __init__(self, log: Any, where: dict[str, Any], stalls: StallWatch) -> None:
        self._log, self._where, self._stalls = log, where, stalls
        self._known: dict[str, _Known] = {}  # of requests on their way, by name
        self._latest: dict[int, Any] = {}  # engine core -> its scheduler's counters
        self._written = time.perf_counter()
        self._tokens = self._prefilled = self._thrown_out = 0

    def install(self, engine: Any) -> None:
        """Wrap where `engine`, vLLM's AsyncLLM, starts a request, and where it takes what its cores send."""
        generate, process = engine.generate, engine.output_processor.process_outputs
        by_priority = engine.vllm_config.scheduler_config.policy == "priority"

        async def with_figures(prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any) -> Any:
            request = _current.get() or _Request(0, {})  # else another client's
            if by_priority and request.priority:
                kwargs["priority"] = -request.priority  # vLLM's lower ones go first
            self._known[request_id] = known = _Known(request.priority)
            try:
                async for output in generate(prompt, sampling_params, request_id, **kwargs):
                    if output.finished:
                        request.answer.update(_figures(output), retractions=known.thrown_out)
                    yield output
            finally:
                self._known.pop(request_id, None)

        def with_events(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            self._stalls.sent(time.monotonic())
            self._happened(outputs, engine.output_processor.request_states)
            return process(outputs, *args, **kwargs)

        engine.generate = with_figures
        engine.output_processor.process_outputs = with_events
        if engine.logger_manager is not None:
            record = engine.logger_manager.record

            def with_counters(scheduler_stats: Any, *args: Any, engine_idx: int = 0, **kwargs: Any) -> Any:
                self._count(engine_idx, scheduler_stats)
                return record(scheduler_stats, *args, engine_idx=engine_idx, **kwargs)

            engine.logger_manager.record = with_counters

    def _happened(self, outputs: Sequence[Any], states: dict[str, Any]) -> None:
        out = []
        for output in outputs:
            self._tokens += len(output.new_token_ids)
            if output.prefill_stats is not None:
                self._prefilled += output.prefill_stats.num_computed_tokens
            name = getattr(states.get(output.request_id), "external_req_id", "")
            if (known := self._known.get(name)) is None:
                continue
            for event in output.events or ():
                if event.type != _SCHEDULED:
                    known.since = event.timestamp
                elif known.since is not None:
                    self._admitted(name, known, event.timestamp)
                if event.type == _PREEMPTED:
                    known.thrown_out += 1
                    out.append(name)
        if out:
            self._thrown_out += len(out)
            requests = [keys_of(name)["request_id"] for name in out[:20]]
            usage = {"token_usage": self._usage(), "requests": len(out), "request_ids": requests}
            self._log.log(events.ENGINE_RETRACT, extra={**self._where, **usage}, step=self._step_of(out[0]))

    def _admitted(self, name: str, known: _Known, at: float) -> None:
        assert known.since is not None
        waited, known.since = max(at - known.since, 0.0), None
        # An engine core on another host has another clock; the event is then as late as its output.
        ago = time.monotonic() - at
        ended = time.time() - (ago if 0 <= ago < _LONGEST_PASS_S else 0.0)
        extra = {**keys_of(name), **self._where, "priority": known.priority}
        self._log.log(events.ENGINE_QUEUE, waited, extra=extra, step=self._step_of(name), timestamp=ended)

    def _count(self, core: int, stats: Any) -> None:
        now = time.perf_counter()
        seconds = now - self._written
        if stats is None:
            return
        self._latest[core] = stats
        if not self._log.wants(self._log.step):
            self._written = now
        elif seconds >= EVERY_S:
            self._write(now, seconds)

    def _write(self, now: float, seconds: float) -> None:
        # After an idle stretch the rate of its whole length says nothing.
        rates = [round(count / seconds, 3) if seconds < 5 * EVERY_S else None for count in (self._tokens, self._prefilled)]
        every = self._latest.values()
        extra = {
            **self._where,
            "running": sum(it.num_running_reqs for it in every), "queued": sum(it.num_waiting_reqs for it in every),
            "token_usage": self._usage(), "tokens_per_sec": rates[0], "prefill_tokens_per_sec": rates[1],
            "retracted": self._thrown_out,
        }  # fmt: skip
        self._log.log(events.ENGINE_DECODE, min(seconds, 5 * EVERY_S), extra=extra)
        self._written, self._tokens, self._prefilled, self._thrown_out = now, 0, 0, 0

    def _usage(self) -> float:
        """Part of the KV cache in use, 0 to 1: of the fullest core."""
        return round(max((it.kv_cache_usage for it in self._latest.values()), default=0.0), 4)

    def _step_of(self, name: str) -> int:
        stay = stay_of(name)
        self._log.step = self._log.step if stay is None else stay.step
        return self._log.step


def _figures(output: Any) -> dict[str, Any]:
    """Of a request that has left; what did not happen to it is left out."""
    found = {"cached_tokens": output.num_cached_tokens}
    if output.outputs:
        found[REASON] = output.outputs[0].finish_reason
    if (stats := output.metrics) is not None:
        times = {
            "queue_sec": (stats.queued_ts, stats.scheduled_ts),
            "prefill_sec": (stats.scheduled_ts, stats.first_token_ts),
            "decode_sec": (stats.first_token_ts, stats.last_token_ts),
        }
        found |= {name: round(max(until - since, 0.0), 6) for name, (since, until) in times.items() if since and until}
    return found
