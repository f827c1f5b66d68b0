"""Engines: each shares itself among the requests in it, holds so many tokens, and logs what ours logs."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from dataclasses import dataclass
from typing import Any

_TELL_S = 1.0
_PREFILL_TOKENS_S = 8000.0
# Room that is kept for a running request's further tokens when another is let in, as a share of the tokens it has room for.
_KEPT_FREE = 0.05


class Timers:
    """What happens when, earliest first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Any]] = []
        self._count = itertools.count()

    def push(self, at: float, what: Any) -> None:
        heapq.heappush(self._heap, (at, next(self._count), what))

    def next_at(self) -> float:
        return self._heap[0][0] if self._heap else math.inf

    def pop(self) -> tuple[float, Any]:
        at, _, what = heapq.heappop(self._heap)
        return at, what


@dataclass
class Stay:
    """A request's time in one engine: `tokens` asked for, `done` so far. seconds; `begins`, `ends`: by the engine's counter of
    tokens that each running request got."""

    request: str
    step: int
    turn: int
    stay: int
    prompt: int
    tokens: int
    entered: float
    done: int = 0
    replica: int = -1
    node: str = ""
    queued_at: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    let_in_count: float = 0.0
    begins: float = 0.0
    ends: float = 0.0
    retractions: int = 0
    aborted: bool = False

    def keys(self) -> dict[str, Any]:
        return {"request_id": self.request, "turn": self.turn, "stay": self.stay, "replica": self.replica, "node": self.node}


