"""One virtual job: a state machine of the product, the prompts that it draws, and what its steps trained."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from research.rollouts.engine import Key, Request
from research.rollouts.recorded import PromptGroup, Recording
from verl_mux.rollout.control.step_metrics import StepMetrics
from verl_mux.rollout.messages import Abort, Draw, Drop, Finish, Instruction, Launch, Report


class Machine(Protocol):
    """Oversampler or SegmentSteps."""

    metrics: StepMetrics

    def begin(self, wanted: int) -> list[Instruction]: ...
    def drawn(self, groups: Sequence[str]) -> list[Instruction]: ...
    def report(self, it: Report) -> list[Instruction]: ...
    def to_dict(self) -> dict[str, Any]: ...


class Source(Protocol):
    """Where new prompt groups come from. trained: told after each step."""

    def draw(self, count: int) -> list[PromptGroup]: ...
    def trained(self, groups: Sequence[PromptGroup]) -> None: ...
    @property
    def left(self) -> int: ...


class Arrival:
    """Prompt groups as the data loader hands them out."""

    def __init__(self, recording: Recording) -> None:
        self._groups = list(recording.groups)

    def draw(self, count: int) -> list[PromptGroup]:
        """The next ones, fewer where the data ends."""
        taken, self._groups = self._groups[:count], self._groups[count:]
        return taken

    def trained(self, groups: Sequence[PromptGroup]) -> None:
        """Nothing to learn."""

    @property
    def left(self) -> int:
        """Groups not drawn yet."""
        return len(self._groups)


@dataclass(slots=True)
class Totals:
    """What became of tokens and prompts over a run. lag is counted token by token."""

    trained_tokens: int = 0
    trained_responses: int = 0
    stale_tokens: int = 0
    lag_tokens: int = 0
    lag_max: int = 0
    generated: int = 0
    wasted: int = 0
    trained_groups: list[str] = field(default_factory=list)
    step_means: list[tuple[int, float]] = field(default_factory=list)  # epoch, mean length of a step's responses


@dataclass(slots=True)
class _Sample:
    target: int
    segments: list[tuple[int, int]] = field(default_factory=list)  # version, tokens
    read_in: int = 0  # step in which its KV cache was last filled


class VirtualJob:
    """begin -> (ended | aborted)* -> finished. `submit` and `abort` carry the machine's instructions out; `abort` returns the
    tokens that the request has by then, None where it has just ended. restarts: what is launched again begins from its prompt
    with another draw."""

    def __init__(
        self, name: str, machine: Machine, source: Source, recording: Recording, batch: int, *, restarts: bool = False,
        seed: int = 0,
    ) -> None:  # fmt: skip
        self.name, self.machine, self.source = name, machine, source
        self.totals = Totals()
        self.step, self.finished, self.batch_tokens = 0, False, 0
        self.launched = self.done = 0
        self.submit: Callable[[Request], None]
        self.abort: Callable[[Key], int | None]
        self._batch, self._restarts = batch, restarts
        self._rng = random.Random(seed)
        self._groups: dict[str, PromptGroup] = {}
        self._samples: dict[tuple[str, int], _Sample] = {}
        self._draws: dict[str, list[int]] = {}
        for group in recording.groups:
            self._draws.setdefault(group.prompt.id, []).extend(group.lengths)

    @property
    def over(self) -> bool:
        """Is every prompt trained, or given up?"""
        return self.finished and not self.source.left and not self.machine.to_dict()["groups"]

    def begin(self) -> None:
        """The next step's rollout begins."""
        self.step, self.finished, self.launched, self.done = self.step + 1, False, 0, 0
        self._carry_out(self.machine.begin(self._batch))

    def ended(self, request: Request) -> None:
        """A request ended by itself, or has used its budget up."""
        name, number = request.key[1:]
        target, total = self._samples[name, number].target, request.kept + request.more
        self.done += total >= target
        self._report(
            "done" if total >= target else "paused", name, number, request.kept, total, "eos" if total >= target else "length"
        )

    # ----------------------------------------------------------------

    def _carry_out(self, instructions: list[Instruction]) -> None:
        for it in instructions:
            if isinstance(it, Launch):
                self._launch(it)
        for it in instructions:
            if isinstance(it, Abort):
                kept = sum(tokens for _, tokens in self._samples[it.group, it.sample].segments)
                total = self.abort((self.name, it.group, it.sample))
                if total is not None:  # else it ended at this very moment, and that is reported next
                    self._report("paused", it.group, it.sample, kept, total, "abort")
        for it in instructions:
            if isinstance(it, Drop):
                self._forget(it.group)
            elif isinstance(it, Finish):
                self._finish(it.groups)
            elif isinstance(it, Draw):
                self._draw(it.count)

    def _draw(self, count: int) -> None:
        groups = self.source.draw(count)
        for group in groups:
            self._groups[group.name] = group
            for number, length in enumerate(group.lengths):
                self._samples[group.name, number] = _Sample(length)
        self._carry_out(self.machine.drawn([group.name for group in groups]))

    def _launch(self, it: Launch) -> None:
        sample = self._samples[it.group, it.sample]
        if self._restarts and it.kept == 0 and sample.segments:
            sample.target, sample.segments = self._rng.choice(self._draws[self._groups[it.group].prompt.id]), []
        more = sample.target - it.kept
        more = more if it.budget is None else min(more, it.budget)
        read = 0 if sample.read_in == self.step else it.kept
        sample.read_in = self.step
        self.launched += 1
        self.submit(Request((self.name, it.group, it.sample), it.kept, more, read))

    def _report(self, kind: str, group: str, number: int, kept: int, total: int, why: str) -> None:
        version, new = self.step - 1, total - kept
        if new:
            self._samples[group, number].segments.append((version, new))
        self._carry_out(self.machine.report(Report(kind, group, number, new, total, version, why)))

    def _finish(self, names: Sequence[str]) -> None:
        self.finished = True
        groups = [self._groups[name] for name in names]
        samples = [self._samples[name, number] for name in names for number in range(len(self._groups[name].lengths))]
        self._count(names, samples)
        self.source.trained(groups)
        if groups:
            real = [s.target for s in samples if s.target]
            self.totals.step_means.append((groups[0].epoch, sum(real) / max(1, len(real))))
        for name in names:
            self._forget(name)

    def _count(self, names: Sequence[str], samples: Sequence[_Sample]) -> None:
        totals, metrics, version = self.totals, self.machine.metrics, self.step - 1
        totals.generated += metrics.generated_tokens
        totals.wasted += metrics.wasted_tokens
        totals.trained_groups += names
        totals.trained_responses += sum(1 for s in samples if s.target)
        self.batch_tokens = sum(tokens for s in samples for _, tokens in s.segments)
        totals.trained_tokens += self.batch_tokens
        for lag, tokens in ((version - written, tokens) for s in samples for written, tokens in s.segments):
            totals.stale_tokens += tokens if lag else 0
            totals.lag_tokens += lag * tokens
            totals.lag_max = max(totals.lag_max, lag)

    def _forget(self, name: str) -> None:
        for number in range(len(self._groups.pop(name).lengths)):
            del self._samples[name, number]
