"""Recorded lengths through the machines that steer a rollout, in virtual time: a yardstick for what-if, with engines of its
own."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any, NamedTuple, Protocol

import numpy as np

from verl_mux.rollout.control.oversampling import StepMetrics
from verl_mux.rollout.control.tail_rounds import Estimates, Expected, TailRounds
from verl_mux.rollout.instructions import Abort, Draw, Drop, Finish, Instruction, Launch, Report
from verl_mux.rollout.lengths.predictors import LengthRow, Prompt


@dataclass(frozen=True, slots=True)
class Bed:
    """batch: prompt groups a step. slots: requests that one replica runs at once; more wait. replicas: of the rollout pool.

    A decoding step gives one token to each running request and takes `step_s` + `request_s` for each of them. Tokens whose KV
    cache is gone take `prefill_s` each before the request goes on. Training takes `train_token_s` a token of the batch.
    switch_s: until a replica that changes hands generates: sleep, lease, weights, wake-up.
    """

    batch: int
    slots: int
    step_s: float
    request_s: float
    prefill_s: float
    train_token_s: float
    switch_s: float
    replicas: int = 1

    def noted(self) -> str:
        """One line."""
        return (
            f"bed: {self.batch} prompt groups a step, {self.replicas} replicas of {self.slots} slots; a decoding step takes "
            f"{self.step_s * 1e3:g} ms + {self.request_s * 1e3:g} ms a request; {self.prefill_s * 1e6:g} us a token read again, "
            f"{self.train_token_s * 1e6:g} us a trained token, {self.switch_s:g} s when a replica changes hands"
        )


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
    samples = max(len(its) for epoch in found.values() for its in epoch.values())
    rng = random.Random(seed)
    epochs = []
    for number in sorted(found):
        groups = [_group(number, its, samples) for its in found[number].values()]
        rng.shuffle(groups)
        epochs.append(tuple(groups))
    return Recording(tuple(epochs), samples)


def _group(epoch: int, rows: Sequence[LengthRow], samples: int) -> PromptGroup:
    lengths = [row.length for row in rows]
    prompt = rows[0].prompt
    return PromptGroup(f"{prompt.id}@{epoch}", prompt, epoch, (*lengths, *[0] * (samples - len(lengths))))


Key = tuple[str, str, int]  # job, prompt group, sample
NEVER = float("inf")


class Request(NamedTuple):
    """kept: tokens it has; read: of these, what has to be read again. more: tokens until it ends or pauses."""

    key: Key
    kept: int
    more: int
    read: int = 0
    priority: int = 0  # higher goes first


@dataclass(slots=True)
class Replica:
    """submit | abort, then `next_end` says when something ends if nothing else happens, and `advance` goes there.

    Time is in seconds of the virtual clock, `at` the time up to which it has been advanced. It stands still until `ready`.
    """

    bed: Bed
    at: float = 0.0
    ready: float = 0.0
    decoded: float = 0.0  # steps
    _queue: list[tuple[int, int, Request]] = field(default_factory=list)
    _ends: dict[Key, tuple[float, Request]] = field(default_factory=dict)  # step at which it ends
    _done: dict[Key, int] = field(default_factory=dict)
    _came: int = 0
    _prefill: float = 0.0  # seconds that are owed before the next decoding step

    @property
    def requests(self) -> int:
        """Running and waiting."""
        return len(self._ends) + len(self._queue)

    def submit(self, request: Request, done: int = 0) -> None:
        """It runs as soon as there is a slot. done: of its `more` tokens, those that it has from another replica."""
        self._came += 1
        self._done[request.key] = done
        heapq.heappush(self._queue, (-request.priority, self._came, request))
        self._admit()

    def abort(self, key: Key) -> int | None:
        """Tokens that it has by now, the kept ones included; None where it is not here."""
        tokens = self.tokens().get(key)
        if key in self._ends:
            del self._ends[key], self._done[key]
            self._admit()
        elif tokens is not None:
            self._queue = [entry for entry in self._queue if entry[2].key != key]
            heapq.heapify(self._queue)
            del self._done[key]
        return tokens

    def held(self) -> list[Key]:
        """All requests here."""
        return [*self._ends, *self.waiting()]

    def waiting(self) -> list[Key]:
        """Those that have no slot yet."""
        return [entry[2].key for entry in self._queue]

    def tokens(self) -> dict[Key, int]:
        """Of each request by now, the kept ones included."""
        running = {
            key: request.kept + min(request.more, max(self._done[key], request.more - ceil(end - self.decoded - 1e-6)))
            for key, (end, request) in self._ends.items()
        }
        return running | {entry[2].key: entry[2].kept + self._done[entry[2].key] for entry in self._queue}

    def next_end(self) -> float:
        """When the next request ends or pauses."""
        if not self._ends:
            return NEVER
        steps = max(0.0, min(end for end, _ in self._ends.values()) - self.decoded)
        return max(self.at, self.ready) + self._prefill + steps * self._step_s()

    def advance(self, now: float) -> list[Request]:
        """What has ended by `now`, which is no later than `next_end`."""
        seconds = max(0.0, now - max(self.at, self.ready))
        self.at = max(self.at, now)
        read = min(self._prefill, seconds)
        self._prefill -= read
        if self._ends and seconds > read:
            self.decoded += (seconds - read) / self._step_s()
        ended = [request for end, request in self._ends.values() if end <= self.decoded + 1e-6]
        for request in ended:
            del self._ends[request.key], self._done[request.key]
        self._admit()
        return ended

    def _step_s(self) -> float:
        return self.bed.step_s + self.bed.request_s * len(self._ends)

    def _admit(self) -> None:
        while self._queue and len(self._ends) < self.bed.slots:
            request = heapq.heappop(self._queue)[2]
            self._prefill += request.read * self.bed.prefill_s
            # Whole steps: a request that joins takes part from the next one on.
            self._ends[request.key] = (self.decoded + request.more - self._done[request.key], request)


class Machine(Protocol):
    """Oversampler or SegmentSteps."""

    metrics: StepMetrics

    def begin(self, wanted: int) -> list[Instruction]: ...
    def drawn(self, groups: Sequence[str]) -> list[Instruction]: ...
    def report(self, it: Report) -> list[Instruction]: ...
    def to_dict(self) -> dict[str, Any]: ...


class Source(Protocol):
    """Where new prompt groups come from. trained: called after each step."""

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
    tokens that the request has by then, None where it has just ended."""

    def __init__(
        self, name: str, machine: Machine, source: Source, recording: Recording, batch: int
    ) -> None:  # fmt: skip
        self.name, self.machine, self.source = name, machine, source
        self.totals = Totals()
        self.step, self.finished, self.batch_tokens = 0, False, 0
        self.launched = self.done = 0
        self.submit: Callable[[Request], None]
        self.abort: Callable[[Key], int | None]
        self._batch = batch
        self._groups: dict[str, PromptGroup] = {}
        self._samples: dict[tuple[str, int], _Sample] = {}

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


