"""Hosts: which nodes are given to no job because of what may be left there, which changes of the configuration jobs on record
allow, and how much of a node's host memory each job holds.

Runs in the coordinator as a feature of the core, `Hosts`; pure.

Fences. A node is fenced while its host cannot be looked at, or something of a dying job may be left on it. A node that names no
host, or one from which no agent ever spoke, is fenced only by what a dying job may have left on it.

Host memory. A job says when it comes what it will need, by kind. From then on it is measured: by the agent of the node's host
where one is heard, by the job itself elsewhere. While the job has not finished SETTLED steps, of which the first makes the
optimizer's states, the larger of the two counts; from then on the most that was measured since. A job that does not fit is
refused, with which jobs hold what and where it would fit. A job that is there is never ended for what it holds. A node without
`host_bytes` has no limit. Placed jobs count as they were estimated until they are measured; the placer, which learns what was
measured, sees that they fit. What a host really has, or a control group allows there, counts where `host_bytes` says more.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core import records as r
from verl_mux.coordinator.core.leases import Feature, Handler
from verl_mux.coordinator.core.records import Host, HostMemory, Instruction, Job, JobState, Log, Owed, Send, State
from verl_mux.coordinator.core.settings import Config, Node
from verl_mux.placement.estimator import GPU_KINDS
from verl_mux.placement.model import JobSpec, Pin
from verl_mux.profiling.eventlog import events

GB = 10**9
SETTLED = 2
AGENT, ITSELF = "agent", "job"
FILE = "the coordinator's file"
# What an agent sees is on record again when it differs by this much: each time is a line of the journal.
_NEWS_BYTES, _NEWS_SHARE = 64 * 2**20, 0.02
_ADVICE = "While jobs run, pools and nodes may be added and times changed, and nodes removed that are draining and no job's"


class Hosts(Feature):
    """Keeps the records of hosts, the fences that follow from them, the nodes of the configuration, and what jobs hold of the
    hosts' memory."""

    def handlers(self) -> Mapping[type, Handler]:
        return {
            r.HostSeen: self._seen,
            r.HostRoom: self._room,
            r.HostGone: self._gone,
            r.OwedPaid: self._paid,
            r.HostReleased: self._host_released,
            r.NodeReleased: self._node_released,
            r.NodeEmpty: lambda now, job, what: self.core.take_from([job.name], what.node, now),
            r.NodesOwed: self._owed,
            r.PoolsChanged: self._pools_changed,
            **dict.fromkeys((r.HostMeasured, m.HostReport), self._measured),
        }

    def refusal(self, asked: m.Register, nodes: dict[str, list[str]], is_known: bool) -> str | None:
        """Why a job that names its nodes does not fit beside those that are there, in words; None: it does."""
        if is_known or asked.wants_placement:
            return None
        state, config = self.core.state, self.core.config
        needed = {node: HostMemory() for names in nodes.values() for node in names} | _needed(asked, nodes, config)
        needs = {node: sum(memory.declared.values()) for node, memory in needed.items()}
        for node in needs:
            if limit(node, state, config, needs)[1] < 0:
                return _does_not_fit(asked.job, node, needed[node], needs, state, config)
        return None

    def registered(self, now: float, job: Job, asked: m.Register) -> list[Instruction]:
        if not asked.wants_placement:
            job.host_memory = _needed(asked, job.nodes, self.core.config)
        return []

    def ended(self, now: float, job: Job) -> list[Instruction]:
        job.host_memory = {}
        return []

    def _seen(self, now: float, job: None, what: r.HostSeen) -> list[Instruction]:
        hosts, name = self.core.state.hosts, what.host
        host = hosts.setdefault(name.key, Host(names=name.names, since=now))
        if host.boot != name.boot:
            host.owed = []  # what ran before the boot runs no more
        for key, other in list(hosts.items()):
            if other is host:
                continue
            if not other.agent and set(other.names) <= set(name.names):  # where nothing looked before, an agent looks now
                host.owed += other.owed
                del hosts[key]
            elif other.name == name.name and other.agent and other.boot != name.boot:
                del hosts[key]
        host.names, host.boot, host.space = name.names, name.boot, name.space
        host.agent, host.gone, host.excused, host.since = True, False, [], now
        said = Log(events.HOST_SEEN, {"host": host.name, "addresses": name.addresses, "boot": name.boot})
        return [said, *self._fence_anew()]

    def _room(self, now: float, job: None, what: r.HostRoom) -> list[Instruction]:
        self.core.state.rooms[what.host] = what
        return []

    def _gone(self, now: float, job: None, what: r.HostGone) -> list[Instruction]:
        host = self.core.state.hosts.get(what.host)
        if host is None:
            return []
        host.gone, host.since = True, now
        return [Log(events.HOST_GONE, {"host": host.name}), *self._fence_anew()]

    def _paid(self, now: float, job: None, what: r.OwedPaid) -> list[Instruction]:
        if (host := self.core.state.hosts.get(what.host)) is not None:
            host.owed = [owed for owed in host.owed if owed.uid != what.uid]
        return self._fence_anew()

    def _host_released(self, now: float, job: None, what: r.HostReleased) -> list[Instruction]:
        if (host := self.core.state.hosts.get(what.host)) is not None:
            host.owed, host.excused, host.agent, host.gone = [], [], False, False  # as if none had ever spoken from there
        return self._fence_anew()

    def _node_released(self, now: float, job: None, what: r.NodeReleased) -> list[Instruction]:
        dying = [job.name for job in self.core.state.jobs.values() if job.state is JobState.DYING]
        out = self.core.take_from(dying, what.node, now)
        for host in self.core.state.hosts.values():
            left = [(owed, [node for node in owed.nodes if node != what.node]) for owed in host.owed]
            host.owed = [msgspec.structs.replace(owed, nodes=nodes) for owed, nodes in left if nodes or host.agent]
            if host.gone and what.node not in host.excused:
                host.excused.append(what.node)
        return out + self._fence_anew()

    def _owed(self, now: float, job: Job, what: r.NodesOwed) -> list[Instruction]:
        host = self.core.state.hosts.setdefault(what.host, Host(names=[what.host.rstrip("/")], since=now))
        before = next((owed for owed in host.owed if owed.uid == what.uid), Owed(job=what.job, uid=what.uid or "", since=now))
        owed = msgspec.structs.replace(before, nodes=list(dict.fromkeys([*before.nodes, *what.nodes])))
        host.owed = [other for other in host.owed if other.uid != what.uid] + [owed]
        fenced = self._fence_anew()  # before another job can be given the nodes
        return [*fenced, *(line for node in what.nodes for line in self.core.take_from([job.name], node, now))]

    def _pools_changed(self, now: float, job: None, what: r.PoolsChanged) -> list[Instruction]:
        old = self.core.config
        new = self.core.config = msgspec.structs.replace(old, pools=what.pools)
        before, after = old.nodes.keys(), new.nodes.keys()
        drained, undrained = sorted(new.draining - old.draining), sorted((old.draining - new.draining) & after)
        out: list[Instruction] = [Log(events.POOLS_CHANGED, {"added": sorted(after - before), "removed": sorted(before - after)})]
        out += [Log(events.NODE_DRAINING, {"node": node, "undo": node in undrained}) for node in (*drained, *undrained)]
        out += self._fence_anew()
        for feature in self.core.features:
            for node in drained:
                feature.node_drained(node)
            if undrained or after - before:
                feature.nodes_opened()
        return out

    def _fence_anew(self) -> list[Instruction]:
        state = self.core.state
        state.hosts = {key: host for key, host in state.hosts.items() if host.agent or host.owed}  # of others nothing is known
        before, state.fenced = state.fenced, fenced(state, self.core.config)
        opened = [node for node in before if node not in state.fenced]
        for feature in self.core.features if opened else ():
            feature.nodes_opened()
        fresh = {node: reason for node, reason in state.fenced.items() if before.get(node) != reason}
        out: list[Instruction] = [Log(events.NODE_UNFENCED, {"node": node}) for node in opened]
        return out + [Log(events.NODE_FENCED, {"node": node, "reason": reason}) for node, reason in fresh.items()]

    def _measured(self, now: float, job: Job, what: r.HostMeasured | m.HostReport) -> list[Instruction]:
        """Puts on record what the job holds on a node. What it says of itself does not count where an agent is heard."""
        if isinstance(what, m.HostReport):
            if what.node not in job.all_nodes:
                reason = f"job {job.name!r} reports host memory on {what.node!r}; allowed: its nodes {', '.join(job.all_nodes)}"
                return [Send(what.client, m.Refused(about="host memory", reason=reason))]
            if _is_looked_at(what.node, self.core.state, self.core.config):
                return []
        known = job.host_memory.get(what.node, HostMemory())
        bytes_now = {kind: num_bytes for kind, num_bytes in what.bytes.items() if num_bytes > 0}
        job.host_memory[what.node] = msgspec.structs.replace(
            known,
            measured=bytes_now,
            source=AGENT if isinstance(what, r.HostMeasured) else ITSELF,
            most=max(known.most, sum(bytes_now.values())) if job.finished >= SETTLED else 0,
        )
        held = _held_on([what.node], self.core.state)
        most, _ = limit(what.node, self.core.state, self.core.config)
        about = {
            **{"job": job.name, "node": what.node, "bytes": sum(bytes_now.values()), "kinds": bytes_now},
            **{"source": job.host_memory[what.node].source, "counted": held.get(job.name, 0)},
            **{"node_bytes": sum(held.values()), "capacity": most.bytes if most else None},
        }
        return [Log(events.HOST_MEMORY, about)]


