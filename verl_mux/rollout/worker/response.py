"""Responses under way over several rounds: cut off with their tokens, let go on, replayed after a resume.

    Response of one sample:   parked --launch--> running --its end--> done
                                     <--pause--  (cut off, or the round's budget is used up)

Runs in agent loop workers; called by prompt_groups.py and server_client.py; pure. An agent loop does not notice: its engine calls
merely take longer. A `Call` keeps the tokens of one engine call over all its rounds, so that an agent loop that starts again
(after a failure, or from a checkpoint) is answered from them.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import xxhash

from verl_mux.rollout.instructions import Report, Segment, merged


@dataclass
class Call:
    """One engine call: tokens, their log-probs (None where the engine gives none) and segments. stop_reason None: unfinished.

    prompt: a digest. The prompts themselves, each with all turns before it, would take the square of a response's turns.
    """

    prompt: str
    prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] | None = None
    segments: list[Segment] = field(default_factory=list)
    stop_reason: str | None = None

    def add(self, token_ids: list[int], log_probs: list[float] | None, version: int) -> None:
        """Append what the engine generated."""
        self.token_ids += token_ids
        if log_probs is not None:
            self.log_probs = [*(self.log_probs or []), *log_probs]
        if token_ids:
            self.segments.append(Segment(len(token_ids), version))

    def cut(self, kept: int) -> None:
        """Forget all but the first `kept` tokens."""
        self.token_ids, self.stop_reason = self.token_ids[:kept], None
        self.log_probs = None if self.log_probs is None else self.log_probs[:kept]
        segments, self.segments = self.segments, []
        for segment in segments:
            length = min(segment.length, kept)
            kept -= length
            self.segments += [Segment(length, segment.version)] if length else []


class Stage(Enum):
    """Where a response's agent loop is: at work by itself (prompt, tools), in the engine, or past its last token."""

    OUTSIDE = "outside"
    ENGINE = "engine"
    ENDING = "ending"


