"""The virtual-time engine of requests: engines with a fitted speed, and one rollout after the other under given keys.

Runs on the command line; called by what_if.py. Pure.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import polars as pl

from verl_mux.profiling.report.measures.analysis import MIN_TOKENS
from verl_mux.rollout.control.launch_order import turns
from verl_mux.rollout.control.oversampling import Oversampler
from verl_mux.rollout.control.segments import SegmentSteps
from verl_mux.rollout.instructions import Abort, Draw, Drop, Finish, Instruction, Launch, Report
from verl_mux.rollout.lengths.predictors import LengthRow, Prompt
from verl_mux.what_if.recorded_run import BY_ID, Foresight, Group, Recording, Rounds, Sample, Settings, named

MIN_STAYS = 20
_REFITS = 3


@dataclass(frozen=True, slots=True)
class Speed:
    """In seconds: a token is `base + each * running`; a batch of prompts `batch + prefill * tokens`."""

    base: float
    each: float
    batch: float
    prefill: float

    def times(self, factor: float) -> Speed:
        """All of it `factor` times as long."""
        return Speed(self.base * factor, self.each * factor, self.batch * factor, self.prefill * factor)

    def token_s(self, running: float) -> float:
        """Seconds of a token while `running` requests run on a replica."""
        return self.base + self.each * running


class Ended(NamedTuple):
    """A request left its engine at `at` seconds, all its tokens generated."""

    at: float
    name: tuple[str, int]


class Engines:
    """submit/abort at any time -> next_before() in order of time. slots: requests that one replica runs at once."""

    def __init__(self, speed: Speed, replicas: int, slots: int) -> None:
        self.now = 0.0  # seconds
        self._replicas = [_Replica(speed, slots) for _ in range(replicas)]
        self._where: dict[tuple[str, int], _Replica] = {}

    def submit(self, name: tuple[str, int], read: int, tokens: int) -> None:
        """`read`: prompt and kept tokens. Goes to the replica with the fewest requests, as verl's balancer sends it."""
        replica = min(self._replicas, key=lambda it: it.load)
        self._where[name] = replica
        replica.advance(self.now)
        replica.submit(name, read, tokens)

    def abort(self, name: tuple[str, int]) -> int:
        """Takes a request out; how many tokens it has got."""
        replica = self._where.pop(name)
        replica.advance(self.now)
        return replica.remove(name)

    def next_before(self, until: float) -> Ended | None:
        """Lets time pass until the next request ends; None where none does before `until`."""
        busy = [replica for replica in self._replicas if replica.load]
        first = min(busy, key=lambda it: it.next_end(), default=None)
        if first is None or first.next_end() > until:
            return None
        self.now = max(self.now, first.next_end())
        name = first.end(self.now)
        del self._where[name]
        return Ended(self.now, name)


class _Replica:
    """Virtual time counts tokens that each running request has got, so that a change of their number moves no other request."""

    def __init__(self, speed: Speed, slots: int) -> None:
        self._speed, self._slots = speed, slots
        self._at = self._virtual = 0.0
        self._stopped = 0.0  # seconds of prefill still to do
        self._read_at = -math.inf  # when the last batch of prompts came
        self._ends: list[tuple[float, int, tuple[str, int]]] = []
        self._began: dict[tuple[str, int], tuple[float, int]] = {}  # running: virtual start, serial
        self._waiting: deque[tuple[tuple[str, int], int, int]] = deque()
        self._serial = 0

    @property
    def load(self) -> int:
        return len(self._began) + len(self._waiting)

    def _token_s(self) -> float:
        return self._speed.token_s(len(self._began))

    def advance(self, now: float) -> None:
        left = max(now - self._at, 0.0)
        self._at = max(now, self._at)
        reading = min(left, self._stopped)
        self._stopped -= reading
        if self._began:
            self._virtual += (left - reading) / self._token_s()
        elif not self._waiting:
            self._stopped = 0.0

    def submit(self, name: tuple[str, int], read: int, tokens: int) -> None:
        self._waiting.append((name, read, tokens))
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting and len(self._began) < self._slots:
            name, read, tokens = self._waiting.popleft()
            self._serial += 1
            self._stopped += read * self._speed.prefill + (self._speed.batch if self._at > self._read_at else 0.0)
            self._read_at = self._at
            self._began[name] = self._virtual, self._serial
            heapq.heappush(self._ends, (self._virtual + tokens, self._serial, name))

    def next_end(self) -> float:
        self._drop_stale()
        return self._at + self._stopped + max(self._ends[0][0] - self._virtual, 0.0) * self._token_s()

    def _drop_stale(self) -> None:
        while self._ends and self._began.get(self._ends[0][2], (0.0, 0))[1] != self._ends[0][1]:
            heapq.heappop(self._ends)

    def end(self, now: float) -> tuple[str, int]:
        self.advance(now)
        self._drop_stale()
        self._virtual = max(self._virtual, self._ends[0][0])
        name = heapq.heappop(self._ends)[2]
        del self._began[name]
        self._let_in()
        return name

    def remove(self, name: tuple[str, int]) -> int:
        for place, waiting in enumerate(self._waiting):
            if waiting[0] == name:
                del self._waiting[place]
                return 0
        began, _ = self._began.pop(name)
        self._let_in()
        return int(self._virtual - began + 1e-9)


