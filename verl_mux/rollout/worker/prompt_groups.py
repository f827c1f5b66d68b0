"""The prompt groups on one agent loop worker: responses that the trainer launches, cuts off, lets go on, drops, and replays
after a resume.

    Response of one sample:   parked --launch--> running --its end--> done
                                     <--pause--  (cut off, or the round's budget is used up)

Runs in agent loop workers, as a base of the worker in agent_loop.py (the trainer calls most methods over Ray); responses are
also called by server_client.py. Touches the engine servers that it asks for aborts. An agent loop does not notice: its engine
calls merely take longer. A `Call` keeps the tokens of one engine call over all its rounds, so that an agent loop that starts
again (after a failure, or from a checkpoint) is answered from them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import xxhash

from verl_mux.profiling.eventlog import events
from verl_mux.profiling.eventlog.log import NULL_LOG
from verl_mux.rollout.instructions import Launch, Report, RunningSample, Segment, merged
from verl_mux.rollout.worker import request_log

logger = logging.getLogger(__name__)
# Reports that follow one another within this time travel together.
_GATHER_S = 0.01
# Samples, (prompt group, number) each, with the name and handle of the server on which each goes on.
Targets = dict[tuple[str, int], tuple[str, Any]]


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
        self.open = asyncio.Event()  # it may generate
        self.turn = 0  # number of the engine call that its agent loop waits for, from 1
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

    def take_target(self) -> tuple[str, Any] | None:
        """Where its next stay is planned, once."""
        target, self.target = self.target, None
        return target

    def launch(self, it: Launch) -> None:
        """One that has ended meanwhile says so at once."""
        self.step = it.step
        if not self.ended:
            self.cut_to(it.kept)
        self.budget, self.longest, self.priority, self.running = it.budget, it.longest, it.priority, True
        self.open.set()
        if self.ended:
            self._say_done()

    def close(self) -> str | None:
        """Cut it off. Its request in the engine, to be aborted there; None where nothing is to be done."""
        self.open.clear()
        if self.running and self.stage is Stage.OUTSIDE:
            self._pause("abort")
        return self.engine_request if self.stage is Stage.ENGINE else None

    def begin(self) -> None:
        """Its agent loop starts, for the first time or once more: calls are answered from the start again."""
        self.turn, self.stage = 0, Stage.OUTSIDE

    def fail(self) -> None:
        """Its agent loop raised; another launch lets it try again."""
        self.held_by = "failed"
        self.open.clear()
        self.stage = Stage.OUTSIDE
        self.say("failed", "failed")

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
        prompt = xxhash.xxh3_128_hexdigest(array("q", prompt_ids))
        if self.turn < len(self.calls) and self.calls[self.turn].prompt != prompt:
            del self.calls[self.turn :]
        if self.turn == len(self.calls):
            self.calls.append(Call(prompt, len(prompt_ids)))
        self.turn += 1
        return self.calls[self.turn - 1]

    async def may_generate(self) -> None:
        """Waits until the response has a budget and the trainer lets it run."""
        while True:
            if self.open.is_set():
                if self.budget is None or self.budget > 0:
                    return
                self._pause("length")
            elif self.running:
                self._pause("abort")
            await self.open.wait()

    def room(self, limit: int, call: Call) -> int:
        """Tokens this call may still generate: `limit` of its own, and the response's longest."""
        room = limit - len(call.token_ids)
        return room if self.longest is None else min(room, self.longest - self.total)

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
        self.open.clear()
        self.say("paused", why)


current: ContextVar[Response | None] = ContextVar("verl_mux_response", default=None)


def saved(response: Response) -> list[dict[str, Any]]:
    """Its engine calls for a checkpoint: plain lists."""
    return [{**vars(call), "segments": [list(segment) for segment in call.segments]} for call in response.calls]


def restored(calls: list[dict[str, Any]]) -> list[Call]:
    """Calls from a checkpoint; a resume of a resume gives the same."""
    return [Call(**{**call, "segments": [Segment(*segment) for segment in call["segments"]]}) for call in calls]


