"""Segment rollout: responses generated in segments of bounded length, one segment a round, each by its step's weights.

Runs in the trainer's driver; called by trainer/step_rollout.py with what the agent loop workers report. Pure: events in,
instructions out.

    begin -> draw up to the number to keep under way -> a round: one segment for everything unfinished, then for the new
          -> enough groups ready? Finish : draw as many as are still missing, another round with the same weights

    sample: new -> running -> experience (end of sequence, or the maximum) -> trained
                       running -> unfinished (segment full, aborted or failed) -> running
                       any but trained -> dropped (with its whole prompt group)

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
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_mux.rollout.control.oversampling import LagLimit, StepMachine, groups_to_launch
from verl_mux.rollout.instructions import Abort, Draw, Finish, Instruction, Launch, Report, Segment

# The loss of tokens of older weights is verl's rollout correction with this threshold; see segment_loss.py.
TIS_THRESHOLD = 2.0


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
class _Sample:
    """A response: its segments, the oldest first. started: in an earlier round. ended: it is experience. budget: most tokens of
    its present segment, None while it does not run."""

    segments: list[Segment] = field(default_factory=list)
    started: bool = False
    ended: bool = False
    budget: int | None = None

    @property
    def length(self) -> int:
        return sum(segment.length for segment in self.segments)

    def to_dict(self) -> dict[str, Any]:
        """For a checkpoint. A sample that runs is saved as it was before its segment."""
        begun = bool(self.segments) if self.budget is not None else self.started
        state = "experience" if self.ended else "unfinished" if begun else "new"
        return {"state": state, "segments": [list(segment) for segment in self.segments]}


class SegmentSteps(StepMachine[list[_Sample]]):
    """Rounds of segments until enough prompt groups are ready; see the module. Gives the same instructions as Oversampler."""

    def __init__(self, limits: SegmentLimits, samples: int, rate: float = 0.0, lag: LagLimit | None = None) -> None:
        super().__init__(samples, rate, lag)
        self._limits = limits
        self._failures: Counter[str] = Counter()
        self._extra = 0  # groups to keep under way beyond those that a step wants
        self._running: set[tuple[str, int]] = set()
        self._cutting = False

    def _begun(self) -> list[Instruction]:
        self.metrics.rounds = 0
        return self._next()

    def _drawn(self, groups: Sequence[str]) -> list[Instruction]:
        self._groups |= {name: [_Sample() for _ in range(self._samples)] for name in groups}
        self.metrics.launched_groups += len(groups)
        return self._round()

    def report(self, it: Report) -> list[Instruction]:
        """A worker's report: a sample's round is over, with `it.new` tokens by the weights of `it.version`.

        Raises:
            RuntimeError: it generated more than its budget.
        """
        key = it.group, it.sample
        if key not in self._running:
            return []
        sample = self._groups[it.group][it.sample]
        if it.new > (sample.budget or 0):
            raise RuntimeError(f"segments: {it.new} tokens for sample {it.sample} of {it.group}, budget {sample.budget}")
        self._running.discard(key)
        self.metrics.generated_tokens += it.new
        sample.budget = None
        if it.new and it.why != "failed":
            sample.segments.append(Segment(it.new, it.version))
            self._first.setdefault(it.group, self._step)
        sample.ended = it.why == "eos" or sample.length >= self._limits.longest
        out: list[Instruction] = [self._drop(it.group, "filtered")] if it.kind == "filtered" else []
        out += self._failed(it.group, it.new) if it.why == "failed" else []
        if self._rate > 0 and not self._cutting and len(self._ready()) >= self._wanted:
            aborts = [Abort(*running) for running in self._running if self._may_cut(running[0])]
            self._cutting = bool(aborts)
            out += aborts
        return out if self._running else [*out, *self._next()]

    def to_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        groups = {name: [sample.to_dict() for sample in samples] for name, samples in self._groups.items()}
        return {"groups": groups, "failures": dict(self._failures), "extra": self._extra, "ages": self._ages()}

    def restore(self, saved: dict[str, Any]) -> None:
        """Resume. Boundaries and versions are as saved; a sample that ran is unfinished, or new if it had no segment yet."""
        self._first = {group: self._step - age for group, age in saved.get("ages", {}).items()}
        for name, samples in saved["groups"].items():
            self._groups[name] = [
                _Sample([Segment(*it) for it in sample["segments"]], sample["state"] != "new", sample["state"] == "experience")
                for sample in samples
            ]
        self._failures, self._extra = Counter(saved["failures"]), saved["extra"]

    def _failed(self, group: str, lost: int) -> list[Instruction]:
        self.metrics.failed_samples += 1
        self.metrics.wasted_tokens += lost
        self._failures[group] += 1
        if self._failures[group] <= self.max_failures:
            return []
        self._running = {running for running in self._running if running[0] != group}
        return [self._drop(group, "failed")]

    def _may_cut(self, group: str) -> bool:
        waits = self._waits and any(other in self._due for other, _ in self._running)
        return group not in self._due and not waits

    def _ready(self) -> list[str]:
        """Prompt groups all of whose samples are experience, the oldest first."""
        return [name for name, samples in self._groups.items() if all(sample.ended for sample in samples)]

    def _samples_of(self, group: list[_Sample]) -> list[_Sample]:
        return group

    def _tokens(self, group: list[_Sample]) -> int:
        return sum(sample.length for sample in group)

    def _leave(self, name: str) -> list[_Sample]:
        self._failures.pop(name, None)
        return super()._leave(name)

    def _next(self) -> list[Instruction]:
        """Finish, or another round."""
        groups = self._ready()
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
        under_way = len(self._groups)
        wanted = groups_to_launch(self._rate, self._wanted) + self._extra - under_way
        if self._rate == 0 and self.metrics.rounds > 0:
            wanted = self._wanted - ready
        return max(0, wanted if self._lag is None else min(wanted, self._lag.under_way(self._wanted) - under_way))

    def _round(self) -> list[Instruction]:
        """One segment for every sample that waits: unfinished ones first, the oldest first, then the new."""
        waiting = [(name, at, it) for name, samples in self._groups.items() for at, it in enumerate(samples) if not it.ended]
        if not waiting:
            return self._finish()
        launches: list[Instruction] = []
        kept = 0
        for name, number, sample in sorted(waiting, key=lambda place: not place[2].started):
            left = self._limits.longest - sample.length
            # A group that has to be trained now gets a segment as long as its responses may still become.
            to_the_end = name in self._due or (self._lag is not None and not self._lag.most)
            sample.started, sample.budget = True, left if to_the_end else min(self._limits.segment_length, left)
            launches.append(Launch(name, number, sample.length, sample.budget))
            kept += sample.length
        self._cutting, self._running = False, {(name, number) for name, number, _ in waiting}
        self.metrics.rounds += 1
        if self.metrics.rounds == 1:
            self.metrics.reprefilled_tokens += kept
        return launches

    def _finish(self) -> list[Instruction]:
        self._in_step = False
        ready = self._ready()
        if self.metrics.rounds == 1:
            self._extra = max(0, self._extra - max(0, len(ready) - self._wanted) // 4)
        taken = sorted(ready, key=lambda name: name not in self._due)[: self._wanted]
        self.metrics.trained_groups = len(taken)
        self.metrics.kept = [sample.length for name in taken for sample in self._leave(name)]
        left = {name: [it for it in samples if it.started and not it.ended] for name, samples in self._groups.items()}
        self.metrics.requeued_groups = sum(map(bool, left.values()))
        self.metrics.cut = [sample.length for samples in left.values() for sample in samples]
        return [Finish(tuple(taken))]
