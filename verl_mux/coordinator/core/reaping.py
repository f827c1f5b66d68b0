"""What agents say of their hosts, and what follows for a silent or dying job: what its nodes wait for, which are free, what to
end.

Runs in the coordinator, called by server.py; pure. `Sights` is not on record: after a restart nothing is known of what agents
saw, so no agent is late yet, and nothing comes free before one has looked.

The coordinator looks at its own host, an agent at its own. Looks begin after the job was dying (see agent/agent.py). A node
with a host comes free by itself, when all that look at that host saw nothing of the job there; a node that names none when
nothing of the job is left anywhere. Where nothing looks, nothing is believed dead: such a node is owed, which fences it, and the
job need not wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple

import msgspec

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.bus.messages import HostName, Member, NodeHere
from verl_mux.coordinator.core import records as r
from verl_mux.coordinator.core.queueing import RunningTime
from verl_mux.coordinator.core.records import RUNNING, Host, Job, JobState, State, What
from verl_mux.coordinator.core.settings import Config

# Seconds between two reports: of a host where nothing ends, and of one where something should.
CALM_S, DYING_S = 0.5, 0.1
# A dying job that holds no node, and whose processes nothing can see, is on record for this long, with its name.
UNSEEN_KEPT_S = 60.0
# Jobs that an agent looks for at once; of more than the second number it does so at its calm pace.
_LOOKS, _LOOKS_AT_DYING_PACE = 1000, 64


class Sight(NamedTuple):
    """What one looker (the coordinator or an agent) saw of a host."""

    key: str  # of the host's record; empty: the coordinator itself looks
    names: Sequence[str]  # by any of which the host is called
    space: str
    looks: Mapping[str, list[Member]]  # by the uid of a job, its living processes there; an absent job was not looked for
    gone: bool = False  # nothing looks there now

    def covers(self, member: Member) -> bool:
        return member.host in self.names and (not member.space or not self.space or member.space == self.space)


class Verdict(NamedTuple):
    gone: bool  # nothing of a dying job is left where something looks
    waits_for: list[str]  # in words
    end: bool = False  # its processes may be ended
    free: list[str] = []  # nodes on which nothing of it is left
    owed: dict[str, list[str]] = {}  # by host, nodes where nothing looks, perhaps none


class _Fate(Enum):
    ALIVE = "alive"
    UNKNOWN = "not looked at yet"
    UNSEEN = "where nothing looks"
    CUT_OFF = "where nothing looks any more"
    GONE = "gone"


def judge(job: Job, sights: Sequence[Sight], state: State, config: Config, now: float) -> Verdict:
    """`sights`: the coordinator's own first. Of a silent job only the words are of use."""
    if job.state is not JobState.DYING or job.died_at is None:
        return Verdict(False, _words(job, sights, job.members, sights[0]))
    return _Case(job, sights, state, config, now - job.died_at).verdict()