class Deferred:
    """A source of prompt groups: a window of an epoch is gathered, and handed out round by round."""

    def __init__(self, recording: Recording, batch: int, estimates: Estimates) -> None:
        self._rounds = TailRounds(batch, estimates)
        self._groups = {group.name: group for group in recording.groups}
        self._windows = list(recording.epochs)

    def draw(self, count: int) -> list[PromptGroup]:
        """Fewer where the data ends."""
        names = self._rounds.take(count)
        while len(names) < count and self._windows:
            window = self._windows.pop(0)
            self._rounds.gather([group.name for group in window], [group.prompt for group in window])
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


class Known:
    """Estimates of who knows all lengths beforehand: what planning could win at most."""

    def __init__(self, recording: Recording) -> None:
        self._lengths = {id(group.prompt): group.lengths for group in recording.groups}  # a prompt object for each draw

    def observe(self, prompt: Prompt, epoch: int, lengths: Sequence[int]) -> None:
        """Nothing to learn."""

    def expect(self, prompts: Sequence[Prompt]) -> Expected:
        """The means that they will have, and their longest."""
        lengths = [self._lengths[id(prompt)] for prompt in prompts]
        mean, longest = (np.array([of(its) for its in lengths], dtype=np.float64) for of in (np.mean, np.max))
        return Expected(mean, np.zeros(len(mean)), longest)

    def knows(self, prompt: Prompt) -> bool:
        """It does."""
        return True