def fit(stays: pl.DataFrame) -> Speed | None:
    """From a job's stays (`measures.analysis.Engines.stays`): non-negative least squares of a token's time on how many ran
    beside it, weighted by tokens, without the stays farthest off. None where fewer than MIN_STAYS tell.

    Seconds of a stay on an idle replica are its decoding alone; `prefill_sec` is what the scheduler says where it does.
    """
    decoding = pl.coalesce("decode", pl.col("work") - pl.col("prefill").fill_null(0.0)).clip(1e-6)
    seen = stays.with_columns(decoding.alias("decoding"))
    seen = seen.with_columns(pl.Series("beside", _beside(seen)))
    # Of one that was cut off, the engine does not say when its prefill ended.
    known = seen.filter((pl.col("tokens") >= MIN_TOKENS) & (pl.col("work") > 0) & ~pl.col("cut").fill_null(False))
    if known.height < MIN_STAYS:
        return None
    work = known["decoding"].to_numpy()
    tokens, beside = known["tokens"].to_numpy().astype(float), known["beside"].to_numpy()
    per_token, weight = work / tokens, np.sqrt(tokens)
    kept = np.ones(len(work), dtype=bool)
    base, each = 0.0, 0.0
    for _ in range(_REFITS):
        base, each = _line(beside[kept], per_token[kept], weight[kept])
        off = np.abs(np.log(per_token / np.maximum(base + each * beside, 1e-9)))
        kept = off <= max(float(np.quantile(off, 0.95)), 1e-9)
    return Speed(base, each, *_prefill(stays))


def _prefill(stays: pl.DataFrame) -> tuple[float, float]:
    """Seconds of a batch of prompts, whatever its size, and of each token in it. Prompts are read in batches, and each stay says
    how long its batch took: what overlaps was one."""
    began = pl.col("start") + pl.col("held").fill_null(0.0) + pl.col("queue").fill_null(0.0)
    known = stays.filter(pl.col("prefill").is_not_null() & (pl.col("prompt") > 0)).select(
        "replica", began.alias("from"), "prefill", (pl.col("prompt") - pl.col("cached").fill_null(0)).alias("read")
    )
    until = (pl.col("from") + pl.col("prefill")).cum_max()
    is_new = (pl.col("from") >= until.shift()).fill_null(True).cum_sum().over("replica")
    batches = known.sort("from").with_columns(is_new.alias("batch")).group_by("replica", "batch").agg(
        ((pl.col("from") + pl.col("prefill")).max() - pl.col("from").min()).alias("seconds"), pl.col("read").sum()
    ).filter(pl.col("read") > 0)  # fmt: skip
    if batches.is_empty():
        return 0.0, 0.0
    return _line(batches["read"].to_numpy(), batches["seconds"].to_numpy(), np.ones(batches.height))


def _beside(stays: pl.DataFrame) -> np.ndarray:
    """How many stays decoded on the same replica, itself among them, averaged over each stay's decoding."""
    out = np.ones(stays.height)
    began = (pl.col("end") - pl.col("decoding")).alias("start")
    rows = stays.with_row_index("row").select("row", "replica", began, "end")
    for _, mine in rows.group_by("replica", maintain_order=True):
        start, end = mine["start"].to_numpy(), mine["end"].to_numpy()
        moments = np.concatenate([start, end])
        order = np.argsort(moments, kind="stable")
        change = np.concatenate([np.ones(len(start)), -np.ones(len(end))])[order]
        moments, running = moments[order], np.cumsum(change)
        spent = np.concatenate([[0.0], np.cumsum(running[:-1] * np.diff(moments))])
        until = np.interp(end, moments, spent) - np.interp(start, moments, spent)
        out[mine["row"].to_numpy()] = until / np.maximum(end - start, 1e-9)
    return out


