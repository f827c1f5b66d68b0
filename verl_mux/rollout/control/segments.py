"""The two pools of segment rollout: samples still unfinished, and experience ready for training.

A response is generated in segments of at most `segment_length` tokens, one segment a step, each by the weights of its
step. Whoever is unfinished goes first in the next step, as prompt plus tokens so far.

    sample: NEW -> RUNNING -> EXPERIENCE (end of sequence, or the maximum: truncated) -> TRAINED
                       RUNNING -> UNFINISHED (segment full, aborted or failed) -> RUNNING
                       any but TRAINED -> DROPPED (with its whole prompt group)

Training takes whole prompt groups: a group is ready when all its samples are experience.
Invariants (asserted by the tests): each sample is in one state; no response is longer than the maximum; the lengths
of a sample's segments add up to its tokens and their versions never fall; unfinished ones start before new ones.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from verl_mux.rollout.messages import Segment


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


class SegmentPools:
    """add -> start -> ended* -> take, every step. Order of groups is the order in which they were added."""

    def __init__(self, limits: SegmentLimits) -> None:
        self.limits = limits
        self._groups: dict[str, list[Sample]] = {}

    def add(self, group: str, samples: int) -> None:
        """A new prompt group of so many samples."""
        if group in self._groups:
            raise RuntimeError(f"segments: prompt group {group} was added twice")
        self._groups[group] = [Sample(SampleKey(group, sample)) for sample in range(samples)]

    def start(self, to_the_end: Collection[str] = ()) -> list[Start]:
        """One segment for everything that waits: unfinished ones first, the oldest first, then the new.

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
        """Give a whole group up, whatever its samples do."""
        return self._leave(group, State.DROPPED)

    def unfinished(self) -> list[Sample]:
        """Samples that go on in a later round."""
        return self._in_state(State.UNFINISHED)

    @property
    def num_unready(self) -> int:
        """Prompt groups with a sample that is not experience yet."""
        return len(self._groups) - len(self.ready())

    def to_dict(self) -> dict[str, Any]:
        """For a checkpoint: plain lists. What runs is saved as it was before its segment."""
        return {"groups": {name: [_saved(t) for t in group] for name, group in self._groups.items()}}

    @classmethod
    def from_dict(cls, limits: SegmentLimits, saved: dict[str, Any]) -> SegmentPools:
        """Resume. Boundaries and versions are as saved; whatever ran is unfinished, or new if it had no segment yet."""
        out = cls(limits)
        for name, group in saved["groups"].items():
            out._groups[name] = [_restored(SampleKey(name, sample), t) for sample, t in enumerate(group)]
        return out

    def names(self) -> list[str]:
        """All groups here, in the order in which they were added."""
        return list(self._groups)

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


def _saved(t: Sample) -> dict[str, Any]:
    state = (State.UNFINISHED if t.segments else State.NEW) if t.state is State.RUNNING else t.state
    return {
        "state": state.value,
        "segments": [list(segment) for segment in t.segments],
        "truncated": t.truncated,
        "lost_tokens": t.lost_tokens,
    }


def _restored(key: SampleKey, saved: dict[str, Any]) -> Sample:
    segments = [Segment(*segment) for segment in saved["segments"]]
    return Sample(key, State(saved["state"]), segments, saved["truncated"], saved["lost_tokens"])
