"""Over-sampling: which prompt groups a step launches, when it cuts the rest off, and which of them go first in the next step.

Runs in the trainer's driver; called by trainer/step_rollout.py with what the agent loop workers report. Pure: events in,
instructions out.

A step wants n prompt groups. ceil((1 + rate) * n) are launched, those left over from earlier steps first; when n are
complete the rest is cut off and goes on, from its tokens, in the next step. A group that has been cut off `max_cuts` times, or
whose tokens would otherwise become older than the limit of lag, is protected: it has one of the n seats and runs to its end,
so the step waits for it.

    group: WAITING -> RUNNING -> COMPLETE -> trained
                      RUNNING -> CUT -> WAITING | dropped (too old, or failed too often)
                                 CUT -> COMPLETE (it ended before the abort reached it, and a seat was free)
                      any that ends with one reward for all its samples -> dropped; groups left to spare take its place, then new
                      ones, over-sampled as the step was

Invariants (asserted by the tests): a prompt drawn is in exactly one state; a step trains at most n groups, and fewer only
when the data ended; left-over groups start before new ones; a protected group is cut only when it fails too often; no token is
trained later than the limit of lag allows.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, Generic, NamedTuple, TypeVar

from verl_mux.rollout.instructions import Abort, Draw, Drop, Finish, Instruction, Launch, Report

STRATEGIES = ("protect", "wait", "drop")
MAX_CUTS = 2  # default of `mux.rollout.oversample.max_cuts`


class LagLimit(NamedTuple):
    """The most versions of the weights by which a trained token may be old (`mux.rollout.max_lag`).

    There is one version a step: a group whose oldest token was written k steps ago has age k, and lag k if it is trained now.
    Each step trains `wanted` groups, so the limit holds as long as at most (most + 1) * wanted groups are under way and the
    oldest go first whenever too many of them would be left for later.

    strategy: what becomes of a group that has to be trained now and is not complete. protect: it has a seat and runs to its
    end, the others are cut off as before. wait: no group is cut off until it is complete. drop: groups older than the limit are
    given up, so short responses are kept and long ones lost.
    """

    most: int
    strategy: str = "protect"

    def under_way(self, wanted: int) -> int:
        """Most groups that may be under way at once."""
        return (self.most + 1) * wanted

    def must_train(self, ages: Sequence[int], wanted: int) -> int:
        """How many of the oldest groups have to be trained in this step, of groups with these ages.

        A group of age a has to be trained within most - a further steps; h further steps train h * wanted groups.
        """
        within = sorted(self.most - age for age in ages)
        return max((bisect_right(within, further) - further * wanted for further in range(self.most + 1)), default=0)

    def due(self, first: Mapping[str, int], step: int, wanted: int) -> set[str]:
        """The oldest groups, as many as have to be trained in this step. first: of each group, in the order in which they were
        drawn, the step in which its oldest token was written."""
        if self.strategy == "drop":
            return set()
        oldest = sorted(first, key=first.__getitem__)
        return set(oldest[: self.must_train([step - first[name] for name in oldest], wanted)])

    def is_stale(self, first: int | None, step: int) -> bool:
        """Is a group with this oldest token too old to be trained in this step, where the strategy is to drop such groups?"""
        return self.strategy == "drop" and first is not None and step - first > self.most


@dataclass(slots=True)
class StepMetrics:
    """Groups and tokens of one step. A token is wasted when it is thrown away, in whichever step it was generated.

    kept: tokens of each response in the batch. cut: tokens so far of each response cut off. rounds: of segment rollout.
    reprefilled_tokens: kept tokens that the engine had to read again, their KV cache gone with the old weights.
    """

    launched_groups: int = 0
    trained_groups: int = 0
    requeued_groups: int = 0
    dropped_groups: int = 0
    failed_samples: int = 0
    generated_tokens: int = 0
    wasted_tokens: int = 0
    reprefilled_tokens: int = 0
    rounds: int = 1
    kept: list[int] = field(default_factory=list)
    cut: list[int] = field(default_factory=list)

    def as_dict(self) -> dict[str, float]:
        """Figures for the logger. aborted_ratio: share of the launched groups that is not in the batch. length_bias: mean length
        kept over mean length cut off; what was cut off would have become longer still, so below 1 the batch leans short."""
        figures = {name: value for name, value in asdict(self).items() if name not in ("kept", "cut")}
        return figures | {
            "aborted_ratio": (self.launched_groups - self.trained_groups) / max(1, self.launched_groups),
            "wasted_token_fraction": self.wasted_tokens / max(1, self.generated_tokens),
            "kept_mean_length": _mean(self.kept),
            "cut_mean_length": _mean(self.cut),
            "length_bias": _mean(self.kept) / _mean(self.cut) if self.kept and sum(self.cut) else 1.0,
        }


def _mean(values: list[int]) -> float:
    return sum(values) / max(1, len(values))


def groups_to_launch(rate: float, wanted: int) -> int:
    """ceil((1 + rate) * wanted): 1.1 * 10 is 11 and not 12."""
    return math.ceil(round((1 + rate) * wanted, 9))


_Group = TypeVar("_Group")


class StepMachine(ABC, Generic[_Group]):
    """What over-sampling and segments (segments.py) share: begin -> drawn -> report* -> Finish -> begin of the next step.

    samples: responses of a prompt group. Group names are unique for each draw: the same prompt drawn in the next epoch has
    another name. A report of a sample that is not running (an abort and an end that crossed) changes nothing.
    """

    max_failures = 3  # a group that has lost more samples than this is dropped

    def __init__(self, samples: int, rate: float = 0.0, lag: LagLimit | None = None) -> None:
        self._samples, self._rate, self._lag = samples, rate, lag
        self.metrics = StepMetrics()
        self._groups: dict[str, _Group] = {}  # in the order they were drawn; neither trained nor dropped ones
        self._first: dict[str, int] = {}  # step in which a group's oldest token was written
        self._due: set[str] = set()  # groups that have to be trained in this step because of the limit of lag
        self._wanted = self._step = 0
        self._asked_for = 0  # prompts asked for with Draw and not yet reported
        self._data_ended = self._in_step = False

    def begin(self, wanted: int) -> list[Instruction]:
        """A step that trains `wanted` prompt groups begins. Raises RuntimeError: the last step has not finished."""
        if self._in_step:
            raise RuntimeError("a step is running; the next begins after its Finish")
        self._in_step, self._wanted, self._data_ended, self.metrics = True, wanted, False, StepMetrics()
        self._step += 1
        if self._lag is None:
            return self._begun()
        stale = [name for name in self._groups if self._lag.is_stale(self._first.get(name), self._step)]
        out: list[Instruction] = [self._drop(name, "stale") for name in stale]
        first = {name: self._first[name] for name in self._groups if name in self._first}
        self._due = self._lag.due(first, self._step, wanted)
        return [*out, *self._begun()]

    def drawn(self, groups: Sequence[str]) -> list[Instruction]:
        """The new prompts, in answer to Draw; fewer than asked for where the data ended."""
        self._data_ended |= len(groups) < self._asked_for
        self._asked_for = 0
        return self._drawn(groups)

    @abstractmethod
    def report(self, it: Report) -> list[Instruction]:
        """A worker's report of one sample."""

    def completes(self, it: Report) -> bool:
        """Is this the end of a group's last sample?"""
        group = self._groups.get(it.group)
        return group is not None and all(one.ended for at, one in enumerate(self._samples_of(group)) if at != it.sample)

    @abstractmethod
    def _samples_of(self, group: _Group) -> Sequence[Any]:
        """Each knows whether it has ended."""

    @property
    def _waits(self) -> bool:
        """Is no group cut off while one runs that has to be trained now?"""
        return self._lag is not None and self._lag.strategy == "wait"

    @abstractmethod
    def _begun(self) -> list[Instruction]:
        """What starts at the beginning of a step."""

    @abstractmethod
    def _drawn(self, groups: Sequence[str]) -> list[Instruction]:
        """Takes the new prompts in."""

    @abstractmethod
    def _tokens(self, group: _Group) -> int:
        """Tokens that the group has written."""

    def _drop(self, name: str, reason: str) -> Drop:
        self.metrics.wasted_tokens += self._tokens(self._leave(name))
        self.metrics.dropped_groups += 1
        return Drop(name, reason)

    def _leave(self, name: str) -> _Group:
        self._first.pop(name, None)
        self._due.discard(name)
        return self._groups.pop(name)

    def _ages(self) -> dict[str, int]:
        return {name: self._step - first for name, first in self._first.items()}