# --- fences -----------------------------------------------------------------------------------------------------------


def fenced(state: State, config: Config) -> dict[str, str]:
    """By node: why, in words."""
    reasons = {node.name: [_reason(host, node) for host in state.hosts.values()] for node in config.nodes.values()}
    return {node: "; ".join(filter(None, found)) for node, found in reasons.items() if any(found)}


def _reason(host: Host, node: Node) -> str:
    left = [repr(owed.job) for owed in host.owed if node.name in owed.nodes]
    if host.gone and node.host in host.names and node.name not in host.excused:
        may = f", and job {', '.join(left)} may be left there" if left else ""
        return f"the agent of host {host.name} is not heard{may}"
    if left and not host.agent:
        return f"job {', '.join(left)} may be left on host {host.name}, where no agent looks"
    return f"something of job {', '.join(left)} may be left on host {host.name}" if left else ""


# --- changes of the configuration -------------------------------------------------------------------------------------


def change_refusal(state: State, before: Config, after: Config) -> str | None:
    """Why the jobs on record cannot go on under `after`, with what would be lost by name; None: they can."""
    for key in ("schedule", "placement"):
        if getattr(before, key) != getattr(after, key):
            return f"its {key} is another. {_ADVICE}"
    for name, pool in before.pools.items():
        if name in after.pools and after.pools[name].kind != pool.kind:
            return f"pool {name!r} is of another kind. {_ADVICE}"
        for node in pool.nodes:
            left = after.nodes.get(node.name)
            if left is None and (reason := _is_needed(node, state)):
                return f"node {node.name!r} is missing, and {reason}. {_ADVICE}"
            is_same = left is not None and msgspec.structs.replace(left, drain=node.drain) == node
            if left is not None and not (is_same and left in after.pools.get(name, pool).nodes):
                return f"node {node.name!r} is another. {_ADVICE}"
    return None


