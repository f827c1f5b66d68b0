"""Jobs that a finite cluster has no room for yet, and who is next.

Whoever holds the least per hour for his share goes first, then by `ranks`, then whoever came first; a job may be passed by
younger ones that fit where it does not. But each one that starts before it counts, and once `max_bypass` have, nobody else starts
before it: what comes free is kept for it. Every job that fits the empty cluster therefore starts, if running jobs end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from verl_mux.placement.model import JobSpec


class _Entry:
    __slots__ = ("job", "number", "passed")

    def __init__(self, job: JobSpec, number: int, passed: int) -> None:
        self.job = job
        self.number = number
        self.passed = passed


class Waiting:
    """shares: of owners, 1 for all that are not named. ranks: of jobs, by name, lowest first; 0 for all others."""

    def __init__(self, max_bypass: int) -> None:
        self.max_bypass = max_bypass
        self.shares: Mapping[str, float] = {}
        self.ranks: Mapping[str, int] = {}
        self._entries: list[_Entry] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: str) -> bool:
        return any(entry.job.name == name for entry in self._entries)

    @property
    def jobs(self) -> list[JobSpec]:
        """In order of arrival."""
        return [entry.job for entry in self._entries]

    @property
    def entries(self) -> list[tuple[JobSpec, int]]:
        """In order of arrival, each with the number of younger jobs that started before it."""
        return [(entry.job, entry.passed) for entry in self._entries]

    def add(self, job: JobSpec, passed: int = 0) -> None:
        self._count += 1
        self._entries.append(_Entry(job, self._count, passed))

    def refill(self, entries: Iterable[tuple[JobSpec, int]]) -> None:
        """These wait, and nobody else: as `entries`."""
        self._entries = [_Entry(job, number, passed) for number, (job, passed) in enumerate(entries, 1)]
        self._count = len(self._entries)

    def remove(self, name: str) -> None:
        self._entries = [entry for entry in self._entries if entry.job.name != name]

    @property
    def overdue(self) -> JobSpec | None:
        """The oldest job that nobody may pass any more."""
        return next((entry.job for entry in self._entries if entry.passed >= self.max_bypass), None)

    def candidates(self, usd_by_owner: Mapping[str, float]) -> list[JobSpec]:
        """Those who may start now if there is room, in order of preference."""
        if self.overdue:
            return [self.overdue]
        return [entry.job for entry in sorted(self._entries, key=lambda entry: self._key(entry, usd_by_owner))]

    def _key(self, entry: _Entry, usd_by_owner: Mapping[str, float]) -> tuple[float, int, int]:
        owner = entry.job.owner
        held = usd_by_owner.get(owner, 0.0) / self.shares.get(owner, 1.0)
        return held, self.ranks.get(entry.job.name, 0), entry.number

    def started(self, name: str) -> None:
        """A waiting job starts: it leaves the queue, and whoever came before it was passed."""
        number = next(entry.number for entry in self._entries if entry.job.name == name)
        self.remove(name)
        for entry in self._entries:
            entry.passed += entry.number < number

    def passed_by_newcomer(self) -> None:
        """A job that never waited starts before all of them."""
        for entry in self._entries:
            entry.passed += 1