class Response:
    """One sample's response. `report` is called once for each launch, when the round is over for it.

    longest: most tokens of it. step: of the training, at its latest launch. held_by: why it may not generate.
    engine_request, server: the name of its present stay in an engine, and whose engine that is.
    """

    def __init__(self, group: str, sample: int, report: Callable[[Report], None], calls: list[Call] | None = None) -> None:
        self.group, self.sample = group, sample
        self.calls: list[Call] = calls or []
        self.stage, self.running, self.ended, self.truncated = Stage.OUTSIDE, False, False, False
        self.budget: int | None = None
        self.longest: int | None = None
        self.priority = 0
        self.step = 0
        self.held_by = "not launched"
        self.engine_request: str | None = None
        self.server: Any = None
        self.server_id: str | None = None
        self.target: tuple[str, Any] | None = None  # name and handle of the server that its next stay is planned on
        self.entered = 0.0  # the engine, by time.perf_counter
        self._report = report
        self._open = asyncio.Event()
        self._next = 0
        self._reported = self.total

    @property
    def total(self) -> int:
        """Tokens generated so far."""
        return sum(len(call.token_ids) for call in self.calls)

    @property
    def at_longest(self) -> bool:
        """Is it as long as a response may be?"""
        return self.longest is not None and self.total >= self.longest

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Of all calls, neighbours of one version joined."""
        return merged(segment for call in self.calls for segment in call.segments)

    @property
    def is_open(self) -> bool:
        """May it generate?"""
        return self._open.is_set()

    def take_target(self) -> tuple[str, Any] | None:
        """Where its next stay is planned, once."""
        target, self.target = self.target, None
        return target

    @property
    def turn(self) -> int:
        """Number of the engine call that its agent loop waits for, from 1."""
        return self._next

    def launch(self, kept: int, budget: int | None, longest: int | None, priority: int, step: int = 0) -> None:
        """Let it generate `budget` more tokens after the first `kept`. One that has ended meanwhile says so at once."""
        self.step = step
        if not self.ended:
            self.cut_to(kept)
        self.budget, self.longest, self.priority, self.running = budget, longest, priority, True
        self._open.set()
        if self.ended:
            self._say_done()

    def close(self) -> str | None:
        """Cut it off. Its request in the engine, to be aborted there; None where nothing is to be done."""
        self._open.clear()
        if self.running and self.stage is Stage.OUTSIDE:
            self._pause("abort")
        return self.engine_request if self.stage is Stage.ENGINE else None

    def begin(self) -> None:
        """Its agent loop starts, for the first time or once more: calls are answered from the start again."""
        self._next, self.stage = 0, Stage.OUTSIDE

    def fail(self) -> None:
        """Its agent loop raised; another launch lets it try again."""
        self.held_by = "failed"
        self._open.clear()
        self.stage = Stage.OUTSIDE
        self.say("failed", "failed")

    async def wait_launched(self) -> None:
        """Until it may generate."""
        await self._open.wait()

    def finish(self) -> None:
        """Its trajectory is stored."""
        self.ended = True
        if self.running:
            self._say_done()

    def say(self, kind: str, why: str) -> None:
        """Report the round's end."""
        self.running = False
        version = self.calls[-1].segments[-1].version if self.calls and self.calls[-1].segments else -1
        new, self._reported = self.total - self._reported, self.total
        self._report(Report(kind, self.group, self.sample, new, self.total, version, why))

    def next_call(self, prompt_ids: list[int]) -> Call:
        """The agent loop's next engine call: an earlier one with its tokens where the prompt is the same, else a new one."""
        prompt = _digest(prompt_ids)
        if self._next < len(self.calls) and self.calls[self._next].prompt != prompt:
            del self.calls[self._next :]
        if self._next == len(self.calls):
            self.calls.append(Call(prompt, len(prompt_ids)))
        self._next += 1
        return self.calls[self._next - 1]

    async def may_generate(self) -> None:
        """Waits until the response has a budget and the trainer lets it run."""
        while True:
            if self.is_open:
                if self.budget is None or self.budget > 0:
                    return
                self._pause("length")
            elif self.running:
                self._pause("abort")
            await self._open.wait()

    def room(self, limit: int, call: Call) -> int:
        """Tokens this call may still generate: `limit` of its own, and the response's longest."""
        room = limit - len(call.token_ids)
        return room if self.longest is None else min(room, self.longest - self.total)

    def spend(self, tokens: int) -> None:
        """Take tokens off the round's budget."""
        if self.budget is not None:
            self.budget -= tokens

    def cut_to(self, kept: int) -> None:
        """Forget all but the first `kept` tokens of the response."""
        for at, call in enumerate(self.calls):
            if kept < len(call.token_ids):
                call.cut(kept)
                del self.calls[at + 1 :]
                break
            kept -= len(call.token_ids)
        self._reported = self.total

    def _say_done(self) -> None:
        self.say("done", "length" if self.truncated else "eos")

    def _pause(self, why: str) -> None:
        self.held_by = "cut off" if why == "abort" else "budget"
        self._open.clear()
        self.say("paused", why)


current: ContextVar[Response | None] = ContextVar("verl_mux_response", default=None)


def saved(response: Response) -> list[dict[str, Any]]:
    """Its engine calls for a checkpoint: plain lists."""
    return [{**vars(call), "segments": [list(segment) for segment in call.segments]} for call in response.calls]


def restored(calls: list[dict[str, Any]]) -> list[Call]:
    """Calls from a checkpoint; a resume of a resume gives the same. Those of earlier versions have the prompt itself."""
    found = []
    for call in calls:
        fields = {**call, "segments": [Segment(*segment) for segment in call["segments"]]}
        if (prompt_ids := fields.pop("prompt_ids", None)) is not None:
            fields |= {"prompt": _digest(prompt_ids), "prompt_tokens": len(prompt_ids)}
        found.append(Call(**fields))
    return found


def _digest(prompt_ids: list[int]) -> str:
    return xxhash.xxh3_128_hexdigest(array("q", prompt_ids))
