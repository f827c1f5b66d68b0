"""SGLang's request priority, and what it knows of a request at its end, which verl 0.9's server passes neither in nor out.

Both go through context variables that the request's asyncio task carries into SGLang's tokenizer manager. The times of a
request come with its last tokens from the scheduler's process, where scheduler_log.py puts them among SGLang's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

# Where scheduler_log.py leaves a request's times, among those that SGLang's scheduler sends along.
TIMES = "verl_mux"
# What the event log says of a stay: the scheduler's times, then what SGLang's answer has (our key -> SGLang's).
OF_ANSWER = {
    "cached_tokens": "cached_tokens",
    "retractions": "num_retractions",
    "drafted_tokens": "spec_num_proposed_drafts",
    "accepted_tokens": "spec_num_correct_drafts",
}
FIGURES = ("queue_sec", "prefill_sec", "decode_sec", *OF_ANSWER)

_priority: ContextVar[int] = ContextVar("verl_mux_priority", default=0)
_answer: ContextVar[dict[str, Any] | None] = ContextVar("verl_mux_answer", default=None)


@contextlib.contextmanager
def priority(value: int) -> Iterator[dict[str, Any]]:
    """Requests of this block have this priority, higher first. Yields a dict that gets FIGURES of the answer, where known."""
    answer: dict[str, Any] = {}
    before, answered = _priority.set(value), _answer.set(answer)
    try:
        yield answer
    finally:
        _priority.reset(before)
        _answer.reset(answered)


def install(tokenizer_manager: Any) -> None:
    """Wrap `generate_request` of SGLang's tokenizer manager, and where it takes what its scheduler sends."""
    generate_request, handle_output = tokenizer_manager.generate_request, tokenizer_manager._handle_batch_output
    times: dict[str, dict[str, float]] = {}  # of requests whose answer is on its way

    async def with_priority(request, *args, **kwargs):
        if tokenizer_manager.server_args.enable_priority_scheduling:
            request.priority = _priority.get()
        async for output in generate_request(request, *args, **kwargs):
            answer, meta = _answer.get(), output.get("meta_info") or {}
            if answer is not None:
                answer.update({ours: meta.get(theirs) for ours, theirs in OF_ANSWER.items()})
                answer.update(times.pop(str(meta.get("id")), {}))
            if (meta.get("finish_reason") or {}).get("type") == "abort":
                # SGLang keeps the name of a request that was aborted in its queue, and refuses it when it comes again.
                tokenizer_manager.rid_to_state.pop(meta.get("id"), None)
            yield output

    async def with_times(received):
        times.update(_times(received))
        await handle_output(received)

    tokenizer_manager.generate_request = with_priority
    tokenizer_manager._handle_batch_output = with_times


def _times(received: Any) -> dict[str, dict[str, float]]:
    """By name, of the requests that end with this output."""
    sent, reasons = getattr(received, "time_stats", None), getattr(received, "finished_reasons", None)
    found = {}
    for name, stats, reason in zip(received.rids, sent or (), reasons or (), strict=False):
        if reason is not None and (times := getattr(stats, TIMES, None)):
            found[name] = times
    return found
