"""Looking for a cheaper division of the groups that changed, together with some of the others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from verl_mux.placement.model import Group
from verl_mux.placement.repack.regroup import Regrouping, regroup
from verl_mux.placement.search.groups import SIDES, Groups
from verl_mux.placement.search.partition import EPSILON_USD, OutOfEffort, Partitioner
from verl_mux.placement.search.rules import Rules
from verl_mux.placement.search.search import Search
from verl_mux.placement.time.forecast import Progress

# A group is tried with the emptiest others first; in a large cluster the fuller ones are left alone.
WINDOWS = 4
# How often somebody should ask again about moves that do not pay yet.
ASK_AGAIN_S = 120.0
# What is too close to an SLO now is looked at again when its youngest job is older by this part, and so many seconds.
LATER, LATER_S = 0.05, 60.0


class Repack:
    """dirty: groups that changed since they were last looked at with nothing to gain, each with the (job, age in
    seconds) from which on another look makes sense. `effort`: groups simulated per search, see rules.py."""

    def __init__(self, groups: Groups, partitioner: Partitioner, search: Search, rules: Rules) -> None:
        self.groups = groups
        self.partitioner = partitioner
        self.search = search
        self.reach = rules.reach
        self.effort = rules.effort
        self.hysteresis = rules.hysteresis
        self.dirty: dict[str, tuple[str, float] | None] = {}

    def begin(self) -> None:
        """A new search may simulate `effort` groups again."""
        self.partitioner.until = self.partitioner.simulated + self.effort

    def next(self, progress: Mapping[str, Progress]) -> Regrouping | None:
        """A regrouping that pays now, or None. Jobs of unknown progress are not moved, nor is anybody moved to them."""
        seen: set[frozenset[str]] = set()
        try:
            for name in [name for name, at in self.dirty.items() if _due(at, progress)]:
                if (group := self.groups.get(name)) and (found := self._look(group, progress, seen)):
                    return found
                if name not in self.groups:
                    del self.dirty[name]
        except OutOfEffort:
            # Who was not reached stays dirty, and comes first next time.
            pass
        return None

    def _look(self, group: Group, progress: Mapping[str, Progress], seen: set[frozenset[str]]) -> Regrouping | None:
        """`seen`: sets of groups that were looked at."""
        again_s = math.inf
        for window in self._choices(group):
            names = frozenset(g.name for g in window)
            if names in seen:
                continue
            seen.add(names)
            if found := self._regrouping(window):
                wait_s = self._wait_s(found, progress)
                if wait_s == 0:
                    return found
                again_s = min(again_s, wait_s)
        del self.dirty[group.name]
        if again_s < math.inf:
            youngest = min(group.jobs, key=lambda job: progress[job.name].age_s if job.name in progress else math.inf)
            at = progress.get(youngest.name)
            self.dirty[group.name] = (youngest.name, (at.age_s if at else 0.0) + again_s)
        return None

    def _choices(self, group: Group) -> Iterator[list[Group]]:
        for window in self._windows(group):
            yield window
            if len(window) > 2:
                yield from ([group, other] for other in window if other is not group)

    def _windows(self, group: Group) -> Iterator[list[Group]]:
        # No window holds more groups than `reach`, and the one itself is not to be among the others.
        if not any(self.search.may_move(job) for job in group.jobs):
            return
        others = [g for g in self.groups.table.emptiest(WINDOWS * self.reach + 1) if g is not group]
        window, size = [group], len(group.pins)
        for _ in range(WINDOWS):
            while others and size + len(others[0].pins) <= self.reach:
                size += len(others[0].pins)
                window.append(others.pop(0))
            if len(window) > 1 or len(group.pins) > 1:
                yield window
            if not others:
                return
            window, size = [group], len(group.pins)

    def _regrouping(self, groups: Sequence[Group]) -> Regrouping | None:
        usd, parts = self.partitioner.solve(job for group in groups for job in group.jobs)
        now = sum(self.search.price.of_group(group) for group in groups)
        found = regroup(groups, parts, self.search) if usd < now - EPSILON_USD else None
        return found if found and self._fits(found) else None

    def _fits(self, found: Regrouping) -> bool:
        """A cheaper division may need more nodes of the cheaper kind than a finite cluster has."""
        free = self.groups.free
        return all(
            sum(len(nodes(group)) for group in found.groups) - sum(len(nodes(group)) for group in found.old) <= left
            for nodes, left in zip(SIDES, free, strict=True)
        )

    def _wait_s(self, found: Regrouping, progress: Mapping[str, Progress]) -> float:
        """0: carry it out now. Else seconds after which to look again."""
        names = [job.name for group in found.groups for job in group.jobs]
        if not all(name in progress for name in names):
            return LATER_S
        if wait_s := found.pays_in_s(self.groups.cluster, progress, self.hysteresis):
            return wait_s
        if found.in_time(progress):
            return 0.0
        return LATER_S + LATER * min(progress[name].age_s for name in names)


def _due(at: tuple[str, float] | None, progress: Mapping[str, Progress]) -> bool:
    return at is None or at[0] not in progress or progress[at[0]].age_s >= at[1]