def _line(x: np.ndarray, y: np.ndarray, weight: np.ndarray) -> tuple[float, float]:
    """Non-negative intercept and slope of the weighted least squares."""
    total = weight.sum()
    mx, my = float((weight * x).sum() / total), float((weight * y).sum() / total)
    spread = float((weight * (x - mx) ** 2).sum())
    slope = float((weight * (x - mx) * (y - my)).sum()) / spread if spread > 1e-9 else 0.0
    slope = min(max(slope, 0.0), my / max(mx, 1e-9))
    return my - slope * mx, slope


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
    """step() after step().

    stream: prompt groups in the order in which the data gives them; it must not end. worst: score of what is cut short.
    """

    def __init__(
        self, settings: Settings, recording: Recording, stream: Iterator[Group], speed: Speed, worst: float, seed: int = 0
    ) -> None:  # fmt: skip
        self._settings, self.speed, self._replicas, self._worst = settings, speed, recording.replicas, worst
        self._random = random.Random(seed)
        keys = settings.rollout
        learns = keys.dispatch.predictor if recording.recurs and keys.dispatch.predictor in BY_ID else None
        self._foresight = Foresight(learns, seed)
        self._order = self._foresight.predictor()
        self._rounds: Rounds | None = None
        if keys.defers:
            self._rounds = Rounds(stream, settings.wanted, settings.samples, self._foresight, len(recording.groups))
        self._stream = named(stream)
        limits, lag = keys.segment_limits(settings.longest), keys.lag_limit(settings.threshold)
        self._machine: Oversampler | SegmentSteps = (
            Oversampler(settings.samples, keys.oversample.rate, keys.oversample.max_cuts, lag)
            if limits is None
            else SegmentSteps(limits, settings.samples, keys.oversample.rate, lag)
        )
        self._longest = settings.longest if limits is None else limits.longest
        self._live: dict[Key, _Live] = {}
        self._prompts: dict[str, Prompt] = {}  # of groups whose lengths were predicted
        self._serial = itertools.count()
        self._number = 0

    def step(self) -> Step:
        """One step's rollout."""
        self._number += 1
        self._engines = Engines(self.speed, self._replicas, self._settings.slots)
        self._away: list[tuple[float, int, Key]] = []
        self._finished: tuple[str, ...] | None = None
        self._generated = 0
        self._carry_out(self._machine.begin(self._settings.wanted))
        while self._finished is None:
            self._advance()
        return self._trained(self._finished)

    def _advance(self) -> None:
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

    def _report(self, key: Key, why: str) -> None:
        live = self._live[key]
        new = live.segments[-1][0] if live.segments else 0
        kind = "done" if why == "eos" else "paused"
        why = "length" if why == "eos" and live.target > self._longest else why
        self._carry_out(self._machine.report(Report(kind, *key, new, live.tokens, self._number - 1, why)))

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
        drawn = self._rounds.draw(count) if self._rounds else list(itertools.islice(self._stream, count))
        for name, group in drawn:
            for number in range(self._settings.samples):
                sample = group.samples[number % len(group.samples)]
                self._live[name, number] = _Live(sample, sample.tokens, group)
        scores = self._scores(drawn)
        order = np.argsort(turns(self._settings.rollout.launch_order, scores), kind="stable")
        self._carry_out(self._machine.drawn([drawn[place][0] for place in order]))

    def _scores(self, drawn: Sequence[tuple[str, Group]]) -> np.ndarray:
        """Predicted lengths; nothing is predicted where that orders nothing."""
        if self._settings.rollout.launch_order == "fifo":
            return np.zeros(len(drawn))
        self._prompts |= {name: self._foresight.prompt(name, group) for name, group in drawn}
        return self._order.predict([self._prompts[name] for name, _ in drawn])

    def _forget(self, group: str) -> None:
        for number in range(self._settings.samples):
            self._live.pop((group, number), None)

    def _trained(self, groups: Sequence[str]) -> Step:
        """What the rollout that ended with these groups was."""
        trained = {group: [self._live[group, number] for number in range(self._settings.samples)] for group in groups}
        responses = [live for group in trained.values() for live in group]
        known = [(tokens, self._number - step) for live in responses for tokens, step in live.segments if tokens]
        scores = [self._score(live) for live in responses]
        step = Step(
            self._engines.now, sum(tokens for tokens, _ in known), sum(tokens * lag for tokens, lag in known),
            max((lag for _, lag in known), default=0), tuple(score for score in scores if score is not None), self._generated,
        )  # fmt: skip
        lengths = {group: [live.tokens for live in lives] for group, lives in trained.items()}
        if self._rounds:
            self._rounds.trained(lengths)
        predicted = [group for group in lengths if group in self._prompts]
        self._order.observe([LengthRow(self._prompts[it], self._number, tokens) for it in predicted for tokens in lengths[it]])
        for group in groups:
            self._forget(group)
        return step

    def _score(self, live: _Live) -> float | None:
        """A response that the settings cut short is taken to earn as little as any did."""
        return self._worst if live.target > self._longest and live.sample.score is not None else live.sample.score