class _Case:
    """One dying job, `since` seconds after its death."""

    def __init__(self, job: Job, sights: Sequence[Sight], state: State, config: Config, since: float) -> None:
        self._job, self._sights, self._config, self._since = job, sights, config, since
        self._known = list(dict.fromkeys([job.driver, *job.members]))
        self._held = list(dict.fromkeys(node for lease in state.leases_of(job.name) for node in lease.nodes))
        self._owing = {name for host in state.hosts.values() if any(o.uid == job.uid for o in host.owed) for name in host.names}
        self._forgiven = config.remote_grace is not None and since > config.remote_grace

    def verdict(self) -> Verdict:
        job, free, owed = self._job, list[str](), dict[str, list[str]]()
        driver = self._fate(job.driver)
        # A driver may start others, as long as it lives and its lease may be good.
        may_start = driver in (_Fate.UNSEEN, _Fate.CUT_OFF) and self._since < self._config.lease_timeout
        if driver not in (_Fate.ALIVE, _Fate.UNKNOWN) and not may_start:
            for node in self._held:
                self._sort(node, free, owed)
        for sight in self._sights:
            if sight.gone and any(sight.covers(member) for member in self._known) and self._owing.isdisjoint(sight.names):
                owed.setdefault(sight.key, [])
        settled = {*free, *(node for nodes in owed.values() for node in nodes)}
        left = [node for node in self._held if node not in settled and self._place(node)]
        away = [member for member in self._known if self._fate(member) is _Fate.UNSEEN]
        if not self._held and self._since > max(UNSEEN_KEPT_S, self._config.lease_timeout):
            away = []
        empty = all(sight.looks.get(job.uid) == [] for sight in self._sights if not sight.gone)
        over = job.has_exited or bool(job.condemned) or driver is not _Fate.ALIVE
        # A filler was asked to leave before, or its driver is dead; a job may wait for its nodes.
        end = self._config.kill and over and self._since > (0.0 if job.filler else self._config.kill_grace)
        return Verdict(empty and not away and not left, _words(job, self._sights, away, self._sights[0]), end, free, owed)

    def _place(self, node: str) -> str | None:
        known = self._config.node(node)
        return known.host if known else None

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
        """Whether a process is known there that has process ids of another namespace than those that look."""
        names = {place, *(name for sight in looking for name in sight.names)}
        return any(member.host in names and self._fate(member) is _Fate.UNSEEN for member in self._known)

    def _fate(self, member: Member) -> _Fate:
        if any(member in sight.looks.get(self._job.uid, ()) for sight in self._sights if not sight.gone):
            return _Fate.ALIVE
        if member == self._job.driver and self._job.has_exited:
            return _Fate.GONE
        covering = [sight for sight in self._sights if sight.covers(member)]
        if any(sight.gone for sight in covering) or member.host in self._owing:
            return _Fate.CUT_OFF
        if not covering:
            return _Fate.GONE if self._forgiven else _Fate.UNSEEN
        return _Fate.GONE if all(self._job.uid in sight.looks for sight in covering) else _Fate.UNKNOWN


def _words(job: Job, sights: Sequence[Sight], away: Sequence[Member], own: Sight) -> list[str]:
    words = []
    for sight in sights:
        where = "" if sight is own else f" on {sight.names[0]}"
        words += [f"pid {member.pid}{where}" for member in sight.looks.get(job.uid, ())]
    if job.state is JobState.DYING:
        unlooked = [sight for sight in sights if not sight.gone and job.uid not in sight.looks]
        words += [f"host {sight.names[0]} (not looked at yet)" for sight in unlooked]
    else:
        away = [member for member in dict.fromkeys([job.driver, *away]) if not own.covers(member)]
    return words + [f"pid {member.pid} on {member.host} (not visible from {own.names[0]})" for member in away]


