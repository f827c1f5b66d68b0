"""The cases of the bench: how many trainers, hosts and workers, over which links, and what the links allow."""

from __future__ import annotations

from typing import NamedTuple


class Case(NamedTuple):
    """`slow_link`: "per_pair" or "shared"; `slow`: bytes a second of it; the fast class has 20 times as many. `uneven`: ranks
    hold parts of different size."""

    senders: int
    hosts: int
    workers_per_host: int
    slow_link: str
    slow: float
    uneven: bool = False

    @property
    def name(self) -> str:
        odd = "_uneven" if self.uneven else ""
        return f"{self.senders}_to_{self.hosts}x{self.workers_per_host}_{self.slow_link}{odd}"

    @property
    def shares(self) -> list[float]:
        parts = [1 + at % 3 if self.uneven else 1 for at in range(self.senders)]
        return [part / sum(parts) for part in parts]


FAST_OVER_SLOW = 20
# A link of its own for each pair is slow enough that two cores carry 64 of them; a shared one is as fast as several.
_PAIR, _SHARED = 1.5e6, 12e6
CASES = (
    Case(1, 1, 1, "per_pair", 4 * _PAIR),
    Case(1, 2, 2, "per_pair", 4 * _PAIR),
    Case(2, 1, 4, "per_pair", 4 * _PAIR),
    Case(2, 2, 2, "per_pair", 2 * _PAIR),
    Case(3, 2, 1, "per_pair", 2 * _PAIR, uneven=True),
    Case(4, 3, 2, "per_pair", 2 * _PAIR),
    Case(8, 1, 2, "per_pair", _PAIR),
    Case(1, 8, 1, "per_pair", 4 * _PAIR),
    Case(5, 7, 1, "per_pair", _PAIR, uneven=True),
    Case(8, 8, 1, "per_pair", _PAIR),
    Case(1, 2, 1, "shared", _SHARED),
    Case(2, 2, 4, "shared", _SHARED),
    Case(4, 3, 2, "shared", _SHARED, uneven=True),
    Case(2, 4, 2, "shared", _SHARED),
)


def limit_seconds(case: Case, model_bytes: int) -> float:
    """No way is faster, each byte crossing the slow class at least once: by the slow link's bandwidth, or by the interface that
    the model has to come in through."""
    # Over a link of its own only a rank's part; parts are held as they are.
    share = 1.0 if case.slow_link == "shared" else max(case.shares)
    slow = share * model_bytes / case.slow
    return max(slow, model_bytes / (FAST_OVER_SLOW * case.slow))
