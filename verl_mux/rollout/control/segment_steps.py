"""Segment rollout, step by step: rounds of one segment each until enough prompt groups are ready. Events in, instructions out.

    begin -> draw up to the number to keep under way -> a round: one segment for everything unfinished, then for the new
          -> enough groups ready? Finish : draw as many as are still missing, another round with the same weights

A step waits for one segment and not for one response once enough are under way for a round to complete `wanted` groups.
How many that is depends on the lengths, so it is found by feedback: each group missing after a step's first round adds
one, each four groups ready beyond the batch in a step of one round take one away. With rate > 0 (over-sampling) it is
(1 + rate) * wanted, and a round is cut off as soon as enough groups are ready.

With a limit of lag (lag_limit.py) no more are kept under way than it allows, and a group that has to be trained in this step gets
a segment that is as long as its responses may still become; it is not cut off.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from verl_mux.rollout.control.lag_limit import LagLimit, must_train
from verl_mux.rollout.control.segments import End, SampleKey, SegmentLimits, SegmentPools
from verl_mux.rollout.control.step_metrics import StepMetrics
from verl_mux.rollout.messages import Abort, Draw, Drop, Finish, Instruction, Launch, Report


class SegmentSteps:
    """begin -> drawn -> ended* -> Finish -> begin of the next step. The same instructions as Oversampler's.

    max_failures: a group whose samples failed more often is dropped.
    """

    def __init__(
        self, limits: SegmentLimits, samples_per_group: int, rate: float = 0.0, max_failures: int = 3, lag: LagLimit | None = None
    ) -> None:  # fmt: skip
        self.pools, self._lag = SegmentPools(limits), lag
        self.metrics = StepMetrics()
        self._samples_per_group, self._rate, self._max_failures = samples_per_group, rate, max_failures
        self._failures: Counter[str] = Counter()
        self._first: dict[str, int] = {}  # step in which a group's oldest token was written
        self._due: set[str] = set()
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
        out = self._drop_stale()
        self._find_due()
        return [*out, *self._next()]

    def drawn(self, groups: Sequence[str]) -> list[Instruction]:
        """The new prompts, in answer to Draw; fewer than asked for where the data ended."""
        self._data_ended |= len(groups) < self._asked_for
        self._asked_for = 0
        for name in groups:
            self.pools.add(name, self._samples_per_group)
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

    @classmethod
    def from_dict(
        cls, limits: SegmentLimits, samples_per_group: int, saved: dict[str, Any], rate: float = 0.0, max_failures: int = 3,
        lag: LagLimit | None = None,
    ) -> SegmentSteps:  # fmt: skip
        """Resume: see SegmentPools.from_dict."""
        out = cls(limits, samples_per_group, rate, max_failures, lag)
        out._first = {group: -age for group, age in saved.get("ages", {}).items()}
        out.pools = SegmentPools.from_dict(limits, saved)
        out._failures, out._extra = Counter(saved["failures"]), saved["extra"]
        return out

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

    def _drop_stale(self) -> list[Instruction]:
        if self._lag is None or self._lag.strategy != "drop":
            return []
        stale = [group for group, first in self._first.items() if self._step - first > self._lag.most]
        return [self._drop(group, "stale") for group in stale]

    def _find_due(self) -> None:
        """The oldest groups, as many as have to be trained now."""
        self._due = set()
        if self._lag is not None and self._lag.strategy != "drop":
            order = {name: at for at, name in enumerate(self.pools.names())}
            aged = sorted(self._first, key=lambda group: (self._first[group], order[group]))
            count = must_train([self._step - self._first[group] for group in aged], self._wanted, self._lag.most)
            self._due = set(aged[:count])

    def _may_cut(self, running: SampleKey) -> bool:
        if running.group in self._due:
            return False
        waits = self._lag is not None and self._lag.strategy == "wait"
        return not (waits and any(other.group in self._due for other in self._running))

    def _next(self) -> list[Instruction]:
        """Finish, or another round."""
        groups = self.pools.ready()
        ready = len(groups)
        if ready >= self._wanted and self._due.issubset(groups):  # who has to be trained now may have lost its segment
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
        under_way = ready + self.pools.num_unready
        wanted = math.ceil(round((1 + self._rate) * self._wanted, 9)) + self._extra - under_way
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