class Sights:
    """`take` each report -> `answer`; `due` now and then. `on`: what agents see, for `judge`."""

    def __init__(self) -> None:
        self._running = RunningTime()
        self._since: dict[str, float] = {}  # heard, or first missed, in running time
        self._seen: dict[str, m.AgentReport] = {}

    def refusal(self, report: m.AgentReport, state: State) -> str | None:
        """Nodes name a machine by its name, so what an agent says of one must not free nodes of another with the same name."""
        name = report.host
        for key, other in state.hosts.items():
            if other.agent and not other.gone and other.name == name.name and other.boot != name.boot and key in self._seen:
                called = ", ".join(other.names)
                return f"a host {name.name!r} of another boot is heard ({called}): names of hosts must differ"
        return None

    def take(self, report: m.AgentReport, state: State, now: float) -> list[What]:
        """What the report brings about; one that is older than the last from there brings nothing."""
        key, before = report.host.key, self._seen.get(report.host.key)
        if before is not None and before.agent == report.agent and before.number >= report.number:
            return []
        self._since[key], self._seen[key] = self._running.at(now), report
        host = state.hosts.get(key)
        out: list[What] = []
        if host is None or not host.agent or host.gone or (host.boot, host.names) != (report.host.boot, report.host.names):
            out.append(r.HostSeen(host=report.host))
        room = r.HostRoom(host=key, names=report.host.names, bytes=report.memory_total, source=report.memory_source)
        out += [room] if room.bytes and state.rooms.get(key) != room else []
        empty = {look.uid for look in report.looks if not look.alive}
        out += [r.OwedPaid(host=key, uid=owed.uid) for owed in (host.owed if host else []) if owed.uid in empty]
        dead = set(report.dead)
        running = (job for job in state.jobs.values() if job.state in RUNNING)
        out += [r.DriverDied(job=job.name, uid=job.uid) for job in running if job.driver in dead]
        return out

    def due(self, state: State, config: Config, now: float) -> list[What]:
        running = self._running.look(now)
        for key in self._seen.keys() - state.hosts.keys():
            del self._seen[key]
        out: list[What] = []
        for key, host in state.hosts.items():
            if host.agent and not host.gone and running - self._since.setdefault(key, running) > config.lease_timeout:
                self._seen.pop(key, None)  # what it saw before says nothing of now
                out.append(r.HostGone(host=key))
            if not host.agent and config.remote_grace is not None:
                late = [owed for owed in host.owed if now - owed.since > config.remote_grace]
                out += [r.OwedPaid(host=key, uid=owed.uid) for owed in late]
        return out

    def on(self, state: State) -> list[Sight]:
        looks = {key: {look.uid: look.alive for look in report.looks} for key, report in self._seen.items()}
        hosts = [(key, host) for key, host in state.hosts.items() if host.agent]
        return [Sight(key, host.names, host.space, looks.get(key, {}), host.gone) for key, host in hosts]

    def carrying(self, uid: str) -> list[str]:
        """Names of the hosts where processes of that job were seen last."""
        return [report.host.name for report in self._seen.values() if any(holder.uid == uid for holder in report.holders)]

    def answer(self, report: m.AgentReport, state: State, config: Config, epoch: str, end: Sequence[str]) -> m.AgentAnswer:
        """`end`: uids of dying jobs whose processes may be ended."""
        host = state.hosts.get(report.host.key)
        owed = host.owed if host else []
        here = Sight("", report.host.names, report.host.space, {})
        dying = {job.uid: job for job in state.jobs.values() if job.state is JobState.DYING}
        # Those first for which nodes wait; if there are too many, the others follow when these are gone.
        holding = {lease.job for lease in state.leases.values()}
        waited = {uid for uid, job in dying.items() if job.name in holding} | {owing.uid for owing in owed if owing.nodes}
        uids = sorted(dict.fromkeys([*dying, *(owing.uid for owing in owed)]), key=lambda uid: uid not in waited)[:_LOOKS]
        known = {uid: [dying[uid].driver, *dying[uid].members] if uid in dying else [] for uid in uids}
        look_for = {uid: [member for member in processes if here.covers(member)] for uid, processes in known.items()}
        is_ending = any(look.alive for look in report.looks) or look_for.keys() != {look.uid for look in report.looks}
        seen = {holder.uid for holder in report.holders}
        return m.AgentAnswer(
            number=report.number,
            epoch=epoch,
            again_s=DYING_S if is_ending and len(look_for) <= _LOOKS_AT_DYING_PACE else CALM_S,
            look_for=look_for,
            drivers=[job.driver for job in state.jobs.values() if job.state in RUNNING and here.covers(job.driver)],
            end=[*end, *(owing.uid for owing in owed if config.kill)],
            nodes=_nodes_of(report.host, state, config),
            jobs={job.uid: job.name for job in state.jobs.values() if job.uid in seen},
        )

    def about(self, state: State, now: float) -> dict[str, dict]:
        """For `verl-mux status`: each host by name; by name and space where several have one name."""
        names = [host.name for host in state.hosts.values()]
        return {
            (host.name if names.count(host.name) == 1 else key): self._about(key, host, now) for key, host in state.hosts.items()
        }

    def _about(self, key: str, host: Host, now: float) -> dict:
        report = self._seen.get(key)
        held = sum(sum(holder.bytes.values()) for holder in report.holders) if report else None
        return {
            "addresses": host.names[1:],
            "agent": "gone" if host.gone else "heard" if host.agent else "none",
            "age_s": self._running.at(now) - self._since[key] if key in self._since and host.agent else None,
            "owed": {owed.job: owed.nodes for owed in host.owed},
            "memory_free": report.memory_free if report else None,
            "memory_total": report.memory_total if report else None,
            "device_source": report.source if report else None,
            "device_bytes": held if report and report.source != "unknown" else None,
            "device_bytes_of_others": sum(report.others.values()) if report else None,
            "processes": len(report.holders) if report else None,
        }


def _nodes_of(name: HostName, state: State, config: Config) -> dict[str, NodeHere]:
    here = {node.name: NodeHere(gpu_ids=node.gpu_ids) for node in config.nodes.values() if node.host in name.names}
    for lease in state.leases.values():
        held = {"job": lease.job, "phase": lease.phase, "token": lease.token}
        here.update({node: msgspec.structs.replace(here[node], **held) for node in lease.nodes if node in here})
    return here
