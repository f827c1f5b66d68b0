"""The prompt groups on one agent loop worker that the trainer launches, cuts off, lets go on and drops."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple

from verl_mux.profiling import events
from verl_mux.profiling.event_log import NULL_LOG
from verl_mux.rollout.flight_client import abort, evacuate
from verl_mux.rollout.flights import Flight, Report, Stage, current, restored, saved

logger = logging.getLogger(__name__)

# Reports that follow one another within this time travel together.
_GATHER_S = 0.01


class Plan(NamedTuple):
    """One sample's next round. restart: its whole group begins again from the prompt. See Flight.launch for the rest."""

    group: str
    sample: int
    step: int
    kept: int = 0
    budget: int | None = None
    longest: int | None = None
    priority: int = 0
    restart: bool = False


class FlightGroups:
    """Flights by group, the task that runs each group, and the reports nobody has taken yet."""

    def __init__(self, truncated_reward: float | None = None) -> None:
        self.log: Any = NULL_LOG
        self.arguments: dict[str, tuple] = {}
        self._truncated_reward = truncated_reward
        self._flights: dict[str, dict[int, Flight]] = {}
        self._tasks: dict[str, asyncio.Task] = {}
        self._steps: dict[str, int] = {}
        self._reports: list[Report] = []
        self._reported = asyncio.Event()

    def __contains__(self, group: str) -> bool:
        return group in self._flights

    # ---------------------------------------------------------------- asked by the trainer

    def announce(self, plans: Iterable[Plan], calls: dict[str, dict[int, list]], new: set[str]) -> None:
        """Make flights for groups that are new here, from what a checkpoint knows of them."""
        for plan in plans:
            self._steps[plan.group] = plan.step
            if plan.group in new:
                known = calls.get(plan.group, {}).get(plan.sample, [])
                flights = self._flights.setdefault(plan.group, {})
                flights.setdefault(plan.sample, Flight(plan.group, plan.sample, self._report, restored(known)))

    async def launch(self, plans: Iterable[Plan], start_prompt: Callable[[str, int], None]) -> None:
        """Let samples generate, in the order of the plans."""
        for group in dict.fromkeys(plan.group for plan in plans if plan.restart):
            await self._stop(group)
            samples = self._flights[group]
            self._flights[group] = {sample: Flight(group, sample, self._report) for sample in samples}
            start_prompt(group, self._steps[group])
        for plan in plans:
            flight = self._flights[plan.group][plan.sample]
            if plan.kept and not plan.restart:
                self._log(events.REQUEST_REQUEUED, flight, tokens=plan.kept)
            flight.launch(plan.kept, plan.budget, plan.longest, plan.priority)

    def cut(self, samples: Iterable[tuple[str, int]]) -> None:
        """Cut samples off, wherever they are."""
        abort(self._flights[group][sample] for group, sample in samples if group in self._flights)

    def flying(self) -> list[tuple]:
        """Samples that may generate: see tail_migration.Flying."""
        now = time.perf_counter()
        return [_flying(flight, now) for flight in self._all() if flight.running and not flight.ended]

    def evacuate(self, servers: list[str]) -> int:
        """See flight_client.evacuate."""
        return evacuate(self._all(), servers)

    async def drop(self, groups: Iterable[str]) -> None:
        """Give groups up."""
        for group in groups:
            await self._stop(group)
            for flight in self._flights.get(group, {}).values():
                self._log(events.REQUEST_PADDED, flight)
        self.forget(groups)

    def forget(self, groups: Iterable[str]) -> None:
        """Groups that have been trained."""
        for group in groups:
            for table in (self._flights, self._tasks, self.arguments, self._steps):
                table.pop(group, None)

    async def take_reports(self, timeout: float) -> list[Report]:
        """All reports, as soon as there is one, or none after `timeout` seconds."""
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
        """Engine calls by group and sample, plain lists."""
        return {g: {sample: saved(flight) for sample, flight in self._flights[g].items()} for g in groups if g in self}

    # ---------------------------------------------------------------- told by the worker

    def running(self, group: str, task: asyncio.Task, arguments: tuple) -> None:
        """A task runs this group; its arguments, should it have to begin again."""
        self._tasks[group], self.arguments[group] = task, arguments

    def settled(self, group: str) -> None:
        """verl has marked the group as finished: only now may its last sample be called done."""
        for flight in self._flights.get(group, {}).values():
            if not flight.ended:
                flight.finish()

    async def fly(self, group: str, sample: int, run: Callable[[], Awaitable[Any]]) -> Any:
        """Run a sample's agent loop; one that raises is reported and tries again when it is launched again."""
        flight = self._flights.get(group, {}).get(sample)
        if flight is None:
            return await run()
        token = current.set(flight)
        try:
            while True:
                try:
                    await flight.wait_launched()
                    flight.begin()
                    result = await run()
                    break
                except Exception:
                    logger.exception("sample %s of prompt group %s failed", sample, group)
                    flight.fail()
        finally:
            current.reset(token)
        if any(not other.ended for other in self._flights[group].values() if other is not flight):
            flight.finish()
        return result

    def ending(self, output: Any) -> None:
        """A sample has its last token: it can no longer be cut off. Its segments go with its trajectory."""
        flight = current.get()
        if flight is None:
            return
        flight.stage = Stage.ENDING
        versions = [segment.version for segment in flight.segments] or [0]
        for one in output if isinstance(output, list) else [output]:
            one.extra_fields["min_global_steps"], one.extra_fields["max_global_steps"] = min(versions), max(versions)
            one.extra_fields["mux_segments"] = [list(segment) for segment in flight.segments]
            one.extra_fields["mux_truncated"] = flight.truncated

    def score(self, output: Any) -> None:
        """A truncated response earns `truncated_reward`, where one is set."""
        flight = current.get()
        if flight is not None and flight.truncated and self._truncated_reward is not None:
            output.reward_score = self._truncated_reward

    # ----------------------------------------------------------------

    def _all(self) -> list[Flight]:
        return [flight for samples in self._flights.values() for flight in samples.values()]

    async def _stop(self, group: str) -> None:
        task = self._tasks.pop(group, None)
        if task is not None and not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _report(self, report: Report) -> None:
        if report.kind == "paused" and report.why == "abort":
            flight = self._flights[report.group][report.sample]
            self._log(events.REQUEST_ABORTED, flight, reason="cut off", response_length=report.total)
        self._reports.append(report)
        self._reported.set()

    def _log(self, event: str, flight: Flight, **extra: Any) -> None:
        request_id = f"{flight.group}_{flight.sample}"
        self.log.log(event, extra={"request_id": request_id, **extra}, step=self._steps.get(flight.group, 0))


def _flying(flight: Flight, now: float) -> tuple:
    prompt = len(flight.calls[-1].prompt_ids) if flight.calls else 0
    inside = flight.stage is Stage.ENGINE
    server = flight.server_id if inside else None
    return flight.group, flight.sample, server, prompt + flight.total, flight.total, now - flight.entered if inside else 0.0
