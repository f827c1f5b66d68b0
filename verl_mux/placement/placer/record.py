"""A placer's whole memory as plain data, so that it can be journaled and a placer be made from it again; and what it is asked."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import msgspec

from verl_mux.placement.model import Cluster, Group, JobSpec
from verl_mux.placement.placer.placer import Placer
from verl_mux.placement.search.rules import Rules


class Arrive(msgspec.Struct, frozen=True, tag=True):
    """Where is this job to go? `pair`, `elsewhere`: as of one that waits."""

    job: JobSpec
    pair: str = ""
    elsewhere: dict[str, JobSpec] = {}


class Leave(msgspec.Struct, frozen=True, tag=True):
    """What follows when this job is gone?"""

    name: str


class Open(msgspec.Struct, frozen=True, tag=True):
    """What follows when nodes can be had again?"""


class Correct(msgspec.Struct, frozen=True, tag=True):
    """What follows when the job, where it is, turns out to be like this?"""

    job: JobSpec


class Vacate(msgspec.Struct, frozen=True, tag=True):
    """Where can those go who are on this node, which nobody is to be on any more?"""

    node: str


class Again(msgspec.Struct, frozen=True, tag=True):
    """Does any move pay by now?"""


Question = Arrive | Leave | Correct | Open | Vacate | Again


class Queued(msgspec.Struct, frozen=True):
    """A job that waits for room. passed: younger jobs that started before it. pair: of pools, in which it is as `job` says, ""
    for the first; elsewhere: as it is in others that could hold it."""

    job: JobSpec
    passed: int = 0
    pair: str = ""
    elsewhere: dict[str, JobSpec] = {}


class Record(msgspec.Struct, frozen=True, kw_only=True, dict=True):  # dict: for the index
    """groups: as they are. waiting: in order of arrival. named: groups that ever were, for the next one's name. moved_at:
    seconds, of the moves of the last hour that count against the limit. version: of changes, so that a placer that was kept knows
    whether it is up to date."""

    groups: tuple[Group, ...] = ()
    waiting: tuple[Queued, ...] = ()
    named: int = 0
    moved_at: tuple[float, ...] = ()
    version: int = 0

    @functools.cached_property
    def by_name(self) -> dict[str, Group]:
        return {group.name: group for group in self.groups}

    @functools.cached_property
    def _home(self) -> dict[str, Group]:
        return {job.name: group for group in self.groups for job in group.jobs}

    @functools.cached_property
    def _queued(self) -> dict[str, JobSpec]:
        return {entry.job.name: entry.job for entry in self.waiting}

    def job(self, name: str) -> JobSpec | None:
        """What was last estimated of a job that is placed or waits."""
        group = self._home.get(name)
        return self._queued.get(name) if group is None else next(job for job in group.jobs if job.name == name)

    def group_of(self, name: str) -> Group | None:
        return self._home.get(name)

    def changed(
        self,
        gone: Iterable[str],
        groups: Iterable[Group],
        waiting: tuple[Queued, ...],
        named: int,
        moved_at: tuple[float, ...],
    ) -> Record:
        """Without the groups `gone`, and with these."""
        left = dict(self.by_name)
        for name in gone:
            left.pop(name, None)
        left.update((group.name, group) for group in groups)
        version = self.version + 1
        return Record(groups=tuple(left.values()), waiting=waiting, named=named, moved_at=moved_at, version=version)


def restore(record: Record, cluster: Cluster, rules: Rules) -> Placer:
    """A placer that goes on where the one of the record was."""
    placer = Placer(cluster, rules)
    placer.adopt(record.groups, record.named, record.moved_at)
    for entry in record.waiting:
        placer.waiting.add(entry.job, entry.passed)
    return placer
