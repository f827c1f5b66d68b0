"""What looks at hosts say of a silent or dying job: what its nodes wait for, which are free, and what to end. Pure.

Who looks: the coordinator at its own host, an agent at its. Looks begin after the job was dying (see families/agents.py).
A node with a host comes free by itself, when all who look at that host saw nothing of the job there; a node that names none when
nothing of the job is left anywhere. Where nobody can look, nothing is believed dead: such a node is owed, which fences it, and
the job need not wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from verl_mux.coordinator.bus.messages import Member
from verl_mux.coordinator.core.records import Job, JobState, State
from verl_mux.coordinator.core.settings import Config


class Sight(NamedTuple):
    """Who looks at a host that is called by any of `names`. `key`: of its record; empty: the coordinator itself. `looks`: by
    the uid of a job, its living processes there; one that is not in it was not looked for. `gone`: nobody looks there now."""

    key: str
    names: Sequence[str]
    space: str
    looks: Mapping[str, list[Member]]
    gone: bool = False

    def covers(self, member: Member) -> bool:
        return member.host in self.names and (not member.space or not self.space or member.space == self.space)


class Verdict(NamedTuple):
    """`gone`: nothing of a dying job is left where anybody can look. `waits_for`: in words. `end`: its processes may be ended.
    `free`: nodes on which nothing of it is left. `owed`: by host, nodes where nobody can look, perhaps none."""

    gone: bool
    waits_for: list[str]
    end: bool = False
    free: list[str] = []
    owed: dict[str, list[str]] = {}


class _Fate(Enum):
    ALIVE = "alive"
    UNKNOWN = "not looked at yet"
    UNSEEN = "where nobody looks"
    CUT_OFF = "where nobody looks any more"
    GONE = "gone"


def judge(job: Job, sights: Sequence[Sight], state: State, config: Config, now: float) -> Verdict:
    """`sights`: the coordinator's own first. What a silent job waits for is only told."""
    if job.state is not JobState.DYING or job.died_at is None:
        return Verdict(False, _words(job, sights, job.members, sights[0]))
    return _Case(job, sights, state, config, now - job.died_at).verdict()


class _Case:
    """One dying job, `since` seconds after its death."""

    def __init__(self, job: Job, sights: Sequence[Sight], state: State, config: Config, since: float) -> None:
        self._job, self._sights, self._config, self._since = job, sights, config, since
        self._own, self._looking = sights[0], [sight for sight in sights if not sight.gone]
        self._held = list(dict.fromkeys(node for lease in state.leases_of(job.name) for node in lease.nodes))
        self._owing = [host for host in state.hosts.values() if any(owed.uid == job.uid for owed in host.owed)]
        self._forgiven = config.remote_grace is not None and since > config.remote_grace

    def verdict(self) -> Verdict:
        free: list[str] = []
        owed: dict[str, list[str]] = {}
        for node in self._held if not self._driver_is_in_the_way() else []:
            self._sort(node, free, owed)
        for sight in self._sights:
            if sight.gone and any(sight.covers(member) for member in self._known()) and not self._is_owing(sight.names):
                owed.setdefault(sight.key, [])
        settled = {*free, *(node for nodes in owed.values() for node in nodes)}
        left = [node for node in self._held if node not in settled and self._place(node)]
        away = [member for member in self._known() if self._fate(member) is _Fate.UNSEEN]
        empty = all(sight.looks.get(self._job.uid) == [] for sight in self._looking)
        over = self._job.told or bool(self._job.condemned) or self._fate(self._job.driver) is not _Fate.ALIVE
        # A filler was told to leave, or its driver is dead: it has had its time, and a job may wait.
        grace = 0.0 if self._job.filler else self._config.kill_grace
        end = self._config.kill and over and self._since > grace
        return Verdict(empty and not away and not left, _words(self._job, self._sights, away, self._own), end, free, owed)

    def _known(self) -> list[Member]:
        return list(dict.fromkeys([self._job.driver, *self._job.members]))

    def _place(self, node: str) -> str | None:
        found = self._config.node(node)
        return found.host if found else None

    def _sort(self, node: str, free: list[str], owed: dict[str, list[str]]) -> None:
        place = self._place(node)
        if not place:
            return
        looking = [sight for sight in self._sights if place in sight.names]
        gone = next((sight for sight in looking if sight.gone), None)
        if gone is not None:
            owed.setdefault(gone.key, []).append(node)
        elif not looking and not self._forgiven:
            owed.setdefault(f"{place}/", []).append(node)
        elif all(sight.looks.get(self._job.uid) == [] for sight in looking) and not self._hidden(place, looking):
            free.append(node)

    def _hidden(self, place: str, looking: Sequence[Sight]) -> bool:
        """Whether a process is known there that has process ids of another space than those who look."""
        names = {place, *(name for sight in looking for name in sight.names)}
        return any(member.host in names and self._fate(member) is _Fate.UNSEEN for member in self._known())

    def _driver_is_in_the_way(self) -> bool:
        """It may start others, as long as it lives and its lease may be good."""
        fate = self._fate(self._job.driver)
        if fate in (_Fate.ALIVE, _Fate.UNKNOWN):
            return True
        return fate in (_Fate.UNSEEN, _Fate.CUT_OFF) and self._since < self._config.lease_timeout

    def _fate(self, member: Member) -> _Fate:
        if member == self._job.driver and self._job.told and not self._is_seen(member):
            return _Fate.GONE
        covering = [sight for sight in self._sights if sight.covers(member)]
        if self._is_seen(member):
            return _Fate.ALIVE
        if any(sight.gone for sight in covering) or self._is_owing([member.host]):
            return _Fate.CUT_OFF
        if not covering:
            return _Fate.GONE if self._forgiven else _Fate.UNSEEN
        return _Fate.GONE if all(self._job.uid in sight.looks for sight in covering) else _Fate.UNKNOWN

    def _is_seen(self, member: Member) -> bool:
        return any(member in sight.looks.get(self._job.uid, ()) for sight in self._looking)

    def _is_owing(self, names: Iterable[str]) -> bool:
        return any(not set(host.names).isdisjoint(names) for host in self._owing)


def _words(job: Job, sights: Sequence[Sight], away: Sequence[Member], own: Sight) -> list[str]:
    words = [_seen(member, sight, own) for sight in sights for member in sight.looks.get(job.uid, ())]
    if job.state is JobState.DYING:
        words += [
            f"host {sight.names[0]} (not looked at yet)" for sight in sights if not sight.gone and job.uid not in sight.looks
        ]
    else:
        away = [member for member in dict.fromkeys([job.driver, *away]) if not own.covers(member)]
    return words + [f"pid {member.pid} on {member.host} (not visible from {own.names[0]})" for member in away]


def _seen(member: Member, sight: Sight, own: Sight) -> str:
    return f"pid {member.pid}" if sight is own else f"pid {member.pid} on {sight.names[0]}"