class State(Enum):
    """Where a prompt group is that is neither trained nor dropped."""

    WAITING = "waiting"
    RUNNING = "running"
    CUT = "cut"
    COMPLETE = "complete"


@dataclass(slots=True)
class _Sample:
    tokens: int = 0
    kept: int = 0  # of these tokens, those with which it was launched
    running: bool = False
    ended: bool = False  # by itself


@dataclass(slots=True)
class Group:
    """A prompt group under way."""

    name: str
    samples: list[_Sample]
    state: State = State.WAITING
    cuts: int = 0
    failures: int = 0


class Oversampler(StepMachine[Group]):
    """Launches too many prompt groups and cuts off those that are not needed; see the module."""

    def __init__(self, samples: int, rate: float = 0.0, max_cuts: int = MAX_CUTS, lag: LagLimit | None = None) -> None:
        super().__init__(samples, rate, lag)
        self._max_cuts = max_cuts

    def _begun(self) -> list[Instruction]:
        size = groups_to_launch(self._rate, self._wanted)
        size = size if self._lag is None else min(size, self._lag.under_way(self._wanted))
        if sum(map(self._protected, self._groups.values())) >= self._wanted and not self._waits:
            size = self._wanted  # any other group would be cut off at once
        out = [launch for group in self._left_over(size) for launch in self._launch(group)]
        # Protected groups without a seat are under way too: if new ones took their places, there would be ever more of them.
        self._asked_for = max(0, size - len(self._groups))
        return [*out, Draw(self._asked_for)] if self._asked_for else [*out, *self._settle()]

    def _drawn(self, groups: Sequence[str]) -> list[Instruction]:
        out: list[Instruction] = []
        for name in groups:
            self._groups[name] = Group(name, [_Sample() for _ in range(self._samples)])
            out += self._launch(self._groups[name])
        return [*out, *self._settle()]

    def report(self, it: Report) -> list[Instruction]:
        """A worker's report of one sample: it ended by itself, was cut off with its tokens kept, or was lost with them."""
        group = self._groups.get(it.group)
        if group is None or not group.samples[it.sample].running:
            return []
        return self._failed(group, it.sample) if it.kind == "failed" else self._stopped(group, it)

    def _failed(self, group: Group, number: int) -> list[Instruction]:
        """A sample starts again, unless its group was cut off or failed too often."""
        self.metrics.wasted_tokens += group.samples[number].tokens
        self.metrics.failed_samples += 1
        group.samples[number] = _Sample()
        group.failures += 1
        if not self._tokens(group):
            self._first.pop(group.name, None)
        if group.state is State.CUT:
            return self._settle()
        if group.failures <= self.max_failures:
            return [self._start(group, number)]
        return [*self._cut(group), *self._settle()]

    def _stopped(self, group: Group, it: Report) -> list[Instruction]:
        sample = group.samples[it.sample]
        sample.running, sample.ended, sample.tokens = False, it.kind == "done", it.total
        if it.total:
            self._first.setdefault(group.name, self._step)
        self.metrics.generated_tokens += max(0, it.total - sample.kept)
        if it.kind == "filtered":
            return [self._drop(group.name, "filtered"), *self._settle()]
        if not sample.ended and group.state is State.RUNNING:  # another part of the product aborted it; its group goes on
            return [self._start(group, it.sample)]
        return self._settle()

    def to_dict(self) -> dict[str, Any]:
        """For a checkpoint. A group that has not been trained by then is left over: its engine will be gone."""
        ages = self._ages()
        groups = [
            {
                "name": g.name, "cuts": g.cuts, "failures": g.failures, "tokens": [sample.tokens for sample in g.samples],
                "age": ages.get(g.name),
            }
            for g in self._groups.values()
        ]  # fmt: skip
        return {"groups": groups}

    def restore(self, saved: dict[str, Any]) -> None:
        """Resume: left-over groups go on from their tokens, in their order and with their cuts."""
        for it in saved["groups"]:
            samples = [_Sample(tokens=kept) for kept in it["tokens"]]
            self._groups[it["name"]] = Group(it["name"], samples, cuts=it["cuts"], failures=it["failures"])
            if it.get("age") is not None:
                self._first[it["name"]] = self._step - it["age"]

    # ---------------------------------------------------------------- which groups

    def _left_over(self, size: int) -> list[Group]:
        """At most `size` waiting groups: those that are due, then other protected ones, as far as there are seats, then the
        oldest."""
        chosen: list[Group] = []
        seats = self._wanted
        for group in sorted(self._groups.values(), key=lambda group: (group.name not in self._due, not self._protected(group))):
            if len(chosen) < size and (seats > 0 or not self._protected(group)):
                chosen.append(group)
                seats -= self._protected(group)
        return chosen

    def _protected(self, group: Group) -> bool:
        return group.cuts >= self._max_cuts or group.name in self._due

    def _samples_of(self, group: Group) -> list[_Sample]:
        return group.samples

    def _in_state(self, state: State) -> list[Group]:
        return [group for group in self._groups.values() if group.state is state]

    def _tokens(self, group: Group) -> int:
        return sum(sample.tokens for sample in group.samples)

    # ---------------------------------------------------------------- what becomes of them

    def _launch(self, group: Group) -> list[Instruction]:
        group.state = State.RUNNING
        self.metrics.launched_groups += 1
        return [self._start(group, number) for number, sample in enumerate(group.samples) if not sample.ended]

    def _start(self, group: Group, number: int) -> Launch:
        sample = group.samples[number]
        sample.running, sample.kept = True, sample.tokens
        return Launch(group.name, number, sample.kept)

    def _settle(self) -> list[Instruction]:
        """What follows from the samples' states: seats taken, the rest cut off, replacements, the end of the step."""
        out: list[Instruction] = []
        for group in list(self._groups.values()):
            if group.state in (State.RUNNING, State.CUT) and not any(sample.running for sample in group.samples):
                out += self._place(group)
        running = self._in_state(State.RUNNING)
        taken = len(self._in_state(State.COMPLETE)) + sum(map(self._protected, running))
        waits = self._waits and any(group.name in self._due for group in running)
        if taken >= self._wanted and not waits:
            for group in running:
                out += [] if self._protected(group) else self._cut(group)
        return [*out, *self._refill(), *self._finish()]

    def _place(self, group: Group) -> list[Instruction]:
        """A group without a running sample gets a seat, or waits for the next step, or is dropped."""
        seats = self._wanted - len(self._in_state(State.COMPLETE))
        reserved = sum(self._protected(other) for other in self._in_state(State.RUNNING) if other is not group)
        ended = all(sample.ended for sample in group.samples)
        if ended and seats > reserved and group.failures <= self.max_failures:
            group.state = State.COMPLETE
            return []
        self.metrics.cut += [sample.tokens for sample in group.samples]
        if group.failures > self.max_failures:
            return [self._drop(group.name, "failed")]
        group.state = State.WAITING
        group.cuts += 1
        self.metrics.requeued_groups += 1
        return []

    def _cut(self, group: Group) -> list[Instruction]:
        group.state = State.CUT
        return [Abort(group.name, number) for number, sample in enumerate(group.samples) if sample.running]

    def _refill(self) -> list[Instruction]:
        """New prompts where too few groups are left to fill the batch, some having failed too often or being filtered."""
        missing = self._wanted - len(self._in_state(State.RUNNING)) - len(self._in_state(State.COMPLETE))
        if self._asked_for or self._data_ended or not self._in_step or missing <= 0:
            return []
        size = groups_to_launch(self._rate, missing)
        size = size if self._lag is None else min(size, self._lag.under_way(self._wanted) - len(self._groups))
        self._asked_for = max(missing, size)
        return [Draw(self._asked_for)]

    def _finish(self) -> list[Instruction]:
        if not self._in_step or self._asked_for or self._in_state(State.RUNNING) or self._in_state(State.CUT):
            return []
        self._in_step = False
        batch = self._in_state(State.COMPLETE)
        for group in batch:
            self.metrics.kept += [sample.tokens for sample in group.samples]
            self._leave(group.name)
        self.metrics.trained_groups = len(batch)
        return [Finish(tuple(group.name for group in batch))]
