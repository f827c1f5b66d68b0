"""Engines that batch continuously, in simulated time: how long a token takes rises with how many requests run at once.

A running request gets a token every `base + each * running` seconds; reading prompts (or tokens read again) stops their
replica for `batch + prefill * tokens` seconds, those that come at once
together. KV cache is taken as enough: what it costs where it is not is in none of these figures.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import polars as pl

from verl_mux.profiling.report.measures.replicas import MIN_TOKENS

MIN_STAYS = 20
_REFITS = 3


@dataclass(frozen=True, slots=True)
class Speed:
    """In seconds: a token is `base + each * running`; a batch of prompts `batch + prefill * tokens`."""

    base: float
    each: float
    batch: float
    prefill: float


class Ended(NamedTuple):
    """A request left its engine at `at` seconds, all its tokens generated."""

    at: float
    name: tuple[str, int]


class Engines:
    """submit/abort at any time -> next_before() in order of time. slots: requests that one replica runs at once. now: seconds."""

    def __init__(self, speed: Speed, replicas: int, slots: int, now: float = 0.0) -> None:
        self.now = now
        self._replicas = [_Replica(speed, slots, now) for _ in range(replicas)]
        self._open = list(self._replicas)
        self._where: dict[tuple[str, int], _Replica] = {}

    def submit(self, name: tuple[str, int], read: int, tokens: int, target: int | None = None) -> None:
        """`read`: prompt and kept tokens. Goes to the replica with the fewest requests, as verl's balancer sends it, or to this
        one."""
        replica = min(self._open, key=lambda it: it.load) if target is None else self._replicas[target]
        self._where[name] = replica
        replica.advance(self.now)
        replica.submit(name, read, tokens)

    def abort(self, name: tuple[str, int], now: float = 0.0) -> int:
        """Takes a request out now, or later; how many tokens it has got."""
        self.now = max(self.now, now)
        replica = self._where.pop(name)
        replica.advance(self.now)
        return replica.remove(name)

    def close(self, replicas: Collection[int]) -> None:
        """These get no requests any more."""
        self._open = [it for it in self._open if it not in [self._replicas[at] for at in replicas]]

    def tokens(self, now: float) -> list[dict[tuple[str, int], int]]:
        """Of each replica, closed ones too: its requests, and the tokens that they have got by `now`."""
        self.now = max(self.now, now)
        for replica in self._replicas:
            replica.advance(self.now)
        return [replica.tokens() for replica in self._replicas]

    def next_end(self) -> float:
        """When the next request ends if nothing else happens."""
        return min((replica.next_end() for replica in self._replicas if replica.load), default=math.inf)

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

    def __init__(self, speed: Speed, slots: int, now: float) -> None:
        self._speed, self._slots = speed, slots
        self._at = now
        self._virtual = 0.0
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
        return self._speed.base + self._speed.each * len(self._began)

    def advance(self, now: float) -> None:
        left = max(now - self._at, 0.0)
        self._at = max(now, self._at)
        reading = min(left, self._stopped)
        self._stopped -= reading
        if self._began:
            self._virtual += (left - reading) / self._token_s()
        elif not self._waiting:
            self._stopped = 0.0

    def tokens(self) -> dict[tuple[str, int], int]:
        running = {name: int(self._virtual - began + 1e-9) for name, (began, _) in self._began.items()}
        return running | {name: 0 for name, _, _ in self._waiting}

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
    """From a job's stays (`measures.engines.Engines.stays`): non-negative least squares of a token's time on how many ran
    beside it, weighted by tokens, without the stays farthest off. None where fewer than MIN_STAYS tell.

    Seconds of a stay on an idle replica are its decoding alone; `prefill_sec` is what the scheduler says where it does.
    """
    decoding = pl.coalesce("decode", pl.col("work") - pl.col("prefill").fill_null(0.0)).clip(1e-6)
    seen = stays.with_columns(decoding.alias("decoding"))
    seen = seen.with_columns(pl.Series("beside", _beside(seen)))
    # Of one that was cut off, the engine does not say when its prefill ended.
    told = seen.filter((pl.col("tokens") >= MIN_TOKENS) & (pl.col("work") > 0) & ~pl.col("cut").fill_null(False))
    if told.height < MIN_STAYS:
        return None
    work = told["decoding"].to_numpy()
    tokens, beside = told["tokens"].to_numpy().astype(float), told["beside"].to_numpy()
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
    told = stays.filter(pl.col("prefill").is_not_null() & (pl.col("prompt") > 0)).select(
        "replica", began.alias("from"), "prefill", (pl.col("prompt") - pl.col("cached").fill_null(0)).alias("read")
    )
    batches: list[list[float]] = []  # from, to, tokens
    for _, mine in told.sort("from").group_by("replica", maintain_order=True):
        batches.append([-math.inf, -math.inf, 0.0])
        for start, seconds, read in mine.select("from", "prefill", "read").iter_rows():
            if start < batches[-1][1]:
                batches[-1] = [batches[-1][0], max(batches[-1][1], start + seconds), batches[-1][2] + read]
            else:
                batches.append([start, start + seconds, read])
    known = np.array([batch for batch in batches if batch[2] > 0])
    if not len(known):
        return 0.0, 0.0
    return _line(known[:, 2], known[:, 1] - known[:, 0], np.ones(len(known)))


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


def even(speed: Speed, factor: float) -> Speed:
    """All of it `factor` times as long."""
    return Speed(speed.base * factor, speed.each * factor, speed.batch * factor, speed.prefill * factor)
