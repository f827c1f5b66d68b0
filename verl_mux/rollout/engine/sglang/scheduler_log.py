"""What SGLang's scheduler knows of its requests and of its queue, in the event log; its own log level stays as it is.

Runs in the scheduler processes of engines that our servers launch (see plugin.py). Hooks, all on the first rank of its kind:

- a new prefill batch: how long each of its requests waited (`engine_queue`)
- a request's times on their way to the server's process: they get ours beside them (manager.py takes them there)
- each decoded and each prefilled batch: about once a second, the counters (`engine_decode`)
- requests thrown out of the running batch (`engine_retract`); tokens dropped from the prefix cache, counted

In a step that is not logged they do nothing.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import msgspec

from verl_mux.profiling.eventlog import events
from verl_mux.rollout.engine.serving import keys_of, stay_of
from verl_mux.worker_settings import WorkerSettings, open_worker_log

VARIABLE = "VERL_MUX_ENGINE_LOG"
TIMES = "verl_mux"  # where a request's times are left among those that SGLang's scheduler sends along
EVERY_S = 1.0
_QUEUED = "verl_mux_queued"  # seconds that a request spent in the queue, kept with SGLang's times of it
_FIRST_QUEUED = "verl_mux_first_queued"
_ENTERED = "verl_mux_entered"  # when it entered the queue for the wait that was logged last


def ask_for(settings: WorkerSettings, replica: int, node: str) -> None:
    """In the server's process: have the schedulers that it will start log for this replica."""
    os.environ[VARIABLE] = json.dumps({"settings": settings.to_dict(), "replica": replica, "node": node})


def register(registry: Any, kind: Any) -> None:
    """Hook SGLang's scheduler. `registry`, `kind`: its HookRegistry and HookType. Does nothing where no log was asked for."""
    asked = json.loads(os.environ.get(VARIABLE, "null"))
    if not asked or not asked["settings"].get("events_dir"):
        return
    log = SchedulerLog(open_worker_log(msgspec.convert(asked["settings"], WorkerSettings), "server", asked["replica"]), asked)
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    registry.register(f"{scheduler}.get_new_batch_prefill", log.admitted, kind.AFTER)
    registry.register(f"{scheduler}.report_prefill_stats", log.prefilled, kind.AFTER)
    registry.register(f"{scheduler}.report_decode_stats", log.decoded, kind.AFTER)
    registry.register("sglang.srt.managers.schedule_batch.ScheduleBatch.retract_decode", log.retracted, kind.AFTER)
    registry.register("sglang.srt.mem_cache.radix_cache.RadixCache.evict", log.evicted, kind.AFTER)
    times = "sglang.srt.observability.req_time_stats.SchedulerReqTimeStats.__getstate__"
    registry.register(times, add_times, kind.AFTER)


def add_times(state: dict[str, Any], stats: Any, *_args: Any) -> dict[str, Any]:
    """AFTER hook: the seconds that a request spent in the queue, on its prefill and on what came after it."""
    queued = getattr(stats, _QUEUED, None)
    if queued is None or not stats.prefill_finished_time:
        return state
    again = queued - getattr(stats, _FIRST_QUEUED)
    ended = stats.completion_time or time.perf_counter()
    found = {
        "queue_sec": queued,
        "prefill_sec": stats.prefill_finished_time - stats.forward_entry_time,
        "decode_sec": ended - stats.prefill_finished_time - again,
    }
    return {**state, TIMES: {key: round(max(seconds, 0.0), 6) for key, seconds in found.items()}}


