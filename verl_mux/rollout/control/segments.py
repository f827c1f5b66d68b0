"""Segment rollout: responses generated in segments of bounded length, one segment a round, each by its step's weights.

Runs in the trainer's driver; called by trainer/step_rollout.py with what the agent loop workers report. Pure: events in,
instructions out. `SegmentPools` knows where each sample is, `SegmentSteps` runs a step's rounds over it.

    begin -> draw up to the number to keep under way -> a round: one segment for everything unfinished, then for the new
          -> enough groups ready? Finish : draw as many as are still missing, another round with the same weights

    sample: NEW -> RUNNING -> EXPERIENCE (end of sequence, or the maximum: truncated) -> TRAINED
                       RUNNING -> UNFINISHED (segment full, aborted or failed) -> RUNNING
                       any but TRAINED -> DROPPED (with its whole prompt group)

Training takes whole prompt groups: a group is ready when all its samples are experience. A step waits for one segment, and
not for one response, once enough groups are under way for a round to complete `wanted` of them. How many that is depends on the
lengths, so it is found by feedback: each group missing after a step's first round adds one, each four groups ready beyond the
batch in a step of one round take one away. With rate > 0 (over-sampling) it is (1 + rate) * wanted, and a round is cut off as
soon as enough groups are ready.

With a limit of lag (oversampling.py) no more groups are kept under way than it allows, and a group that has to be trained in this
step gets a segment as long as its responses may still become; it is not cut off.
Invariants (asserted by the tests): each sample is in one state; no response is longer than the maximum; the lengths of a sample's
segments add up to its tokens and their versions never fall; unfinished samples start before new ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from verl_mux.rollout.control.oversampling import MAX_FAILURES, LagLimit, StepMetrics, groups_to_launch
from verl_mux.rollout.instructions import Abort, Draw, Drop, Finish, Instruction, Launch, Report, Segment

# The loss of tokens of older weights is verl's rollout correction with this threshold; see segment_loss.py.
TIS_THRESHOLD = 2.0


class State(str, Enum):
    """Where a sample is."""

    NEW = "new"
    RUNNING = "running"
    UNFINISHED = "unfinished"
    EXPERIENCE = "experience"
    TRAINED = "trained"
    DROPPED = "dropped"


class End(str, Enum):
    """Why a segment ended: end of sequence, its token budget, an abort that kept its tokens, a failure that lost them."""

    EOS = "eos"
    LENGTH = "length"
    ABORT = "abort"
    FAILED = "failed"


_MOVES = {
    State.NEW: (State.RUNNING, State.DROPPED),
    State.RUNNING: (State.EXPERIENCE, State.UNFINISHED, State.DROPPED),
    State.UNFINISHED: (State.RUNNING, State.DROPPED),
    State.EXPERIENCE: (State.TRAINED, State.DROPPED),
}


class SampleKey(NamedTuple):
    """One sample: a prompt group's name, unique for each draw, and the sample's number in it."""

    group: str
    sample: int


class Start(NamedTuple):
    """Generate up to `budget` tokens after the `kept` ones."""

    key: SampleKey
    kept: int
    budget: int


@dataclass(frozen=True, slots=True)
class SegmentLimits:
    """All in tokens. A response ends at max_length or after max_segments full segments, whichever is less."""

    segment_length: int
    max_segments: int
    max_length: int

    @property
    def longest(self) -> int:
        """Most tokens of one response."""
        return min(self.max_length, self.segment_length * self.max_segments)


@dataclass(slots=True)
class Sample:
    """One sample: its response's segments, the oldest first."""

    key: SampleKey
    state: State = State.NEW
    segments: list[Segment] = field(default_factory=list)
    truncated: bool = False
    lost_tokens: int = 0
    budget: int = 0  # of its present segment

    @property
    def length(self) -> int:
        """Tokens of the response so far."""
        return sum(segment.length for segment in self.segments)

    def move(self, state: State) -> None:
        """Go to a state.

        Raises:
            RuntimeError: the table has no such move; nothing changed.
        """
        if state not in _MOVES.get(self.state, ()):
            raise RuntimeError(f"sample {self.key}: {self.state.value} -> {state.value} is not a move")
        self.state = state

    def to_dict(self) -> dict[str, Any]:
        """For a checkpoint. A sample that runs is saved as it was before its segment."""
        state = (State.UNFINISHED if self.segments else State.NEW) if self.state is State.RUNNING else self.state
        segments = [list(segment) for segment in self.segments]
        return {"state": state.value, "segments": segments, "truncated": self.truncated, "lost_tokens": self.lost_tokens}

    @classmethod
    def from_dict(cls, key: SampleKey, saved: dict[str, Any]) -> Sample:
        """Resume."""
        segments = [Segment(*segment) for segment in saved["segments"]]
        return cls(key, State(saved["state"]), segments, saved["truncated"], saved["lost_tokens"])


