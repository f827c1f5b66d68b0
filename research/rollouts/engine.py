"""One virtual replica: running requests decode in step, a token each; what does not fit waits its turn."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from math import ceil
from typing import NamedTuple

from research.rollouts.bed import Bed

Key = tuple[str, str, int]  # job, prompt group, sample
NEVER = float("inf")


class Request(NamedTuple):
    """kept: tokens it has; read: of these, what has to be read again. more: tokens until it ends or pauses."""

    key: Key
    kept: int
    more: int
    read: int = 0
    priority: int = 0  # higher goes first


@dataclass(slots=True)
class Replica:
    """submit | abort, then `next_end` says when something ends if nothing else happens, and `advance` goes there.

    Time is in seconds of the virtual clock, `at` the time up to which it has been advanced. It stands still until `ready`.
    """

    bed: Bed
    at: float = 0.0
    ready: float = 0.0
    decoded: float = 0.0  # steps
    _queue: list[tuple[int, int, Request]] = field(default_factory=list)
    _ends: dict[Key, tuple[float, Request]] = field(default_factory=dict)  # step at which it ends
    _done: dict[Key, int] = field(default_factory=dict)
    _came: int = 0
    _prefill: float = 0.0  # seconds that are owed before the next decoding step

    @property
    def requests(self) -> int:
        """Running and waiting."""
        return len(self._ends) + len(self._queue)

    def submit(self, request: Request, done: int = 0) -> None:
        """It runs as soon as there is a slot. done: of its `more` tokens, those that it has from another replica."""
        self._came += 1
        self._done[request.key] = done
        heapq.heappush(self._queue, (-request.priority, self._came, request))
        self._admit()

    def abort(self, key: Key) -> int | None:
        """Tokens that it has by now, the kept ones included; None where it is not here."""
        tokens = self.tokens().get(key)
        if key in self._ends:
            del self._ends[key], self._done[key]
            self._admit()
        elif tokens is not None:
            self._queue = [entry for entry in self._queue if entry[2].key != key]
            heapq.heapify(self._queue)
            del self._done[key]
        return tokens

    def held(self) -> list[Key]:
        """All requests here."""
        return [*self._ends, *self.waiting()]

    def waiting(self) -> list[Key]:
        """Those that have no slot yet."""
        return [entry[2].key for entry in self._queue]

    def tokens(self) -> dict[Key, int]:
        """Of each request by now, the kept ones included."""
        running = {
            key: request.kept + min(request.more, max(self._done[key], request.more - ceil(end - self.decoded - 1e-6)))
            for key, (end, request) in self._ends.items()
        }
        return running | {entry[2].key: entry[2].kept + self._done[entry[2].key] for entry in self._queue}

    def next_end(self) -> float:
        """When the next request ends or pauses."""
        if not self._ends:
            return NEVER
        steps = max(0.0, min(end for end, _ in self._ends.values()) - self.decoded)
        return max(self.at, self.ready) + self._prefill + steps * self._step_s()

    def advance(self, now: float) -> list[Request]:
        """What has ended by `now`, which is no later than `next_end`."""
        seconds = max(0.0, now - max(self.at, self.ready))
        self.at = max(self.at, now)
        read = min(self._prefill, seconds)
        self._prefill -= read
        if self._ends and seconds > read:
            self.decoded += (seconds - read) / self._step_s()
        ended = [request for end, request in self._ends.values() if end <= self.decoded + 1e-6]
        for request in ended:
            del self._ends[request.key], self._done[request.key]
        self._admit()
        return ended

    def _step_s(self) -> float:
        return self.bed.step_s + self.bed.request_s * len(self._ends)

    def _admit(self) -> None:
        while self._queue and len(self._ends) < self.bed.slots:
            request = heapq.heappop(self._queue)[2]
            self._prefill += request.read * self.bed.prefill_s
            # Whole steps: a request that joins takes part from the next one on.
            self._ends[request.key] = (self.decoded + request.more - self._done[request.key], request)
