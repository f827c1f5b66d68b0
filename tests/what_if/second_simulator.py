"""Recorded lengths through the machines that steer a rollout, in virtual time: a yardstick for what-if, with engines of its
own."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import NamedTuple

from verl_mux.rollout.control.oversampling import Oversampler
from verl_mux.rollout.control.segments import SegmentSteps
from verl_mux.rollout.control.tail_rounds import LengthEstimates, TailRounds
from verl_mux.rollout.instructions import Abort, Draw, Drop, Finish, Instruction, Launch, Report
from verl_mux.rollout.lengths.predictors import LengthRow, Prompt, make_predictor


@dataclass(frozen=True, slots=True)
class Bed:
    """batch: prompt groups a step. slots: requests that one replica runs at once; more wait. replicas: of the rollout pool.

    A decoding step gives one token to each running request and takes `step_s` + `request_s` for each of them. Tokens whose KV
    cache is gone take `prefill_s` each before the request goes on. Training takes `train_token_s` a token of the batch.
    """

    batch: int
    slots: int
    step_s: float
    request_s: float
    prefill_s: float
    train_token_s: float
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """One prompt in one epoch. name: unique for each draw. lengths: tokens of its responses, one a sample.

    Where other groups of the file have more samples, the missing ones are responses of no tokens.
    """

    name: str
    prompt: Prompt
    epoch: int
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Recording:
    """epochs: the prompt groups of each, in the order in which they are drawn. samples: of each group."""

    epochs: tuple[tuple[PromptGroup, ...], ...]
    samples: int

    @property
    def groups(self) -> tuple[PromptGroup, ...]:
        """Of all epochs, in the order in which they are drawn."""
        return tuple(group for epoch in self.epochs for group in epoch)


def recording(rows: Sequence[LengthRow], seed: int) -> Recording:
    """Rows in any order; rows of one id and epoch are samples of one group. Each epoch's groups come in a random order, as
    a data loader shuffles them."""
    found: dict[int, dict[str, list[LengthRow]]] = {}
    for row in rows:
        found.setdefault(row.epoch, {}).setdefault(row.prompt.id, []).append(row)
    samples = max(len(group) for epoch in found.values() for group in epoch.values())
    rng = random.Random(seed)
    epochs = []
    for number in sorted(found):
        groups = [
            PromptGroup(f"{name}@{number}", its[0].prompt, number, (*(it.length for it in its), *[0] * (samples - len(its))))
            for name, its in found[number].items()
        ]
        rng.shuffle(groups)
        epochs.append(tuple(groups))
    return Recording(tuple(epochs), samples)


Key = tuple[str, int]  # prompt group, sample
NEVER = float("inf")


class Request(NamedTuple):
    """kept: tokens it has; read: of these, what has to be read again. more: tokens until it ends or pauses."""

    key: Key
    kept: int
    more: int
    read: int = 0


@dataclass(slots=True)
class Replica:
    """submit | abort, then `next_end` says when something ends if nothing else happens, and `advance` goes there.

    Time is in seconds of the virtual clock, `at` the time up to which it has been advanced.
    """

    bed: Bed
    at: float = 0.0
    decoded: float = 0.0  # steps
    _queue: deque[Request] = field(default_factory=deque)
    _ends: dict[Key, tuple[float, Request]] = field(default_factory=dict)  # step at which it ends
    _prefill: float = 0.0  # seconds that are owed before the next decoding step

    @property
    def requests(self) -> int:
        """Running and waiting."""
        return len(self._ends) + len(self._queue)

    def submit(self, request: Request) -> None:
        """It runs as soon as there is a slot."""
        self._queue.append(request)
        self._admit()

    def abort(self, key: Key) -> int | None:
        """Tokens that it has by now, the kept ones included; None where it is not here."""
        if key in self._ends:
            end, request = self._ends.pop(key)
            self._admit()
            return request.kept + min(request.more, max(0, request.more - ceil(end - self.decoded - 1e-6)))
        for request in self._queue:
            if request.key == key:
                self._queue.remove(request)
                return request.kept
        return None

    def next_end(self) -> float:
        """When the next request ends or pauses."""
        if not self._ends:
            return NEVER
        steps = max(0.0, min(end for end, _ in self._ends.values()) - self.decoded)
        return self.at + self._prefill + steps * self._step_s()

    def advance(self, now: float) -> list[Request]:
        """What has ended by `now`, which is no later than `next_end`."""
        seconds = max(0.0, now - self.at)
        self.at = max(self.at, now)
        read = min(self._prefill, seconds)
        self._prefill -= read
        if self._ends and seconds > read:
            self.decoded += (seconds - read) / self._step_s()
        ended = [request for end, request in self._ends.values() if end <= self.decoded + 1e-6]
        for request in ended:
            del self._ends[request.key]
        self._admit()
        return ended

    def _step_s(self) -> float:
        return self.bed.step_s + self.bed.request_s * len(self._ends)

    def _admit(self) -> None:
        while self._queue and len(self._ends) < self.bed.slots:
            request = self._queue.popleft()
            self._prefill += request.read * self.bed.prefill_s
            # Whole steps: a request that joins takes part from the next one on.
            self._ends[request.key] = (self.decoded + request.more, request)


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


class Deferred:
    """A source of prompt groups: a window of an epoch is gathered, and handed out round by round. Texts say nothing, as none are
    in a log."""

    def __init__(self, recording: Recording, batch: int) -> None:
        self._rounds = TailRounds(batch, LengthEstimates(make_predictor("default"), recording.samples))
        self._groups = {group.name: group for group in recording.groups}
        self._windows = list(recording.epochs)

    def draw(self, count: int) -> list[PromptGroup]:
        """Fewer where the data ends."""
        names = self._rounds.take(count)
        while len(names) < count and self._windows:
            window = self._windows.pop(0)
            self._rounds.gather([group.name for group in window], [Prompt(group.prompt.id, "") for group in window])
            names += self._rounds.take(count - len(names))
        return [self._groups[name] for name in names]

    def trained(self, groups: Sequence[PromptGroup]) -> None:
        """What these turned out to be is learnt."""
        if groups:
            self._rounds.trained({group.name: group.lengths for group in groups}, groups[0].epoch)

    @property
    def left(self) -> int:
        """Groups not drawn yet."""
        return self._rounds.left + sum(map(len, self._windows))


@dataclass(slots=True)
class _Sample:
    target: int
    segments: list[int] = field(default_factory=list)  # tokens
    read_in: int = 0  # step in which its KV cache was last filled


class VirtualJob:
    """begin -> ended* -> finished. `submit` and `abort` carry the machine's instructions out; `abort` returns the tokens that the
    request has by then, None where it has just ended."""

    def __init__(self, machine: Oversampler | SegmentSteps, source: Arrival | Deferred, batch: int) -> None:
        self.machine, self.source = machine, source
        self.step, self.finished, self.batch_tokens = 0, False, 0
        self.submit: Callable[[Request], None]
        self.abort: Callable[[Key], int | None]
        self._batch = batch
        self._groups: dict[str, PromptGroup] = {}
        self._samples: dict[Key, _Sample] = {}

    @property
    def over(self) -> bool:
        """Is every prompt trained, or given up?"""
        return self.finished and not self.source.left and not self.machine.to_dict()["groups"]

    def begin(self) -> None:
        """The next step's rollout begins."""
        self.step, self.finished = self.step + 1, False
        self._carry_out(self.machine.begin(self._batch))

    def ended(self, request: Request) -> None:
        """A request ended by itself, or has used its budget up."""
        total = request.kept + request.more
        is_done = total >= self._samples[request.key].target
        self._report("done" if is_done else "paused", request.key, request.kept, total, "eos" if is_done else "length")

    def _carry_out(self, instructions: list[Instruction]) -> None:
        for it in instructions:
            if isinstance(it, Launch):
                self._launch(it)
        for it in instructions:
            if isinstance(it, Abort):
                key = it.group, it.sample
                kept, total = sum(self._samples[key].segments), self.abort(key)
                if total is not None:  # else it ended at this very moment, and that is reported next
                    self._report("paused", key, kept, total, "abort")
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
            self._samples |= {(group.name, number): _Sample(length) for number, length in enumerate(group.lengths)}
        self._carry_out(self.machine.drawn([group.name for group in groups]))

    def _launch(self, it: Launch) -> None:
        sample = self._samples[it.group, it.sample]
        left = sample.target - it.kept
        read = 0 if sample.read_in == self.step else it.kept
        sample.read_in = self.step
        self.submit(Request((it.group, it.sample), it.kept, left if it.budget is None else min(left, it.budget), read))

    def _report(self, kind: str, key: Key, kept: int, total: int, why: str) -> None:
        self._samples[key].segments.append(total - kept)
        self._carry_out(self.machine.report(Report(kind, *key, total - kept, total, self.step - 1, why)))

    def _finish(self, names: Sequence[str]) -> None:
        self.finished = True
        groups = [self._groups[name] for name in names]
        samples = [self._samples[group.name, number] for group in groups for number in range(len(group.lengths))]
        self.batch_tokens = sum(sum(sample.segments) for sample in samples)
        self.source.trained(groups)
        for name in names:
            self._forget(name)

    def _forget(self, name: str) -> None:
        for number in range(len(self._groups.pop(name).lengths)):
            del self._samples[name, number]
