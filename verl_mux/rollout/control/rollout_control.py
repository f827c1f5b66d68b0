"""Carries out what Oversampler or SegmentSteps decide, on the agent loop workers. One object a job, in its trainer.

begin(step) -> run() until the step's prompt groups are complete -> their uids; everything else is parked or dropped
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import ray

from verl_mux.profiling.eventlog import events
from verl_mux.rollout.control.growth import Growth
from verl_mux.rollout.control.step_metrics import StepMetrics
from verl_mux.rollout.control.tail_migration import TailMigration
from verl_mux.rollout.messages import Abort, Draw, Drop, Finish, Instruction, Launch, Report

_REPORT_S = 0.5


class Machine(Protocol):
    """Oversampler or SegmentSteps."""

    metrics: StepMetrics

    def begin(self, wanted: int) -> list[Instruction]: ...
    def drawn(self, groups: Sequence[str]) -> list[Instruction]: ...
    def report(self, it: Report) -> list[Instruction]: ...
    def to_dict(self) -> dict[str, Any]: ...


class RolloutControl:
    """draw(count) -> a batch of new prompt groups in launching order. submit(batch, launches): register it with verl and let
    these samples of it generate.

    migration: what gives nodes back before the last response, growth: what uses others' meanwhile; None where that is off.
    restart: groups left over begin again from their prompts. longest: most tokens of a response, None as verl limits it.
    on_progress(done, total): samples of this step. clear(uids): forget dropped groups. samples: of a prompt group.
    on_done(group, tokens): a sample has ended by itself.
    """

    def __init__(
        self, machine: Machine, manager: Any, *, draw: Callable[[int], Any], submit: Callable[[Any, list[Launch]], Any],
        clear: Callable[[set[str]], None], on_progress: Callable[[int, int], None], log: Any, restart: bool, longest: int | None,
        samples: int, on_done: Callable[[str, int], None], migration: TailMigration | None = None,
        growth: Growth | None = None,
    ) -> None:  # fmt: skip
        self.machine, self._manager, self._log = machine, manager, log
        self._draw, self._submit, self._clear, self._on_progress = draw, submit, clear, on_progress
        self._restart, self._longest, self.migration, self.growth = restart, longest, migration, growth
        self._samples, self._on_done = samples, on_done
        self._step = self._done = self._wanted = 0
        self._launched: set[tuple[str, int]] = set()  # samples of this step: one that failed and starts again is one
        self._began = 0.0
        self._finished: tuple[str, ...] | None = None
        self._waiting: dict[Any, Any] = {}  # Ray's reference -> worker
        self._rows: Any = None  # prompt groups from a checkpoint, not launched yet
        self._calls: dict[str, dict[int, list]] = {}

    def begin(self, step: int, wanted: int) -> None:
        """Launch a step that trains `wanted` prompt groups."""
        self._step, self._wanted, self._finished = step, wanted, None
        self._launched, self._done = set(), 0
        self._began = time.perf_counter()
        if self.migration is not None:
            self.migration.begin(step)
        self._carry_out(self.machine.begin(wanted), at_begin=True)

    def run(self) -> list[str]:
        """Until the step's groups are complete: their uids. What is cut off has left its engine by then."""
        while self._finished is None:
            for report in self._reports():
                if report.kind == "done":
                    self._done += (report.group, report.sample) in self._launched
                    self._on_done(report.group, report.total)
                self._carry_out(self.machine.report(report))
            self._on_progress(self._done, max(len(self._launched), 1))
            if self.growth is not None:
                self.growth.check()
            if self.migration is not None and self._finished is None:
                self.migration.consider(self._done, len(self._launched))
        groups = list(self._finished)
        extra = {"total_requests": len(self._launched), "target_completion": self._wanted * self._samples,
                 "completed_count": self._done}  # fmt: skip
        self._log.log(events.GENERATE_MONITORED, time.perf_counter() - self._began, extra=extra, step=self._step)
        self._take_off(groups, self._manager.forget)
        return groups

    def figures(self) -> dict[str, float]:
        """The step's figures for the logger."""
        parts = [part for part in (self.migration, self.growth) if part is not None]
        return self.machine.metrics.as_dict() | {name: value for part in parts for name, value in part.metrics.items()}

    def restore(self, rows: Any, calls: dict[str, dict[int, list]]) -> None:
        """Prompt groups of a checkpoint, with the engine calls they had made. They wait for the machine to launch them."""
        self._rows, self._calls = rows, calls

    def to_dict(self, groups: list[str]) -> dict[str, Any]:
        """For a checkpoint: the machine, and the engine calls of `groups`."""
        calls: dict[str, Any] = {group: self._calls[group] for group in groups if group in self._calls}
        return {"machine": self.machine.to_dict(), "calls": calls | self._manager.saved_calls(groups)}

    def _carry_out(self, instructions: list[Instruction], at_begin: bool = False) -> None:
        launches = [it for it in instructions if isinstance(it, Launch)]
        aborts = [it for it in instructions if isinstance(it, Abort)]
        if launches:
            self._launch(launches, at_begin)
        if aborts:
            self._manager.cut([(it.group, it.sample) for it in aborts])
        for it in instructions:
            if isinstance(it, Drop):
                self._take_off([it.group], self._manager.drop)
                self._clear({it.group})
            elif isinstance(it, Finish):
                self._finished = it.groups
            elif isinstance(it, Draw):
                self._launch_new(it.count)

    def _take_off(self, groups: Iterable[str], tell: Callable[[list[str]], None]) -> None:
        """Trained or given up; what came ready from a checkpoint, or too old, was never on a worker."""
        tell([group for group in groups if self._manager.knows(group)])
        for group in groups:
            self._calls.pop(group, None)

    def _launch(self, launches: list[Launch], at_begin: bool) -> None:
        """Samples that are on a worker already go on there; groups from a checkpoint go out with their rows."""
        self._launched |= {(it.group, it.sample) for it in launches}
        groups = list(dict.fromkeys(it.group for it in launches))
        # Left-over groups go before new ones, whatever order those have among themselves.
        launches = [self._completed(it, priority=2 * len(launches), restart=at_begin and self._restart) for it in launches]
        fresh = {group for group in groups if not self._manager.knows(group)}
        if fresh:
            rows = self._take_rows(fresh)
            mine = [replace(it, restart=False) for it in launches if it.group in fresh]
            self._manager.launch([*mine, *self._replays(mine)], rows, self._calls)
            for group in fresh:
                self._calls.pop(group, None)
        if known := [it for it in launches if it.group not in fresh]:
            self._manager.launch(known)

    def _launch_new(self, count: int) -> None:
        batch = self._draw(count)
        uids = list(batch["uid"])
        instructions = self.machine.drawn(uids)
        place = {uid: len(uids) - at for at, uid in enumerate(uids)}
        mine = [it for it in instructions if isinstance(it, Launch) and it.group in place]
        self._launched |= {(it.group, it.sample) for it in mine}
        rest = [it for it in instructions if not (isinstance(it, Launch) and it.group in place)]
        # Those that go on reach the engine before the new; what becomes of the new is for workers that know them.
        self._carry_out([it for it in rest if isinstance(it, Launch)])
        self._submit(batch, [self._completed(it, priority=place[it.group]) for it in mine])
        self._carry_out([it for it in rest if not isinstance(it, Launch)])

    def _completed(self, it: Launch, priority: int, restart: bool = False) -> Launch:
        return replace(it, step=self._step, longest=self._longest, priority=priority, restart=restart)

    def _replays(self, launches: list[Launch]) -> list[Launch]:
        """The other samples of these groups of a checkpoint, which ended before it: their agent loops run on what is known."""
        launched = {(it.group, it.sample) for it in launches}
        return [
            Launch(group, sample, kept=sum(len(call["token_ids"]) for call in calls), step=self._step)
            for group in dict.fromkeys(it.group for it in launches)
            for sample, calls in self._calls.get(group, {}).items()
            if (group, sample) not in launched
        ]

    def _take_rows(self, groups: Iterable[str]) -> Any:
        wanted = set(groups)
        uids = list(self._rows["uid"])
        return self._rows[[at for at, uid in enumerate(uids) if uid in wanted]]

    def _reports(self) -> list[Report]:
        """The next reports of whichever worker has some."""
        idle = [worker for worker in self._manager.agent_loop_workers if worker not in self._waiting.values()]
        self._waiting |= {worker.reports.remote(_REPORT_S): worker for worker in idle}
        done, _ = ray.wait(list(self._waiting), num_returns=1)
        for reference in done:
            del self._waiting[reference]
        return [Report(*report) for reports in ray.get(done) for report in reports]
