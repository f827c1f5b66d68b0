"""Which prompt groups to launch, when to stop, and what becomes of those cut off. Events in, instructions out.

A step wants n prompt groups. ceil((1 + rate) * n) are launched, those left over from earlier steps first; when n are
complete the rest is cut off. A group cut off `max_cuts` times, or whose tokens would become older than the limit of lag allows
(lag_limit.py), is protected: one of the n seats is its own and it runs to its end, so the step waits for it.

    group: WAITING -> RUNNING -> COMPLETE -> TRAINED
                      RUNNING -> CUT -> WAITING (requeue) | DROPPED (drop, too old, or failed too often)
                                 CUT -> COMPLETE (it ended before the abort reached it, and a seat was free)

Invariants (asserted by the tests): a prompt drawn is in exactly one state; a step trains at most n groups, and fewer only
when the data ended; left-over groups start before new ones; a protected group is cut only when it fails too often; no token is
trained later than the limit of lag says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec

from verl_mux.rollout.control.lag_limit import LagLimit, must_train
from verl_mux.rollout.control.step_metrics import StepMetrics
from verl_mux.rollout.messages import Abort, Draw, Drop, Finish, Instruction, Launch, Report

LEFTOVERS = ("requeue", "drop")
TOKENS = ("resume", "restart")


class OversamplingPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of `mux.rollout.oversample`. rate: prompt groups launched beyond those wanted, as a share; 0: none.

    leftover: what becomes of the groups cut off. tokens: whether a requeued group goes on from its tokens or from its prompt.
    max_cuts: after so many cuts a group is protected. max_failures: a group that lost more samples than this is dropped.
    accept_length_bias: that `drop` and `restart`, which train short responses more often than long ones, are wanted all the same.
    """

    rate: float = 0.0
    leftover: str = "requeue"
    tokens: str = "resume"
    max_cuts: int = 2
    max_failures: int = 3
    accept_length_bias: bool = False


class State(str, Enum):
    """Where a prompt group is."""

    WAITING = "waiting"
    RUNNING = "running"
    CUT = "cut"
    COMPLETE = "complete"
    TRAINED = "trained"
    DROPPED = "dropped"


_MOVES = {
    State.WAITING: (State.RUNNING, State.DROPPED),
    State.RUNNING: (State.COMPLETE, State.CUT),
    State.CUT: (State.WAITING, State.DROPPED, State.COMPLETE),
    State.COMPLETE: (State.TRAINED,),
}


@dataclass(slots=True)
class _Sample:
    tokens: int = 0
    kept: int = 0  # of these tokens, what it was launched with
    running: bool = False
    ended: bool = False  # by itself


@dataclass(slots=True)
class _Group:
    name: str
    samples: list[_Sample]
    state: State = State.WAITING
    cuts: int = 0
    failures: int = 0
    first: int | None = None  # step in which its oldest token was written

    def move(self, state: State) -> None:
        if state not in _MOVES.get(self.state, ()):
            raise RuntimeError(f"prompt group {self.name}: {self.state.value} -> {state.value} is not a move")
        self.state = state

    @property
    def stopped(self) -> bool:
        return not any(sample.running for sample in self.samples)

    @property
    def ended(self) -> bool:
        return all(sample.ended for sample in self.samples)

    @property
    def tokens(self) -> int:
        return sum(sample.tokens for sample in self.samples)


