"""A recorded job's rollouts, run again under other settings by the machines that the product runs: Oversampler, SegmentSteps.

What lasts how long comes from engines.py, how long each response gets from the recording. A response that begins again from its
prompt gets the length of one of its prompt group's, drawn by chance: it is another answer to the same prompt.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from verl_mux.rollout.control.launch_order import turns
from verl_mux.rollout.control.oversampling import Oversampler
from verl_mux.rollout.control.segment_steps import SegmentSteps
from verl_mux.rollout.lengths.rows import LengthRow, Prompt
from verl_mux.rollout.messages import Abort, Draw, Drop, Finish, Instruction, Launch, Report
from verl_mux.what_if.engines import Engines, Speed
from verl_mux.what_if.foresight import BY_ID, Foresight
from verl_mux.what_if.prompts import Arrival, Rounds, Source
from verl_mux.what_if.recording import Group, Recording, Sample
from verl_mux.what_if.settings import Settings

Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Step:
    """Of one step: seconds of its rollout, and of the responses trained: tokens, the sum of tokens times how many versions their
    weights were behind, the most that any was behind, and their scores."""

    rollout_s: float
    tokens: int
    behind: int
    oldest: int
    scores: tuple[float, ...]
    generated: int


@dataclass
class _Live:
    """A sample on its way. segments: (tokens, step) so far."""

    sample: Sample
    target: int
    group: Group
    segments: list[tuple[int, int]] = field(default_factory=list)
    running: int = 0  # tokens that it was launched to get

    @property
    def tokens(self) -> int:
        return sum(tokens for tokens, _ in self.segments)


class Rerun:
    """step() after step(); or, beside others on one clock, begin -> advance until it is over -> finish.

    stream: prompt groups in the order in which the data gives them; it must not end. worst: score of what is cut short.
    """

    def __init__(
        self, settings: Settings, recording: Recording, stream: Iterator[Group], speed: Speed, worst: float, seed: int = 0
    ) -> None:  # fmt: skip
        self._settings, self._speed, self._replicas, self._worst = settings, speed, recording.replicas, worst
        self._random = random.Random(seed)
        learns = settings.predictor if recording.recurs and settings.predictor in BY_ID else None
        self._foresight = Foresight(learns, seed)
        self._order = self._foresight.predictor()
        self._source: Source = Arrival(stream)
        if settings.rollout.defers:
            steps = settings.defer.window
            window = len(recording.groups) if steps is None else steps * settings.wanted
            self._source = Rounds(stream, settings.rollout.defer, settings.wanted, settings.samples, self._foresight, window)
        limits = settings.limits
        self._machine: Oversampler | SegmentSteps = (
            Oversampler(settings.oversample, settings.samples, settings.lag)
            if limits is None
            else SegmentSteps(limits, settings.samples, settings.oversample.rate, settings.oversample.max_failures, settings.lag)
        )
        self._longest = settings.longest if limits is None else limits.longest
        self._live: dict[Key, _Live] = {}
        self._prompts: dict[str, Prompt] = {}  # of groups whose lengths were foretold
        self._serial = itertools.count()
        self._number = 0

    def step(self) -> Step:
        """One step's rollout."""
        self.begin(0.0)
        while not self.over:
            self.advance()
        return self.finish()

    def begin(self, now: float) -> None:
        """The next step's rollout begins, at `now` seconds."""
        self._number, self._began = self._number + 1, now
        self._engines = Engines(self._speed, self._replicas, self._settings.slots, now)
        self._away: list[tuple[float, int, Key]] = []
        self._finished: tuple[str, ...] | None = None
        self._generated = self.done = 0
        self._launched: set[Key] = set()
        self._carry_out(self._machine.begin(self._settings.wanted))

    def next_at(self) -> float:
        """When something happens next."""
        return min(self._away[0][0] if self._away else math.inf, self._engines.next_end())

    @property
    def over(self) -> bool:
        """Are the step's groups complete?"""
        return self._finished is not None

    def advance(self) -> None:
        """Lets the next thing happen."""
        until = self._away[0][0] if self._away else math.inf
        ended = self._engines.next_before(until)
        if ended is None:
            assert self._away, "nothing runs and the step is not over"
            at, _, key = heapq.heappop(self._away)
            self._engines.now = max(self._engines.now, at)
            return self._report(key, "eos")
        live = self._live[ended.name]
        live.segments.append((live.running, self._number))
        self._generated += live.running
        if live.tokens < min(live.target, self._longest):
            self._report(ended.name, "length")
        elif live.sample.away_s > 1e-6:
            heapq.heappush(self._away, (ended.at + live.sample.away_s, next(self._serial), ended.name))
        else:
            self._report(ended.name, "eos")

    def token_s(self, running: float) -> float:
        """Seconds of a token while so many requests run on a replica."""
        return self._speed.base + self._speed.each * running

    @property
    def launched(self) -> int:
        """Samples of this step; `done` of them have ended by themselves."""
        return len(self._launched)

    def running(self, now: float) -> list[dict[Key, tuple[int, int]]]:
        """Of each replica that is left, by `now`: its requests, with the tokens read and generated, and those of the response."""
        found = self._engines.tokens(now)
        lives = [{key: (self._live[key], got) for key, got in its.items()} for its in found]
        return [{key: (it.sample.prompt + it.tokens + got, it.tokens + got) for key, (it, got) in its.items()} for its in lives]

    def gather(self, now: float, leaving: Collection[int], moves: Mapping[Key, int]) -> None:
        """These replicas are given back at `now`; their requests go on elsewhere, read again there: replica by request."""
        for key, target in moves.items():
            live = self._live[key]
            got = min(self._engines.abort(key, now), live.running)
            self._generated += got
            live.segments.append((got, self._number))
            live.running -= got
            self._engines.submit(key, live.sample.prompt + live.tokens, live.running, target)
        self._engines.close(leaving)

    def _report(self, key: Key, why: str) -> None:
        live = self._live[key]
        new = live.segments[-1][0] if live.segments else 0
        kind = "done" if why == "eos" else "paused"
        self.done += kind == "done"
        self._carry_out(self._machine.report(Report(kind, *key, new, live.tokens, self._number - 1, self._why(live, why))))

    def _why(self, live: _Live, why: str) -> str:
        return "length" if why == "eos" and live.target > self._longest else why

    def _carry_out(self, instructions: list[Instruction]) -> None:
        for it in instructions:
            if isinstance(it, Launch):
                self._launch(it)
        for it in instructions:
            if isinstance(it, Abort):
                self._abort((it.group, it.sample))
            elif isinstance(it, Drop):
                self._forget(it.group)
            elif isinstance(it, Finish):
                self._finished = it.groups
            elif isinstance(it, Draw):
                self._draw(it.count)

    def _launch(self, it: Launch) -> None:
        key = it.group, it.sample
        live = self._live[key]
        if it.kept == 0 and live.segments:
            live.target, live.segments = self._random.choice(live.group.samples).tokens, []
        left = min(live.target, self._longest) - live.tokens
        live.running = max(1, left if it.budget is None else min(left, it.budget))
        self._launched.add(key)
        self._engines.submit(key, live.sample.prompt + live.tokens, live.running)

    def _abort(self, key: Key) -> None:
        away = [entry for entry in self._away if entry[2] == key]
        if away:  # its tokens are all there: it ends before the abort reaches it
            self._away.remove(away[0])
            heapq.heapify(self._away)
            return self._report(key, "eos")
        live = self._live[key]
        got = min(self._engines.abort(key), live.running)
        self._generated += got
        live.segments.append((got, self._number))
        self._report(key, "abort")

    def _draw(self, count: int) -> None:
        drawn = self._source.draw(count)
        for name, group in drawn:
            for number in range(self._settings.samples):
                sample = group.samples[number % len(group.samples)]
                self._live[name, number] = _Live(sample, sample.tokens, group)
        scores = self._scores(drawn)
        order = np.argsort(turns(self._settings.launch_order, scores), kind="stable")
        self._carry_out(self._machine.drawn([drawn[place][0] for place in order]))

    def _scores(self, drawn: Sequence[tuple[str, Group]]) -> np.ndarray:
        """Predicted lengths; nothing is predicted where that orders nothing."""
        if self._settings.launch_order == "fifo":
            return np.zeros(len(drawn))
        self._prompts |= {name: self._foresight.prompt(name, group) for name, group in drawn}
        return self._order.predict([self._prompts[name] for name, _ in drawn])

    def _forget(self, group: str) -> None:
        for number in range(self._settings.samples):
            self._live.pop((group, number), None)

    def finish(self) -> Step:
        """What the rollout that is over was."""
        assert self._finished is not None
        trained = [self._live[group, number] for group in self._finished for number in range(self._settings.samples)]
        told = [(tokens, self._number - step) for live in trained for tokens, step in live.segments if tokens]
        scores = [self._score(live) for live in trained]
        step = Step(
            self._engines.now - self._began, sum(tokens for tokens, _ in told), sum(tokens * lag for tokens, lag in told),
            max((lag for _, lag in told), default=0), tuple(score for score in scores if score is not None), self._generated,
        )  # fmt: skip
        self._learn(
            {group: [self._live[group, number].tokens for number in range(self._settings.samples)] for group in self._finished}
        )
        for group in self._finished:
            self._forget(group)
        return step

    def _learn(self, lengths: Mapping[str, Sequence[int]]) -> None:
        self._source.trained(lengths)
        rows = [
            LengthRow(self._prompts[group], self._number, length)
            for group, its in lengths.items()
            if group in self._prompts
            for length in its
        ]
        self._order.observe(rows)

    def _score(self, live: _Live) -> float | None:
        """A response that the settings cut short is taken to earn as little as any did."""
        return self._worst if live.target > self._longest and live.sample.score is not None else live.sample.score