def restart_needed(before: Config, after: Config) -> str | None:
    """Keys that are read at a start alone; None: nothing but pools differs."""
    names = [name for name in before.__struct_fields__ if name != "pools" and getattr(before, name) != getattr(after, name)]
    return f"{', '.join(names)} changed, which takes a restart of the coordinator; pools alone are read again" if names else None


def _is_needed(node: Node, state: State) -> str | None:
    """Which job would miss the node, in words, or that the node is not draining; None: it may go."""
    if holders := sorted({lease.job for lease in state.leases.values() if node.name in lease.nodes}):
        return f"job {holders[0]!r} holds it"
    if users := [job.name for job in state.jobs.values() if job.state is not JobState.ENDED and node.name in job.all_nodes]:
        return f"job {users[0]!r} is registered on it: let it end, or evict it"
    if placed := [group.jobs[0].name for group in state.placed.groups if node.name in (*group.rollout_nodes, *group.train_nodes)]:
        return f"job {placed[0]!r} is placed on it: let it end, or evict it"
    return None if node.drain else "is not draining: give it `drain: true` first"


# --- host memory ------------------------------------------------------------------------------------------------------


def _needed(asked: m.Register, nodes: Mapping[str, list[str]], config: Config) -> dict[str, HostMemory]:
    """By node, of a job that names its nodes (`nodes`: pools spelt out). A job that says nothing counts by what is measured."""
    needed: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for side, names in nodes.items():
        for node in names if asked.host_memory.get(side) else ():
            kind = GPU_KINDS.get(config.pool_of(node).kind or "", GPU_KINDS["H20"])
            processes = asked.gpus.get(node, asked.gpus.get(side, 0)) * round(kind.process_gb * GB)
            needed[node].update({**asked.host_memory[side], "processes": processes})
    return {node: HostMemory(declared=dict(kinds)) for node, kinds in needed.items()}