class SegmentPools:
    """add -> start -> ended* -> take, every step. Order of groups is the order in which they were added."""

    def __init__(self, limits: SegmentLimits) -> None:
        self.limits = limits
        self._groups: dict[str, list[Sample]] = {}

    def add(self, group: str, samples: int) -> None:
        """A new prompt group with this number of samples."""
        if group in self._groups:
            raise RuntimeError(f"segments: prompt group {group} was added twice")
        self._groups[group] = [Sample(SampleKey(group, sample)) for sample in range(samples)]

    def start(self, to_the_end: Collection[str] = ()) -> list[Start]:
        """One segment for every sample that waits: unfinished ones first, the oldest first, then the new.

        to_the_end: groups whose segment is as long as their responses may still become.
        """
        waiting = self._in_state(State.UNFINISHED) + self._in_state(State.NEW)
        for sample in waiting:
            sample.move(State.RUNNING)
            left = self.limits.longest - sample.length
            sample.budget = left if sample.key.group in to_the_end else min(self.limits.segment_length, left)
        return [Start(t.key, t.length, t.budget) for t in waiting]

    def ended(self, key: SampleKey, length: int, version: int, why: End) -> State:
        """A segment ended with `length` new tokens, by the weights of `version`. Where its sample is now.

        Raises:
            RuntimeError: it does not run, or generated more than its budget.
        """
        it = self._find(key)
        if it.state is not State.RUNNING or length > it.budget:
            raise RuntimeError(f"segments: {length} tokens for {key}, {it.state.value}, budget {it.budget}")
        if why is End.FAILED:
            it.lost_tokens += length
            length = 0
        if length:
            it.segments.append(Segment(length, version))
        it.truncated = why is not End.EOS and it.length >= self.limits.longest
        it.move(State.EXPERIENCE if why is End.EOS or it.truncated else State.UNFINISHED)
        return it.state

    def ready(self) -> list[str]:
        """Prompt groups all of whose samples are experience, the oldest first."""
        return [name for name, group in self._groups.items() if all(t.state is State.EXPERIENCE for t in group)]

    def take(self, count: int, first: Collection[str] = ()) -> list[list[Sample]]:
        """Up to `count` ready groups for training, those of `first` first; they leave the pools."""
        ready = sorted(self.ready(), key=lambda name: name not in first)
        return [self._leave(name, State.TRAINED) for name in ready[:count]]

    def drop(self, group: str) -> list[Sample]:
        """Give a whole group up, in whichever states its samples are."""
        return self._leave(group, State.DROPPED)

    def unfinished(self) -> list[Sample]:
        """Samples that go on in a later round."""
        return self._in_state(State.UNFINISHED)

    def names(self) -> list[str]:
        """All groups here, in the order in which they were added."""
        return list(self._groups)

    def to_dict(self) -> dict[str, Any]:
        """For a checkpoint: plain lists."""
        return {"groups": {name: [sample.to_dict() for sample in group] for name, group in self._groups.items()}}

    def restore(self, saved: dict[str, Any]) -> None:
        """Resume. Boundaries and versions are as saved; a sample that ran is unfinished, or new if it had no segment yet."""
        for name, group in saved["groups"].items():
            self._groups[name] = [Sample.from_dict(SampleKey(name, number), sample) for number, sample in enumerate(group)]

    def _find(self, key: SampleKey) -> Sample:
        try:
            return self._groups[key.group][key.sample]
        except (KeyError, IndexError):
            raise RuntimeError(f"segments: no sample {key}") from None

    def _in_state(self, state: State) -> list[Sample]:
        return [t for group in self._groups.values() for t in group if t.state is state]

    def _leave(self, name: str, state: State) -> list[Sample]:
        group = self._groups[name]
        for sample in group:
            sample.move(state)
        del self._groups[name]
        return group


