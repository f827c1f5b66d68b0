"""The prompt groups on one agent loop worker that the trainer launches, cuts off, lets go on and drops.

Runs in agent loop workers, as a base of the worker in agent_loop.py: the trainer calls most methods over Ray. Touches the engine
servers that it asks for aborts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any

from verl_mux.profiling.eventlog import events
from verl_mux.profiling.eventlog.log import NULL_LOG
from verl_mux.rollout.instructions import Launch, Report, RunningSample
from verl_mux.rollout.worker import request_log
from verl_mux.rollout.worker.response import Response, Stage, current, restored, saved

logger = logging.getLogger(__name__)
# Reports that follow one another within this time travel together.
_GATHER_S = 0.01
# Samples, (prompt group, number) each, with the name and handle of the server on which each goes on.
Targets = dict[tuple[str, int], tuple[str, Any]]


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
            response.launch(launch.kept, launch.budget, launch.longest, launch.priority, launch.step)

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
                        await response.wait_launched()
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