class SchedulerLog:
    """The hooks of one scheduler process."""

    def __init__(self, log: Any, asked: dict[str, Any]) -> None:
        self._log = log
        self._where = {"replica": asked["replica"], "node": asked["node"]}
        self._scheduler: Any = None
        self._told = time.perf_counter()
        self._tokens = self._prefilled = self._thrown_out = self._dropped = 0

    def admitted(self, batch: Any, scheduler: Any, *_args: Any) -> None:
        """AFTER hook: `batch` goes into its prefill; None where nothing waits."""
        if batch is None or not self._speaks_for(scheduler) or not self._log.wants(self._step_of(batch.reqs[0])):
            return
        now = time.perf_counter()
        for request in batch.reqs:
            stats = request.time_stats
            entered = stats.wait_queue_entry_time
            if not entered or getattr(stats, _ENTERED, None) == entered:
                continue  # the next chunk of a prompt that was let in before
            waited = max(now - entered, 0.0)
            before = getattr(stats, _QUEUED, 0.0)
            setattr(stats, _ENTERED, entered)
            setattr(stats, _QUEUED, before + waited)
            if not before:
                setattr(stats, _FIRST_QUEUED, waited)
            extra = {**keys_of(request.rid), **self._where, "priority": request.priority}
            self._log.log(events.ENGINE_QUEUE, waited, extra=extra, step=self._step_of(request))

    def prefilled(self, _result: Any, scheduler: Any, batch: Any = None, prefill_stats: Any = None, **_more: Any) -> None:
        """AFTER hook: a batch's prefill is over."""
        if not self._counts(scheduler):
            return
        self._prefilled += getattr(prefill_stats, "log_input_tokens", 0)
        self._tell(scheduler, batch or scheduler.running_batch)

    def decoded(
        self, _result: Any, scheduler: Any, _graph: Any = None, running_batch: Any = None, num_correct_drafts: int = 0
    ) -> None:
        """AFTER hook: each request of the batch has one token more, and the drafts that were right."""
        if not self._counts(scheduler):
            return
        batch = running_batch or scheduler.running_batch
        self._tokens += len(batch.reqs) + num_correct_drafts
        self._tell(scheduler, batch)

    def retracted(self, result: Any, batch: Any, *_args: Any) -> None:
        """AFTER hook: `result` begins with the requests that were thrown out."""
        out = result[0]
        if not out or self._scheduler is None:
            return
        self._thrown_out += len(out)
        extra = {**self._where, "requests": len(out), "token_usage": self._usage(self._scheduler)}
        extra["request_ids"] = [keys_of(request.rid)["request_id"] for request in out[:20]]
        self._log.log(events.ENGINE_RETRACT, extra=extra, step=self._step_of(out[0]))

    def evicted(self, result: Any, *_args: Any, **_more: Any) -> None:
        """AFTER hook: tokens left the prefix cache to make room."""
        self._dropped += result.num_tokens_evicted

    def _speaks_for(self, scheduler: Any) -> bool:
        """One process speaks for an engine whose schedulers see the same requests."""
        if scheduler.attn_tp_rank or scheduler.pp_rank:
            return False
        self._scheduler = scheduler
        return True

    def _counts(self, scheduler: Any) -> bool:
        """Counters begin anew with a step that is logged."""
        if self._speaks_for(scheduler) and self._log.wants(self._log.step):
            return True
        self._told = time.perf_counter()
        return False

    def _tell(self, scheduler: Any, batch: Any) -> None:
        now = time.perf_counter()
        seconds = now - self._told
        if seconds < EVERY_S:
            return
        running = scheduler.running_batch.reqs if scheduler.running_batch is not None else batch.reqs
        # After an idle stretch the rate of its whole length says nothing.
        rate = (self._tokens / seconds, self._prefilled / seconds) if seconds < 5 * EVERY_S else (None, None)
        extra = {
            **self._where,
            "running": len(running), "queued": len(scheduler.waiting_queue), "token_usage": self._usage(scheduler),
            "tokens_per_sec": rate[0] and round(rate[0], 3), "prefill_tokens_per_sec": rate[1] and round(rate[1], 3),
            "retracted": self._thrown_out, "evicted_tokens": self._dropped,
        }  # fmt: skip
        step = self._step_of(batch.reqs[0]) if batch.reqs else None
        self._log.log(events.ENGINE_DECODE, min(seconds, 5 * EVERY_S), extra=extra, step=step)
        self._told, self._tokens, self._prefilled, self._thrown_out, self._dropped = now, 0, 0, 0, 0

    def _usage(self, scheduler: Any) -> float:
        """Part of the KV cache in use, 0 to 1."""
        return round(float(scheduler.get_pool_stats().get_kv_token_stats()[1]), 4)

    def _step_of(self, request: Any) -> int:
        stay = stay_of(request.rid)
        self._log.step = self._log.step if stay is None else stay.step
        return self._log.step