class Engine:
    """One replica. factor: how much slower it is now. closed: stretches in which nothing moves."""

    def __init__(self, job: Any, replica: int, node: str, fixed_s: float, each_s: float, slots: int, kv_tokens: int) -> None:
        self.job, self.replica, self.node = job, replica, node
        self.fixed_s, self.each_s, self.slots, self.whole_kv = fixed_s, each_s, slots, kv_tokens
        self.kv, self.factor, self.awake, self.step = kv_tokens, 1.0, True, 0
        self.now = self.count = self.told = 0.0
        self.closed: list[tuple[float, float]] = []
        self.running: dict[int, tuple[Any, Stay]] = {}
        self.waiting: deque[tuple[Any, Stay]] = deque()
        self._made = self._prefilled = 0.0
        self._thrown_out = 0
        self._next: float | None = None
        self._held = 0.0  # tokens in the KV cache, less `count` for each running request

    @property
    def in_flight(self) -> int:
        return len(self.running) + len(self.waiting)

    # ------------------------------------------------------------ faults

    def wake(self, now: float, step: int, fault: Any, warm: float) -> None:
        """A step begins here; how fast and how large it is in it."""
        self._advance(now)
        self._next = None
        self.step, self.awake, self.kv = step, True, self.whole_kv
        self.factor = warm * self.job.rng.gauss(1, 0.02)
        if fault is None:
            return
        name = self.job.name
        slow = fault.on("slow_replica", name, step) and fault.target == self.replica
        if slow or (fault.on("slow_node", name, step) and fault.target == self.node):
            self.factor *= fault.strength
        if fault.on("kv_starvation", name, step) and fault.target in (None, self.replica):
            self.kv = int(self.whole_kv * fault.strength)

    def maybe_stand_still(self, began: float, fault: Any, job: str) -> None:
        """For a moment, as any process does now and then; for longer where that is the fault."""
        if self.job.rng.random() < 0.05:
            since = began + self.job.rng.uniform(0, 10)
            self.close(since, since + self.job.rng.uniform(0.3, 1.5))
        if fault is not None and fault.on("stalled_replica", job, self.step) and fault.target == self.replica:
            since = began + 0.4 * self.job.run.mean_tokens * self.fixed_s
            self.close(since, since + fault.strength)

    def close(self, since: float, until: float) -> None:
        self.closed.append((since, until))
        self._next = None

    # ------------------------------------------------------------ time

    @property
    def _pace(self) -> float:
        """Seconds of a token of each running request."""
        return (self.fixed_s + self.each_s * len(self.running)) * self.factor

    def _open_seconds(self, since: float, until: float) -> float:
        shut = sum(max(0.0, min(until, end) - max(since, begin)) for begin, end in self.closed)
        return until - since - shut

    def _after(self, seconds: float) -> float:
        """When it will have been open for so long from now."""
        at = self.now
        for begin, end in sorted(self.closed):
            if end <= at:
                continue
            if at + seconds <= begin:
                break
            seconds -= max(0.0, begin - at)
            at = end
        return at + seconds

    def _used(self) -> float:
        return self._held + self.count * len(self.running)

    def _got(self, stay: Stay) -> int:
        return max(0, min(stay.tokens - stay.done, int(self.count - stay.begins)))

    def next_at(self) -> float:
        """When something happens here next: a request is let in, ends, or there is no more room. Kept until something changes."""
        if self._next is None:
            self._next = self._find_next()
        return self._next

    def _find_next(self) -> float:
        if self.waiting and self._fits(self.waiting[0][1]):
            return self._after(0.0)
        if not self.running:
            return math.inf
        tokens = min(stay.ends for _, stay in self.running.values()) - self.count
        if len(self.running) > 1:
            tokens = min(tokens, (self.kv - self._used()) / len(self.running) + 1)
        return self._after(max(0.0, tokens) * self._pace)

    def _advance(self, now: float) -> None:
        while self.now < now:
            tick = max(self.told + _TELL_S, self.now + 1e-6)
            stop = min(now, tick) if self.running else now
            shut = next((end for begin, end in self.closed if begin <= stop < end), None)
            stop = stop if shut is None else min(now, shut)  # an engine that stands still says nothing
            if self.running:
                tokens = self._open_seconds(self.now, stop) / self._pace
                self.count, self._made = self.count + tokens, self._made + tokens * len(self.running)
            self.now = stop
            if self.running and shut is None and self.now >= self.told + _TELL_S:
                self._tell()

    def _tell(self) -> None:
        seconds, self.told = self.now - self.told, self.now
        made, read, out = self._made, self._prefilled, self._thrown_out
        self._made, self._prefilled, self._thrown_out = 0.0, 0.0, 0
        fresh = seconds < 5 * _TELL_S
        self.say(
            "engine_decode", min(seconds, 5 * _TELL_S), replica=self.replica, node=self.node, running=len(self.running),
            queued=len(self.waiting), token_usage=round(min(1.0, self._used() / self.kv), 4),
            tokens_per_sec=round(made / seconds, 3) if fresh else None,
            prefill_tokens_per_sec=round(read / seconds, 3) if fresh else None, retracted=out, evicted_tokens=0,
        )  # fmt: skip

    def say(self, event: str, seconds: float | None, step: int | None = None, **extra) -> None:
        if self.job.mux:
            step = self.step if step is None else step
            self.job.lines.say(self.job.name, "server", self.replica, step, self.now, event, seconds, **extra)

    # ------------------------------------------------------------ requests

    def enter(self, it: Any, stay: Stay, now: float) -> None:
        self._advance(now)
        self._next = None
        stay.replica, stay.node, stay.queued_at = self.replica, self.node, now
        self.waiting.append((it, stay))

    def _fits(self, stay: Stay) -> bool:
        if not self.running:
            return True
        kept = _KEPT_FREE * self.job.run.longest * (len(self.running) + 1)
        return len(self.running) < self.slots and self._used() + stay.prompt + stay.done + kept <= self.kv

    def happen(self, now: float) -> list[Any]:
        """What is due: the requests whose stays are over."""
        self._advance(now)
        self._next = None
        if self.waiting and self._fits(self.waiting[0][1]):
            self._let_in(*self.waiting.popleft())
            return []
        over = [(it, stay) for it, stay in self.running.values() if stay.ends <= self.count + 1e-6]
        for it, stay in over:
            self._leave(it, stay, "stop")
        if not over and len(self.running) > 1 and self._used() >= self.kv - len(self.running):
            self._throw_out()
        return [it for it, _ in over]

    def _let_in(self, it: Any, stay: Stay) -> None:
        waited = self.now - stay.queued_at
        stay.queue_s += waited
        self.say("engine_queue", waited, stay.step, **stay.keys(), priority=None)
        fresh = 120 + stay.prompt % 300 if stay.turn > 1 and not stay.retractions else stay.prompt + stay.done
        seconds = 0.01 + fresh / _PREFILL_TOKENS_S * self.factor
        stay.prefill_s, self._prefilled = stay.prefill_s + seconds, self._prefilled + fresh
        self.running[id(it)] = (it, stay)
        stay.begins = self.count + seconds / self._pace
        stay.ends = stay.begins + stay.tokens - stay.done
        stay.let_in_count = self.count
        self._held += stay.prompt + stay.done - self.count

    def _take_out(self, it: Any, stay: Stay) -> None:
        """It has what it got; its room is free."""
        del self.running[id(it)]
        got = self._got(stay)
        self._held -= stay.prompt + stay.done - stay.let_in_count
        stay.done += got

    def _throw_out(self) -> None:
        """Those with the fewest tokens, until a twentieth is free."""
        victims = sorted(self.running.values(), key=lambda pair: self._got(pair[1]) + pair[1].done)
        out = []
        while len(self.running) > 1 and self._used() > 0.95 * self.kv:
            it, stay = victims.pop(0)
            self._take_out(it, stay)
            stay.retractions, stay.queued_at = stay.retractions + 1, self.now
            self.waiting.append((it, stay))
            out.append(stay.request)
        self._thrown_out += len(out)
        self.say("engine_retract", None, replica=self.replica, node=self.node, requests=len(out), token_usage=0.99,
                 request_ids=out[:20])  # fmt: skip

    def abort(self, it: Any, now: float) -> None:
        """It leaves with the tokens it has."""
        self._advance(now)
        self._next = None
        if id(it) in self.running:
            self._leave(it, it.stay, "abort")
            return
        self.waiting = deque(pair for pair in self.waiting if pair[0] is not it)
        it.stay.queue_s += now - it.stay.queued_at
        it.stay.aborted = True
        self._log_stay(it.stay, "abort", None)

    def _leave(self, it: Any, stay: Stay, finish: str) -> None:
        self._take_out(it, stay)
        stay.done = stay.done if finish == "abort" else stay.tokens
        stay.aborted = finish == "abort" and stay.done < stay.tokens
        self._log_stay(stay, "abort" if stay.aborted else "stop", self.now - stay.entered - stay.queue_s - stay.prefill_s)

    def _log_stay(self, stay: Stay, finish: str, decode_s: float | None) -> None:
        figures = {"queue_sec": round(stay.queue_s, 6), "cached_tokens": 0, "retractions": stay.retractions}
        if decode_s is not None:
            figures |= {"prefill_sec": round(stay.prefill_s, 6), "decode_sec": round(max(0.0, decode_s), 6)}
        self.say("engine_generate", self.now - stay.entered + 0.002, stay.step, **stay.keys(), version=stay.step - 1,
                 prompt_tokens=stay.prompt, response_tokens=stay.done, finish=finish, held_sec=0.0, priority=0,
                 **figures)  # fmt: skip