class Oversampler:
    """begin -> drawn -> (sample_done | sample_cut | sample_failed)* -> Finish -> begin of the next step.

    Group names are unique for each draw: the same prompt drawn in the next epoch has another name. A report of a sample
    that is not running (an abort and an end that crossed, a group already settled) changes nothing.
    """

    def __init__(self, policy: OversamplingPolicy, samples_per_group: int, lag: LagLimit | None = None) -> None:
        self.policy, self._lag = policy, lag
        self.metrics = StepMetrics()
        self._samples_per_group = samples_per_group
        self._groups: dict[str, _Group] = {}  # in the order they were drawn; neither trained nor dropped ones
        self._wanted = self._step = 0
        self._due: set[str] = set()  # groups that the limit of lag wants trained in this step
        self._asked_for = 0  # prompts asked for with Draw and not yet reported
        self._data_ended = False
        self._in_step = False

    def begin(self, wanted: int) -> list[Instruction]:
        """A step that trains `wanted` prompt groups begins.

        Raises:
            RuntimeError: the last step has not finished.
        """
        if self._in_step:
            raise RuntimeError("over-sampling: a step is running; the next begins after its Finish")
        self._in_step, self._wanted, self._data_ended, self.metrics = True, wanted, False, StepMetrics()
        self._step += 1
        size = math.ceil(round((1 + self.policy.rate) * wanted, 9))  # 1.1 * 10 is 11 and not 12
        size = size if self._lag is None else min(size, self._lag.under_way(wanted))
        out = self._drop_stale(self._step)
        self._find_due()
        if sum(map(self._protected, self._groups.values())) >= wanted and not self._waits:
            size = wanted  # whoever else began would be cut off at once
        chosen = self._left_over(size)
        out += [instruction for group in chosen for instruction in self._launch(group)]
        # Protected groups without a seat are under way too: did new ones take their places, there would be ever more of them.
        self._asked_for = max(0, size - len(self._groups))
        return [*out, Draw(self._asked_for)] if self._asked_for else [*out, *self._settle()]

    def drawn(self, groups: Sequence[str]) -> list[Instruction]:
        """The new prompts, in answer to Draw; fewer than asked for where the data ended."""
        self._data_ended |= len(groups) < self._asked_for
        self._asked_for = 0
        out: list[Instruction] = []
        for name in groups:
            if name in self._groups:
                raise RuntimeError(f"over-sampling: prompt group {name} was drawn twice")
            self._groups[name] = _Group(name, [_Sample() for _ in range(self._samples_per_group)])
            out += self._launch(self._groups[name])
        return [*out, *self._settle()]

    def sample_done(self, group: str, sample: int, tokens: int) -> list[Instruction]:
        """A sample ended by itself, with `tokens` in all."""
        return self._stop(group, sample, tokens, ended=True)

    def sample_cut(self, group: str, sample: int, tokens: int) -> list[Instruction]:
        """An aborted sample came back, with `tokens` in all so far."""
        return self._stop(group, sample, tokens, ended=False)

    def sample_failed(self, group: str, sample: int) -> list[Instruction]:
        """A sample was lost and its tokens with it. It starts again, unless its group was cut off or failed too often."""
        it = self._running(group, sample)
        if it is None:
            return []
        lost = it.samples[sample]
        self.metrics.wasted_tokens += lost.tokens
        self.metrics.failed_samples += 1
        it.samples[sample] = _Sample()
        it.failures += 1
        it.first = it.first if it.tokens else None
        if it.state is State.CUT:
            return self._settle()
        if it.failures <= self.policy.max_failures:
            return [self._start(it, sample)]
        return [*self._cut(it), *self._settle()]

    def report(self, it: Report) -> list[Instruction]:
        """One of the three above, from a worker's report."""
        if it.kind == "done":
            return self.sample_done(it.group, it.sample, it.total)
        if it.kind == "paused":
            return self.sample_cut(it.group, it.sample, it.total)
        return self.sample_failed(it.group, it.sample)

    def to_dict(self) -> dict[str, Any]:
        """For a checkpoint. A group that has not been trained by then will be left over: its engine will be gone."""
        groups = [
            {
                "name": g.name, "cuts": g.cuts, "failures": g.failures, "tokens": [sample.tokens for sample in g.samples],
                "age": None if g.first is None else self._step - g.first,
            }
            for g in self._groups.values()
        ]  # fmt: skip
        return {"groups": groups}

    @classmethod
    def from_dict(
        cls, policy: OversamplingPolicy, samples_per_group: int, saved: dict[str, Any], lag: LagLimit | None = None
    ) -> Oversampler:
        """Resume. Left-over groups go on from their tokens or start again, in their order and with their cuts."""
        out = cls(policy, samples_per_group, lag)
        for group in saved["groups"]:
            tokens = group["tokens"] if policy.tokens == "resume" else [0] * samples_per_group
            samples = [_Sample(tokens=kept) for kept in tokens]
            age = group.get("age") if any(tokens) else None
            out._groups[group["name"]] = _Group(
                group["name"], samples, cuts=group["cuts"], failures=group["failures"], first=None if age is None else -age
            )
        return out

    def _left_over(self, size: int) -> list[_Group]:
        """At most `size` waiting groups: who is due, who else is protected, as far as they have seats, then the oldest."""
        chosen: list[_Group] = []
        seats = self._wanted
        for group in sorted(self._groups.values(), key=lambda group: (group.name not in self._due, not self._protected(group))):
            if len(chosen) < size and (seats > 0 or not self._protected(group)):
                chosen.append(group)
                seats -= self._protected(group)
        return chosen

    @property
    def _waits(self) -> bool:
        """Is nobody cut off while a group runs that has to be trained now?"""
        return self._lag is not None and self._lag.strategy == "wait"

    def _protected(self, group: _Group) -> bool:
        return group.cuts >= self.policy.max_cuts or group.name in self._due

    def _find_due(self) -> None:
        """The oldest groups, as many as have to be trained now."""
        self._due = set()
        if self._lag is not None and self._lag.strategy != "drop":
            aged = sorted(
                (group.first, at, name) for at, (name, group) in enumerate(self._groups.items()) if group.first is not None
            )
            count = must_train([self._step - first for first, _, _ in aged], self._wanted, self._lag.most)
            self._due = {name for _, _, name in aged[:count]}

    def _drop_stale(self, step: int) -> list[Instruction]:
        """Waiting groups that would be too old in this step, where the limit's strategy is to drop them."""
        out: list[Instruction] = []
        for group in self._in_state(State.WAITING):
            out += self._drop(group, "stale") if self._too_old(group, step) else []
        return out

    def _too_old(self, group: _Group, step: int) -> bool:
        if self._lag is None or self._lag.strategy != "drop" or group.first is None:
            return False
        return step - group.first > self._lag.most

    def _launch(self, group: _Group) -> list[Instruction]:
        group.move(State.RUNNING)
        self.metrics.launched_groups += 1
        return [self._start(group, index) for index, sample in enumerate(group.samples) if not sample.ended]

    def _running(self, name: str, sample: int) -> _Group | None:
        group = self._groups.get(name)
        return group if group is not None and group.samples[sample].running else None

    def _stop(self, name: str, sample: int, tokens: int, *, ended: bool) -> list[Instruction]:
        group = self._running(name, sample)
        if group is None:
            return []
        it = group.samples[sample]
        it.running, it.ended, it.tokens = False, ended, tokens
        group.first = self._step if group.first is None and tokens else group.first
        self.metrics.generated_tokens += max(0, tokens - it.kept)
        if not ended and group.state is State.RUNNING:  # aborted by someone else, who does not settle its group's fate
            return [self._start(group, sample)]
        return self._settle()

    def _start(self, group: _Group, index: int) -> Launch:
        """Start a sample, from its tokens or anew as the policy says."""
        sample = group.samples[index]
        if self.policy.tokens == "restart":
            self.metrics.wasted_tokens += sample.tokens
            sample.tokens = 0
            group.first = group.first if group.tokens else None
        sample.running, sample.kept = True, sample.tokens
        return Launch(group.name, index, sample.kept)

    def _settle(self) -> list[Instruction]:
        """Whatever follows from the samples' states: seats taken, the rest cut off, replacements, the end of the step."""
        out: list[Instruction] = []
        for group in list(self._groups.values()):
            if group.state in (State.RUNNING, State.CUT) and group.stopped:
                out += self._place(group)
        running = self._in_state(State.RUNNING)
        taken = len(self._in_state(State.COMPLETE)) + sum(map(self._protected, running))
        waits = self._waits and any(group.name in self._due for group in running)
        if taken >= self._wanted and not waits:
            for group in running:
                out += [] if self._protected(group) else self._cut(group)
        return [*out, *self._refill(), *self._finish()]

    def _place(self, group: _Group) -> list[Instruction]:
        """A group none of whose samples runs any more."""
        seats = self._wanted - len(self._in_state(State.COMPLETE))
        reserved = sum(self._protected(g) for g in self._in_state(State.RUNNING) if g is not group)
        if group.ended and seats > reserved and group.failures <= self.policy.max_failures:
            group.move(State.COMPLETE)
            return []
        if group.state is State.RUNNING:
            group.move(State.CUT)
        self.metrics.cut += [sample.tokens for sample in group.samples]
        if group.failures > self.policy.max_failures:
            return self._drop(group, "failed")
        if self.policy.leftover == "drop":
            return self._drop(group, "cut")
        group.move(State.WAITING)
        group.cuts += 1
        self.metrics.requeued_groups += 1
        if self.policy.tokens == "restart":
            self.metrics.wasted_tokens += group.tokens
            group.samples, group.first = [_Sample() for _ in group.samples], None
        return []

    def _drop(self, group: _Group, reason: str) -> list[Instruction]:
        self.metrics.wasted_tokens += group.tokens
        self.metrics.dropped_groups += 1
        self._leave(group, State.DROPPED)
        return [Drop(group.name, reason)]

    def _cut(self, group: _Group) -> list[Instruction]:
        group.move(State.CUT)
        return [Abort(group.name, index) for index, sample in enumerate(group.samples) if sample.running]

    def _refill(self) -> list[Instruction]:
        """New prompts where too few groups are left to fill the batch, some having failed too often."""
        live = len(self._in_state(State.RUNNING)) + len(self._in_state(State.COMPLETE))
        if self._asked_for or self._data_ended or not self._in_step or live >= self._wanted:
            return []
        self._asked_for = self._wanted - live
        return [Draw(self._asked_for)]

    def _finish(self) -> list[Instruction]:
        if not self._in_step or self._asked_for or self._in_state(State.RUNNING) or self._in_state(State.CUT):
            return []
        self._in_step = False
        batch = self._in_state(State.COMPLETE)
        for group in batch:
            self.metrics.kept += [sample.tokens for sample in group.samples]
            self._leave(group, State.TRAINED)
        self.metrics.trained_groups = len(batch)
        return [Finish(tuple(group.name for group in batch))]

    def _leave(self, group: _Group, state: State) -> None:
        group.move(state)
        del self._groups[group.name]

    def _in_state(self, state: State) -> list[_Group]:
        return [group for group in self._groups.values() if group.state is state]
