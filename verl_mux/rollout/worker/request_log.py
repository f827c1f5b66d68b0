"""What happens to one request, turn by turn, in the event log: engine calls, tools, reward, its end.

Runs in agent loop workers; called by the other files of this folder; touches the event log. The agent loops are verl's own, so a
request is known by a context variable that its asyncio task carries. A turn is the agent loop's; it may take several stays in
engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import xxhash

from verl_mux.profiling.eventlog import events
from verl_mux.rollout.engine.serving import ANSWER, Stay

# A wait shorter than this is how tasks take turns.
PARKED_S = 1e-3
_LOOK_S = 0.05  # at least, between two looks at whether a sample has had its time


@dataclass
class Request:
    """One sample on its way.

    step: under which its events are logged: that of its latest launch. turns, stays: so far. score: None before it has one.
    parked: seconds in which it could not generate, for it was cut off or had not been launched. idle_since: when the last thing
    that is logged of it ended (time.perf_counter).
    """

    request_id: str
    step: int
    log: Any
    turns: int = 0
    stays: int = 0
    response_tokens: int = 0
    parked: float = 0.0
    parked_since: float | None = None
    score: float | None = None
    idle_since: float = field(default_factory=time.perf_counter)
    extra: dict[str, Any] = field(default_factory=dict)

    def event(self, name: str, seconds: float | None, **extra: Any) -> None:
        self.log.log(name, seconds, extra={"request_id": self.request_id, **extra}, step=self.step)

    def begin_turn(self, turn: int) -> None:
        """The agent loop asks the engine for its `turn`-th answer."""
        self.turns = turn
        self.event(events.TURN_PREPROCESS, time.perf_counter() - self.idle_since, turn=turn)

    def new_stay(self) -> str:
        """The name of its next stay in an engine."""
        self.stays += 1
        return Stay(self.request_id, self.step, self.turns, self.stays).new_name()


current: ContextVar[Request | None] = ContextVar("verl_mux_request", default=None)


@contextlib.contextmanager
def request(log: Any, request_id: str, step: int, **extra: Any) -> Iterator[Request]:
    """Everything in the block belongs to this request; its start and its end are logged."""
    record = Request(request_id, step, log, extra=extra)
    token, started = current.set(record), time.perf_counter()
    record.event(events.REQUEST_START, None, **extra)
    try:
        yield record
    except BaseException as error:
        why: dict[str, str] = {"reason": "cancelled"}
        if not isinstance(error, asyncio.CancelledError):
            why = {"reason": "failed", "error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:500]}
        record.event(events.REQUEST_ABORTED, time.perf_counter() - started, **why, response_length=record.response_tokens)
        raise
    finally:
        current.reset(token)
    record.event(
        events.REQUEST_COMPLETE, time.perf_counter() - started, **{"finish_reason": "stop", **record.extra},
        turns=record.turns, stays=record.stays, response_length=record.response_tokens, parked_sec=round(record.parked, 6),
        score=record.score,
    )  # fmt: skip


def note(name: str, seconds: float = 0.0, **extra: Any) -> None:
    """Something that happened to the current request; outside of one, nothing."""
    record = current.get()
    if record is not None:
        record.event(name, seconds, **extra)


@contextlib.asynccontextmanager
async def parked(response: Any) -> AsyncIterator[None]:
    """The current request, whose Response this is, may not generate in this block. It goes on in the step of its launch."""
    started, record = time.perf_counter(), current.get()
    if record is not None:
        record.parked_since = started
    yield
    seconds = time.perf_counter() - started
    if record is None:
        return
    record.parked_since = None
    record.step = response.step or record.step
    record.idle_since += seconds
    if seconds >= PARKED_S:
        record.parked += seconds
        record.event(events.REQUEST_PARKED, seconds, turn=record.turns, reason=response.held_by)


class TooLong(Exception):
    """A sample was not through in the time that it has."""


async def in_time(limit: float | None, run: Callable[[], Awaitable[Any]]) -> Any:
    """What `run`, the current request's agent loop, gives. Raises TooLong after `limit` seconds in which it could generate."""
    record, started = current.get(), time.perf_counter()
    if limit is None or record is None:
        return await run()
    before, task = record.parked, asyncio.ensure_future(run())
    try:
        while True:
            until = record.parked_since or time.perf_counter()
            if (left := limit + started + record.parked - before - until) <= 0:
                break
            if (await asyncio.wait([task], timeout=max(left, _LOOK_S)))[0]:
                return task.result()
    finally:
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    raise TooLong(f"no end after {limit:g} s (mux.rollout.sample_timeout_s), in turn {record.turns}")


def text(share: float, most: int, decode: Callable[[Sequence[int]], str], prompt: Sequence[int], response: Sequence[int]) -> None:
    """Log what the current request reads, if it is of the `share` that is chosen by name; `most` characters of each."""
    record = current.get()
    if record is None or xxhash.xxh32_intdigest(record.request_id.encode()) >= share * 2**32:
        return
    asked, answered = decode(prompt), decode(response)
    left_out = sum(max(len(it) - most, 0) for it in (asked, answered))
    record.event(
        events.REQUEST_TEXT, None, prompt=_ends(asked, most), response=_ends(answered, most), left_out=left_out
    )  # fmt: skip


def _ends(whole: str, most: int) -> str:
    return whole if len(whole) <= most else f"{whole[: most // 2]}…{whole[-(most - most // 2) :]}"


async def engine_call(generate: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> Any:
    """One stay in an engine by verl's `generate`, logged with what the server answered of it."""
    started = time.perf_counter()
    output = await generate(*args, **kwargs)
    answer = (output.extra_fields or {}).pop(ANSWER, {})
    if record := current.get():
        record.response_tokens += len(output.token_ids)
        record.extra["finish_reason"] = output.stop_reason
        record.event(
            events.TURN_ENGINE_CALL, time.perf_counter() - started, turn=record.turns, stay=record.stays,
            prompt_tokens=len(kwargs.get("prompt_ids", ())), response_tokens=len(output.token_ids),
            finish_reason=output.stop_reason, replica=answer.get("replica"), node=answer.get("node"),
            queue_sec=answer.get("queue_sec"), held_sec=answer.get("held_sec"), version=answer.get("version"),
        )  # fmt: skip
        record.idle_since = time.perf_counter()
    return output


@contextlib.contextmanager
def part(name: str, **extra: Any) -> Iterator[dict[str, Any]]:
    """A part of the current request (tool, reward, ...), logged at its end with what the block adds; outside of one, nothing."""
    started = time.perf_counter()
    try:
        yield extra
    finally:
        record = current.get()
        if record is not None:
            record.event(name, time.perf_counter() - started, turn=record.turns, **extra)
            record.idle_since = time.perf_counter()


def scored(score: Any) -> float | None:
    """The reward of the current request, for its log. None where verl computes it later, or it is no number."""
    found = float(score) if isinstance(score, (int, float)) else None
    record = current.get()
    if record is not None:
        record.score = found
    return found