def estimated(pin: Pin) -> dict[str, HostMemory]:
    """By node, of a job that was placed."""
    sides = zip((pin.rollout, pin.train), pin.job.memory_gb, strict=True)
    return {node: HostMemory(declared={"estimated": round(gb * GB)}) for nodes, gb in sides for node in nodes}


def counted(job: Job, node: str) -> int:
    """Bytes that count for it on the node; see the module."""
    memory = job.host_memory.get(node, HostMemory())
    return memory.most or max(sum(memory.declared.values()), sum(memory.measured.values()))


def _held_on(nodes: Iterable[str], state: State) -> dict[str, int]:
    """By job; those that hold nothing are left out."""
    held = {job.name: sum(counted(job, node) for node in nodes) for job in state.jobs.values()}
    return {name: num_bytes for name, num_bytes in held.items() if num_bytes}


class Limit(NamedTuple):
    """Bytes that jobs may hold on `nodes` together, and what says so."""

    bytes: int
    source: str
    nodes: list[str]


def limit(node: str, state: State, config: Config, needs: Mapping[str, int] | None = None) -> tuple[Limit | None, int]:
    """The one that leaves the least free there, and how much; None: no limit. `needs`: of a job that comes, bytes by node."""
    described = config.nodes.get(node)
    if described is None or described.host_bytes is None:
        return None, 0
    limits = [Limit(described.host_bytes, FILE, [node])]
    for room in state.rooms.values() if described.host else ():
        if described.host in room.names:
            there = [it.name for it in config.nodes.values() if it.host in room.names]
            limits.append(Limit(room.bytes, f"{room.source} of host {room.names[0]}", there))
    free = [
        it.bytes - sum(_held_on(it.nodes, state).values()) - sum((needs or {}).get(name, 0) for name in it.nodes) for it in limits
    ]
    return min(zip(limits, free, strict=True), key=lambda each: each[1])


