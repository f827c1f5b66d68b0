"""A recorded job's rollouts, run again under other settings by the machines that the product runs: Oversampler, SegmentSteps.

What lasts how long comes from engines.py, how long each response gets from the recording. A response that begins again from its
prompt gets the length of one of its prompt group's, drawn by chance: it is another answer to the same prompt.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from verl_mux.rollout.control.launch_order import turns
from verl_mux.rollout.control.oversampling import Oversampler
from verl_mux.rollout.control.segment_steps import SegmentSteps
from verl_mux.rollout.messages import Abort, Draw, Drop, Finish, Instruction, Launch, Report
from verl_mux.simulation.recorded.engines import Engines, Speed
from verl_mux.simulation.recorded.recording import Group, Sample
from verl_mux.simulation.recorded.settings import Settings

Key = tuple[str, int]
TAU = 0.5  # rank agreement of predicted and true lengths, as a learning predictor reaches on known data


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
    """step() after step(). stream: prompt groups in the order in which the data gives them; it must not end."""

    def __init__(
        self,
        settings: Settings,
        stream: Iterator[Group],
        speed: Speed,
        replicas: int,
        worst: float,
        seed: int = 0,
        tau: float = TAU,
    ) -> None:
        self._settings, self._stream, self._speed, self._replicas = settings, stream, speed, replicas
        self._worst, self._tau = worst, tau
        self._random = random.Random(seed)
        limits = settings.limits
        self._machine: Oversampler | SegmentSteps = (
            Oversampler(settings.oversample, settings.samples, settings.lag)
            if limits is None
            else SegmentSteps(limits, settings.samples, settings.oversample.rate, settings.oversample.max_failures, settings.lag)
        )
        self._longest = settings.longest if limits is None else limits.longest
        self._live: dict[Key, _Live] = {}
        self._serial = itertools.count()
        self._number = 0

    def step(self) -> Step:
        """One step's rollout."""
        self._number += 1
        self._engines = Engines(self._speed, self._replicas, self._settings.slots)
        self._away: list[tuple[float, int, Key]] = []
        self._finished: tuple[str, ...] | None = None
        self._generated = 0
        self._carry_out(self._machine.begin(self._settings.wanted))
        while self._finished is None:
            self._report(*self._next())
        return self._told(self._engines.now)

    def _next(self) -> tuple[Key, str]:
        """The next sample that is back with its worker, and why."""
        while True:
            until = self._away[0][0] if self._away else math.inf
            ended = self._engines.next_before(until)
            if ended is None:
                assert self._away, "nothing runs and the step is not over"
                at, _, key = heapq.heappop(self._away)
                self._engines.now = max(self._engines.now, at)
                return key, "eos"
            live = self._live[ended.name]
            live.segments.append((live.running, self._number))
            self._generated += live.running
            if live.tokens < min(live.target, self._longest):
                return ended.name, "length"
            if live.sample.away_s > 1e-6:
                heapq.heappush(self._away, (ended.at + live.sample.away_s, next(self._serial), ended.name))
                continue
            return ended.name, "eos"

    def _report(self, key: Key, why: str) -> None:
        live = self._live[key]
        new = live.segments[-1][0] if live.segments else 0
        kind = "done" if why == "eos" else "paused"
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
        drawn = [next(self._stream) for _ in range(count)]
        names = [f"{group.name}#{next(self._serial)}" for group in drawn]
        for name, group in zip(names, drawn, strict=True):
            for number in range(self._settings.samples):
                sample = group.samples[number % len(group.samples)]
                self._live[name, number] = _Live(sample, sample.tokens, group)
        order = np.argsort(turns(self._settings.launch_order, self._scores(drawn)), kind="stable")
        self._carry_out(self._machine.drawn([names[place] for place in order]))

    def _scores(self, drawn: Sequence[Group]) -> np.ndarray:
        """Predicted lengths: true ones with as much noise as leaves a rank agreement of tau (of a bivariate normal,
        tau = 2/pi asin r; Greiner 1909)."""
        true = np.log([sum(s.tokens for s in group.samples) / len(group.samples) for group in drawn])
        r = math.sin(math.pi * self._tau / 2)
        noise = float(true.std()) * math.sqrt(1 / r**2 - 1) if r > 0 else 0.0
        return true + np.array([self._random.gauss(0, noise) for _ in drawn])

    def _forget(self, group: str) -> None:
        for number in range(self._settings.samples):
            self._live.pop((group, number), None)

    def _told(self, seconds: float) -> Step:
        assert self._finished is not None
        trained = [self._live[group, number] for group in self._finished for number in range(self._settings.samples)]
        told = [(tokens, self._number - step) for live in trained for tokens, step in live.segments if tokens]
        scores = [self._score(live) for live in trained]
        step = Step(
            seconds, sum(tokens for tokens, _ in told), sum(tokens * lag for tokens, lag in told),
            max((lag for _, lag in told), default=0), tuple(score for score in scores if score is not None), self._generated,
        )  # fmt: skip
        for group in self._finished:
            self._forget(group)
        return step

    def _score(self, live: _Live) -> float | None:
        """A response that the settings cut short is taken to earn as little as any did."""
        return self._worst if live.target > self._longest and live.sample.score is not None else live.sample.score