class PromptGroups:
    """Responses by group and sample, the task that runs each group, and the reports that the trainer has not taken yet."""

    def __init__(self) -> None:
        self.log: Any = NULL_LOG
        self._responses: dict[str, dict[int, Response]] = {}
        self._tasks: dict[str, asyncio.Task] = {}
        self._steps: dict[str, int] = {}
        self._reports: list[Report] = []
        self._reported = asyncio.Event()

    def has_group(self, group: str) -> bool:
        """Does the trainer control this group?"""
        return group in self._responses

    # ---------------------------------------------------------------- called by the trainer

    def announce(self, launches: Iterable[Launch], calls: dict[str, dict[int, list]], new: Collection[str]) -> None:
        """Make the responses of groups that are new here, from what a checkpoint knows of them."""
        for launch in launches:
            self._steps[launch.group] = launch.step
            if launch.group in new:
                known = restored(calls.get(launch.group, {}).get(launch.sample, []))
                responses = self._responses.setdefault(launch.group, {})
                responses.setdefault(launch.sample, Response(launch.group, launch.sample, self._report, known))

    def start(self, launches: Iterable[Launch]) -> None:
        """Let samples generate, in their order."""
        for launch in launches:
            response = self._responses[launch.group][launch.sample]
            if launch.kept:
                self._log(events.REQUEST_REQUEUED, response, tokens=launch.kept)
            response.launch(launch)

    def cut(self, samples: Iterable[tuple[str, int]]) -> None:
        """Cut samples off on whichever engine each is, their tokens kept. Each is reported when it has left its engine."""
        chosen = [self._responses[group][sample] for group, sample in samples if self.has_group(group)]
        _abort((response.server, response.close()) for response in chosen)

    def running(self) -> list[RunningSample]:
        """Samples that may generate."""
        now = time.perf_counter()
        return [_running(response, now) for response in self._all() if response.running and not response.ended]

    def evacuate(self, servers: list[str], targets: Targets) -> int:
        """Let what runs on these servers go on elsewhere: where it is planned, else where there is least to do. How many are
        still there."""
        for response in self._all():
            if response.target is not None and response.target[0] in servers:
                response.target = None  # of an earlier move: the stay ended by itself before its abort came
            if response.stage is Stage.ENGINE and response.server_id in servers:
                response.target = targets.get((response.group, response.sample))
        # One without a server yet may still arrive there.
        there = [it for it in self._all() if it.stage is Stage.ENGINE and it.server_id in (None, *servers)]
        _abort((response.server, response.engine_request) for response in there)
        return len(there)

    def redirect(self, targets: Targets) -> None:
        """Let these samples, as far as they are in an engine, go on elsewhere."""
        inside = [it for it in self._all() if (it.group, it.sample) in targets and it.stage is Stage.ENGINE and it.server_id]
        for response in inside:
            response.target = targets[response.group, response.sample]
        _abort((response.server, response.engine_request) for response in inside)

    async def drop(self, groups: Iterable[str]) -> None:
        """Give groups up."""
        for group in groups:
            task = self._tasks.pop(group, None)
            if task is not None and not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            for response in self._responses.get(group, {}).values():
                self._log(events.REQUEST_PADDED, response)
        self.forget(groups)

    def forget(self, groups: Iterable[str]) -> None:
        """Groups that the trainer has taken into its batch."""
        for group in groups:
            for table in (self._responses, self._tasks, self._steps):
                table.pop(group, None)

    async def reports(self, timeout: float) -> list[Report]:
        """What became of samples since the last call, as soon as there is a report; none after `timeout` seconds."""
        if not self._reports:
            self._reported.clear()
            try:
                await asyncio.wait_for(self._reported.wait(), timeout)
                await asyncio.sleep(_GATHER_S)
            except asyncio.TimeoutError:
                return []
        taken, self._reports = self._reports, []
        return taken

    def saved_calls(self, groups: Iterable[str]) -> dict[str, dict[int, list]]:
        """For a checkpoint: engine calls by group and sample, plain lists."""
        known = {group: self._responses[group] for group in groups if self.has_group(group)}
        return {group: {sample: saved(it) for sample, it in responses.items()} for group, responses in known.items()}

    # ---------------------------------------------------------------- called by the worker

    def started(self, group: str, task: asyncio.Task | None) -> None:
        """A task runs this group."""
        assert task is not None
        self._tasks[group] = task

    def settled(self, group: str) -> None:
        """verl has marked the group as finished: only now may its last sample be called done."""
        for response in self._responses.get(group, {}).values():
            if not response.ended:
                response.finish()

    async def run_sample(self, group: str, sample: int, run: Callable[[], Awaitable[Any]]) -> Any:
        """Run a sample's agent loop; one that raises is reported and tries again when it is launched again."""
        response = self._responses.get(group, {}).get(sample)
        if response is None:
            return await run()
        token = current.set(response)
        try:
            while True:
                try:
                    async with request_log.parked(response):
                        await response.open.wait()
                    response.begin()
                    result = await run()
                    break
                except Exception:
                    logger.exception("sample %s of prompt group %s failed", sample, group)
                    response.fail()
        finally:
            current.reset(token)
        if any(not other.ended for other in self._responses[group].values() if other is not response):
            response.finish()
        return result

    def ending(self, output: Any) -> None:
        """The current sample has its last token: it can no longer be cut off. Its segments go with its trajectory."""
        response = current.get()
        if response is None:
            return
        response.stage = Stage.ENDING
        versions = [segment.version for segment in response.segments] or [0]
        for one in output if isinstance(output, list) else [output]:
            one.extra_fields |= {
                "min_global_steps": min(versions),
                "max_global_steps": max(versions),
                "mux_segments": [list(segment) for segment in response.segments],
                "mux_truncated": response.truncated,
            }

    # ----------------------------------------------------------------

    def _all(self) -> list[Response]:
        return [response for samples in self._responses.values() for response in samples.values()]

    def _report(self, report: Report) -> None:
        if report.kind == "paused" and report.why == "abort":
            response = self._responses[report.group][report.sample]
            self._log(events.REQUEST_ABORTED, response, reason="cut off", response_length=report.total)
        self._reports.append(report)
        self._reported.set()

    def _log(self, event: str, response: Response, **extra: Any) -> None:
        request_id = f"{response.group}_{response.sample}"
        self.log.log(event, extra={"request_id": request_id, **extra}, step=self._steps.get(response.group, 0))


def _abort(stays: Iterable[tuple[Any, str | None]]) -> None:
    """Abort requests, each with the server whose engine has it; what is in no engine (yet) is left out."""
    by_server: dict[Any, list[str]] = defaultdict(list)
    for server, request in stays:
        if server is not None and request is not None:
            by_server[server].append(request)
    for server, requests in by_server.items():
        server.abort_requests.remote(requests)


def _running(response: Response, now: float) -> RunningSample:
    prompt = response.calls[-1].prompt_tokens if response.calls else 0
    inside = response.stage is Stage.ENGINE
    return RunningSample(
        response.group, response.sample, server=response.server_id if inside else None, context=prompt + response.total,
        tokens=response.total, seconds=now - response.entered if inside else 0.0,
    )  # fmt: skip