def _does_not_fit(job: str, node: str, need: HostMemory, needs: Mapping[str, int], state: State, config: Config) -> str:
    """With which jobs hold what, and where it would fit, or which jobs' end would make room."""
    most, _ = limit(node, state, config, needs)
    assert most is not None
    held, wanted = _held_on(most.nodes, state), sum(needs.get(name, 0) for name in most.nodes)
    kinds = ", ".join(f"{kind} {num_bytes / GB:.1f}" for kind, num_bytes in need.declared.items() if num_bytes)
    free = most.bytes - sum(held.values())
    left = f"{_gb(free)} are free" if free >= 0 else f"{_gb(-free)} too many are held"
    by_size = sorted(held.items(), key=lambda entry: -entry[1])
    words = [f"{name} {_gb(num_bytes)} ({_source(state.jobs[name], most.nodes)})" for name, num_bytes in by_size]
    others = [other.name for other in config.pool_of(node).nodes if other.name not in most.nodes or most.source == FILE]
    fitting = [it for it in others if it != node and limit(it, state, config, {it: needs[node]})[1] >= 0]
    enough = [name for name, num_bytes in held.items() if free + num_bytes >= wanted]
    if fitting:
        advice = f"it fits on {', '.join(fitting)}"
    elif wanted > most.bytes:
        advice = "it never fits there"
    else:
        advice = f"it fits when {' or '.join(enough)} has ended" if enough else f"it fits when {' and '.join(held)} have ended"
    holders = f"held by {', '.join(words)}" if held else "no job holds any"
    on = " and ".join(repr(name) for name in most.nodes if needs.get(name) or name == node)
    asked = f"{_gb(wanted)} of host memory on node {on}"
    where = "there" if most.source == FILE else f"there (for {', '.join(most.nodes)} by {most.source})"
    return f"job {job!r} needs {asked}{f' ({kinds})' if kinds else ''}: of {_gb(most.bytes)} {where}, {left}; {holders}; {advice}"


def _source(job: Job, nodes: Sequence[str]) -> str:
    """Where the figure that counts comes from, in words."""
    node = next(node for node in nodes if node in job.host_memory)
    memory = job.host_memory[node]
    if not memory.most and counted(job, node) <= sum(memory.declared.values()):
        return "declared"
    return {AGENT: "measured by its host's agent", ITSELF: "measured by itself"}.get(memory.source, "declared")


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / GB:.1f} GB"


def seen(report: m.AgentReport, state: State, config: Config) -> list[r.HostMeasured]:
    """The inputs that an agent's report gives rise to: host memory of jobs, where it has changed noticeably. A process counts for
    the node whose device it uses, else for all nodes of its job on that host in equal parts."""
    here = {node.name for node in config.nodes.values() if node.host in report.host.names}
    jobs = {job.uid: job for job in state.jobs.values() if job.state is not JobState.ENDED}
    sums: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for holder in report.holders:
        own = [node for node in jobs[holder.uid].all_nodes if node in here] if holder.uid in jobs else []
        nodes = [node for node in own if holder.bytes.get(node)] or own
        for node in nodes if holder.host else ():
            sums[holder.uid, node].update({kind: num_bytes // len(nodes) for kind, num_bytes in holder.host.items()})
    out = []
    for (uid, node), kinds in sums.items():
        known = jobs[uid].host_memory.get(node)
        if known is None or known.source != AGENT or _is_news(sum(known.measured.values()), sum(kinds.values())):
            out.append(r.HostMeasured(job=jobs[uid].name, uid=uid, node=node, bytes=dict(kinds)))
    return out


def _is_news(before: int, now: int) -> bool:
    return abs(now - before) > max(_NEWS_BYTES, _NEWS_SHARE * before)


def revised(job: Job, spec: JobSpec) -> JobSpec:
    """The placed job with the host memory that it was seen to take, where that is other than what it is placed by."""
    for side, gb in zip(("rollout", "train"), spec.memory_gb, strict=True):
        most = max((job.host_memory[node].most for node in job.nodes.get(side, ()) if node in job.host_memory), default=0)
        if not most or not _is_news(round(gb * GB), most):
            continue
        if not spec.colocated:
            spec = msgspec.structs.replace(spec, **{f"{side}_memory_gb": most / GB})
        elif side == "train":  # which has both; which part is rollout's cannot be seen
            spec = msgspec.structs.replace(spec, rollout_memory_gb=0.0, train_memory_gb=most / GB)
    return spec


def _is_looked_at(node: str, state: State, config: Config) -> bool:
    place = config.nodes[node].host if node in config.nodes else None
    return any(host.agent and not host.gone and place in host.names for host in state.hosts.values())
