"""A placer's whole memory as plain data, so that it can be journaled and a placer be made from it again."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from verl_mux.scheduling.model import Cluster, Group, JobSpec
from verl_mux.scheduling.placer.placer import Placer
from verl_mux.scheduling.search.rules import Rules


class Queued(msgspec.Struct, frozen=True):
    """A job that waits for room. passed: younger jobs that started before it."""

    job: JobSpec
    passed: int = 0


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """groups: as they are. waiting: in order of arrival. named: groups that ever were, for the next one's name."""

    groups: tuple[Group, ...] = ()
    waiting: tuple[Queued, ...] = ()
    named: int = 0

    def job(self, name: str) -> JobSpec | None:
        """What was last estimated of a job that is placed or waits."""
        placed = (job for group in self.groups for job in group.jobs)
        return next((job for job in (*placed, *(entry.job for entry in self.waiting)) if job.name == name), None)

    def group_of(self, name: str) -> Group | None:
        return next((group for group in self.groups if any(job.name == name for job in group.jobs)), None)


def restore(record: Record, cluster: Cluster, rules: Rules, taken: Iterable[str] = ()) -> Placer:
    """A placer that goes on where the one of `record_of` was. taken: nodes that others use."""
    placer = Placer(cluster, rules)
    placer.groups.adopt(record.groups, record.named, taken)
    for entry in record.waiting:
        placer.waiting.add(entry.job, entry.passed)
    return placer


def record_of(placer: Placer) -> Record:
    return Record(
        groups=tuple(placer.groups.values()),
        waiting=tuple(Queued(job, passed) for job, passed in placer.waiting.entries),
        named=placer.groups.named,
    )
