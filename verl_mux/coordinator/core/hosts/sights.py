"""What agents said last of their hosts, what follows from it, and what each is answered. Pure; not part of the records.

After a restart nothing is known of what agents saw: then none is late yet, and nothing comes free before one has looked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.bus.messages import HostName, NodeHere
from verl_mux.coordinator.core.hosts.reaping import Sight
from verl_mux.coordinator.core.inputs_and_instructions import DriverDied, HostGone, HostSeen, OwedPaid, What
from verl_mux.coordinator.core.records import Host, Job, JobState, Lease, State
from verl_mux.coordinator.core.running_time import RunningTime
from verl_mux.coordinator.core.settings import Config

# Seconds between two reports: of a host where nothing ends, and of one where something should.
CALM_S, DYING_S = 0.5, 0.1


class _Seen(NamedTuple):
    """`at`: in running time."""

    at: float
    report: m.AgentReport


class Sights:
    """`take` each report -> `answer`; `due` now and then. `on`: what agents see, for `judge`."""

    def __init__(self) -> None:
        self._running = RunningTime()
        self._since: dict[str, float] = {}  # heard, or first missed, in running time
        self._seen: dict[str, _Seen] = {}

    def refusal(self, report: m.AgentReport, state: State) -> str | None:
        """Two machines of one name cannot be told apart by the nodes, and the word of one must not free nodes of the other."""
        name = report.host
        for key, other in state.hosts.items():
            if other.agent and not other.gone and other.name == name.name and other.boot != name.boot and key in self._seen:
                called = ", ".join(other.names)
                return f"a host {name.name!r} of another boot is heard ({called}): names of hosts must differ"
        return None

    def take(self, report: m.AgentReport, state: State, now: float) -> list[What]:
        """What the report brings about; one that is older than the last from there brings nothing."""
        key, before = report.host.key, self._seen.get(report.host.key)
        if before is not None and before.report.agent == report.agent and before.report.number >= report.number:
            return []
        self._since[key] = self._running.at(now)
        self._seen[key] = _Seen(self._since[key], report)
        host = state.hosts.get(key)
        out: list[What] = []
        if host is None or not host.agent or host.gone or (host.boot, host.names) != (report.host.boot, report.host.names):
            out.append(HostSeen(host=report.host))
        empty = {look.uid for look in report.looks if not look.alive}
        out += [OwedPaid(host=key, uid=owed.uid) for owed in (host.owed if host else []) if owed.uid in empty]
        dead = set(report.dead)
        running = (job for job in state.jobs.values() if job.state in (JobState.LIVE, JobState.SILENT))
        out += [DriverDied(job=job.name, uid=job.uid) for job in running if job.driver in dead]
        return out

    def due(self, state: State, config: Config, now: float) -> list[What]:
        running = self._running.look(now)
        for key in self._seen.keys() - state.hosts.keys():
            del self._seen[key]
        out: list[What] = []
        for key, host in state.hosts.items():
            if host.agent and not host.gone and running - self._since.setdefault(key, running) > config.lease_timeout:
                self._seen.pop(key, None)  # what it saw before says nothing of now
                out.append(HostGone(host=key))
            if not host.agent and config.remote_grace is not None:
                late = [owed for owed in host.owed if now - owed.since > config.remote_grace]
                out += [OwedPaid(host=key, uid=owed.uid) for owed in late]
        return out

    def on(self, state: State) -> list[Sight]:
        return [self._sight(key, host) for key, host in state.hosts.items() if host.agent]

    def _sight(self, key: str, host: Host) -> Sight:
        seen = self._seen.get(key)
        looks = {look.uid: look.alive for look in seen.report.looks} if seen else {}
        return Sight(key, host.names, host.space, looks, host.gone)

    def carrying(self, uid: str) -> list[str]:
        """Names of the hosts where processes of that job were seen last."""
        reports = [seen.report for seen in self._seen.values()]
        return [report.host.name for report in reports if any(holder.uid == uid for holder in report.holders)]

    def answer(self, report: m.AgentReport, state: State, config: Config, epoch: str, end: Sequence[str]) -> m.AgentAnswer:
        """`end`: uids of dying jobs whose processes may be ended."""
        host = state.hosts.get(report.host.key)
        owed = [owed.uid for owed in host.owed] if host else []
        dying = {job.uid: [job.driver, *job.members] for job in state.jobs.values() if job.state is JobState.DYING}
        here = Sight("", report.host.names, report.host.space, {})
        look_for = {uid: [member for member in dying.get(uid, []) if here.covers(member)] for uid in (*dying, *owed)}
        is_ending = any(look.alive for look in report.looks) or look_for.keys() != {look.uid for look in report.looks}
        told = {holder.uid for holder in report.holders}
        return m.AgentAnswer(
            number=report.number,
            epoch=epoch,
            again_s=DYING_S if is_ending else CALM_S,
            look_for=look_for,
            drivers=[job.driver for job in _drivers(state) if here.covers(job.driver)],
            end=[*end, *(owed if config.kill else [])],
            nodes=_nodes_of(report.host, state, config),
            jobs={job.uid: job.name for job in state.jobs.values() if job.uid in told},
        )

    def about(self, state: State, now: float) -> dict[str, dict]:
        """For `verl-mux status`: each host by name; by name and space where several have one name."""
        names = [host.name for host in state.hosts.values()]
        return {
            (host.name if names.count(host.name) == 1 else key): self._about(key, host, now) for key, host in state.hosts.items()
        }

    def _about(self, key: str, host: Host, now: float) -> dict:
        seen = self._seen.get(key)
        report = seen.report if seen else None
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


def _drivers(state: State) -> list[Job]:
    return [job for job in state.jobs.values() if job.state in (JobState.LIVE, JobState.SILENT)]


def _nodes_of(name: HostName, state: State, config: Config) -> dict[str, NodeHere]:
    here = {node.name: node for node in config.nodes.values() if node.host in name.names}
    leases: Mapping[str, Lease] = {node: lease for lease in state.leases.values() for node in lease.nodes if node in here}
    free = Lease(token=0, key="", job="", client="", phase="", step=0, nodes=[], granted_at=0.0)
    found = {}
    for node in here.values():
        lease = leases.get(node.name, free)
        found[node.name] = NodeHere(gpu_ids=node.gpu_ids, job=lease.job, phase=lease.phase, token=lease.token)
    return found
