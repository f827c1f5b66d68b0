"""What happens to one request, turn by turn, in the event log: engine calls, tools, reward, its end.

The agent loops are verl's own. A request is known by a context variable that its asyncio task carries, so the client
and the tools it calls can say whose time they spent.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from verl_mux.profiling.eventlog import events


@dataclass
class Request:
    """One sample on its way. `turns`: engine calls so far."""

    request_id: str
    step: int
    log: Any
    turns: int = 0
    response_tokens: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    def event(self, name: str, seconds: float, **extra: Any) -> None:
        self.log.log(name, seconds, extra={"request_id": self.request_id, **extra}, step=self.step)


current: ContextVar[Request | None] = ContextVar("verl_mux_request", default=None)


@contextlib.contextmanager
def request(log: Any, request_id: str, step: int, **extra: Any) -> Iterator[Request]:
    """Everything in the block belongs to this request; its start and its end are logged."""
    record = Request(request_id, step, log, extra=extra)
    token, started = current.set(record), time.perf_counter()
    log.log(events.REQUEST_START, extra={"request_id": request_id, **extra}, step=step)
    reason = "failed"
    try:
        yield record
        reason = record.extra.get("finish_reason", "stop")
    finally:
        current.reset(token)
        record.event(
            events.REQUEST_COMPLETE, time.perf_counter() - started, **{**record.extra, "finish_reason": reason},
            turns=record.turns, response_length=record.response_tokens,
        )  # fmt: skip


def note(name: str, seconds: float = 0.0, **extra: Any) -> None:
    """Something that happened to the current request; outside of one, nothing."""
    record = current.get()
    if record is not None:
        record.event(name, seconds, **extra)


class TimedClient:
    """verl's server client, one event an engine call. Everything else goes straight through."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        output = await self._client.generate(*args, **kwargs)
        record = current.get()
        if record is not None:
            record.turns += 1
            record.response_tokens += len(output.token_ids)
            record.extra["finish_reason"] = output.stop_reason
            record.event(
                events.TURN_ENGINE_CALL, time.perf_counter() - started, turn=record.turns,
                prompt_tokens=len(kwargs.get("prompt_ids", ())), response_tokens=len(output.token_ids),
                finish_reason=output.stop_reason,
            )  # fmt: skip
        return output


@contextlib.contextmanager
def part(name: str, **extra: Any) -> Iterator[None]:
    """A part of the current request (tool, reward, ...), logged when it ends; outside of a request, nothing."""
    started = time.perf_counter()
    try:
        yield
    finally:
        record = current.get()
        if record is not None:
            record.event(name, time.perf_counter() - started, turn=record.turns, **extra)