class SegmentSteps:
    """begin -> drawn -> ended* -> Finish -> begin of the next step. The same instructions as Oversampler's.

    samples: responses of a prompt group.
    """

    def __init__(
        self, limits: SegmentLimits, samples: int, rate: float = 0.0, lag: LagLimit | None = None,
        max_failures: int = MAX_FAILURES,
    ) -> None:  # fmt: skip
        self.pools, self._lag = SegmentPools(limits), lag
        self.metrics = StepMetrics()
        self._samples, self._rate, self._max_failures = samples, rate, max_failures
        self._failures: Counter[str] = Counter()
        self._first: dict[str, int] = {}  # step in which a group's oldest token was written
        self._due: set[str] = set()  # groups that have to be trained in this step because of the limit of lag
        self._step = 0
        self._wanted = self._asked_for = self._extra = 0
        self._running: set[SampleKey] = set()
        self._data_ended = self._cutting = self._in_step = False

    def begin(self, wanted: int) -> list[Instruction]:
        """A step that trains `wanted` prompt groups begins.

        Raises:
            RuntimeError: the last step has not finished.
        """
        if self._in_step:
            raise RuntimeError("segments: a step is running; the next begins after its Finish")
        self._in_step, self._wanted, self._data_ended, self.metrics = True, wanted, False, StepMetrics(rounds=0)
        self._step += 1
        out: list[Instruction] = []
        if self._lag is not None:
            stale = [group for group, first in self._first.items() if self._lag.is_stale(first, self._step)]
            out += [self._drop(group, "stale") for group in stale]
            first = {name: self._first[name] for name in self.pools.names() if name in self._first}
            self._due = self._lag.due(first, self._step, wanted)
        return [*out, *self._next()]

    def drawn(self, groups: Sequence[str]) -> list[Instruction]:
        """The new prompts, in answer to Draw; fewer than asked for where the data ended."""
        self._data_ended |= len(groups) < self._asked_for
        self._asked_for = 0
        for name in groups:
            self.pools.add(name, self._samples)
        self.metrics.launched_groups += len(groups)
        return self._round()

    def report(self, it: Report) -> list[Instruction]:
        """A worker's report of a sample."""
        return self.ended(SampleKey(it.group, it.sample), it.new, it.version, End(it.why))

    def ended(self, key: SampleKey, new: int, version: int, why: End) -> list[Instruction]:
        """A sample's round is over, with `new` tokens by the weights of `version`. One that does not run changes nothing."""
        if key not in self._running:
            return []
        self._running.discard(key)
        self.pools.ended(key, new, version, why)
        self.metrics.generated_tokens += new
        if new and why is not End.FAILED:
            self._first.setdefault(key.group, self._step)
        out = self._failed(key, new) if why is End.FAILED else []
        if self._rate > 0 and not self._cutting and len(self.pools.ready()) >= self._wanted:
            aborts = [Abort(*running) for running in self._running if self._may_cut(running)]
            self._cutting = bool(aborts)
            out += aborts
        return out if self._running else [*out, *self._next()]

    def to_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        ages = {group: self._step - first for group, first in self._first.items()}
        return {**self.pools.to_dict(), "failures": dict(self._failures), "extra": self._extra, "ages": ages}

    def restore(self, saved: dict[str, Any]) -> None:
        """Resume: see SegmentPools.restore."""
        self._first = {group: self._step - age for group, age in saved.get("ages", {}).items()}
        self.pools.restore(saved)
        self._failures, self._extra = Counter(saved["failures"]), saved["extra"]

    def _failed(self, key: SampleKey, lost: int) -> list[Instruction]:
        self.metrics.failed_samples += 1
        self.metrics.wasted_tokens += lost
        self._failures[key.group] += 1
        if self._failures[key.group] <= self._max_failures:
            return []
        del self._failures[key.group]
        self._running = {running for running in self._running if running.group != key.group}
        return [self._drop(key.group, "failed")]

    def _drop(self, group: str, reason: str) -> Drop:
        self.metrics.wasted_tokens += sum(t.length for t in self.pools.drop(group))
        self.metrics.dropped_groups += 1
        self._first.pop(group, None)
        self._due.discard(group)
        return Drop(group, reason)

    def _may_cut(self, running: SampleKey) -> bool:
        if running.group in self._due:
            return False
        waits = self._lag is not None and self._lag.strategy == "wait"
        return not (waits and any(other.group in self._due for other in self._running))

    def _next(self) -> list[Instruction]:
        """Finish, or another round."""
        groups = self.pools.ready()
        ready = len(groups)
        if ready >= self._wanted and self._due.issubset(groups):  # a group that has to be trained now may have lost its segment
            return self._finish()
        if self.metrics.rounds == 1 and self._rate == 0:
            self._extra += max(0, self._wanted - ready)
        missing = self._missing(ready)
        if missing and not self._data_ended:
            self._asked_for = missing
            return [Draw(missing)]
        return self._round()

    def _missing(self, ready: int) -> int:
        """Prompt groups to draw before the next round."""
        under_way = len(self.pools.names())
        wanted = groups_to_launch(self._rate, self._wanted) + self._extra - under_way
        if self._rate == 0 and self.metrics.rounds > 0:
            wanted = self._wanted - ready
        return max(0, wanted if self._lag is None else min(wanted, self._lag.under_way(self._wanted) - under_way))

    def _round(self) -> list[Instruction]:
        starts = self.pools.start(self._due if self._lag is None or self._lag.most else self.pools.names())
        if not starts:
            return self._finish()
        self._cutting, self._running = False, {start.key for start in starts}
        self.metrics.rounds += 1
        if self.metrics.rounds == 1:
            self.metrics.reprefilled_tokens += sum(start.kept for start in starts)
        return [Launch(*start.key, start.kept, start.budget) for start in starts]

    def _finish(self) -> list[Instruction]:
        self._in_step = False
        if self.metrics.rounds == 1:
            self._extra = max(0, self._extra - max(0, len(self.pools.ready()) - self._wanted) // 4)
        taken = self.pools.take(self._wanted, first=self._due)
        self.metrics.trained_groups = len(taken)
        self.metrics.kept = [sample.length for group in taken for sample in group]
        left = self.pools.unfinished()
        self.metrics.requeued_groups = len({sample.key.group for sample in left})
        self.metrics.cut = [sample.length for sample in left]
        for group in taken:
            self._failures.pop(group[0].key.group, None)
            self._first.pop(group[0].key.group, None)
        return [Finish(tuple(group[0].key.group for group in taken))]
