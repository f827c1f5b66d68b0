"""The host ledger: how much of a node's host memory each job holds, and whether another job fits beside them. Pure.

A job tells when it comes what it will need, by kind. From then on it is measured: by the agent of the node's host where one is
heard, by the job itself elsewhere. What counts for it on a node is
- while it has not finished SETTLED steps, of which the first makes the optimizer's states: the larger of the two;
- from then on the most that was measured since, be it more or less than it told.

A job that does not fit is refused, with who holds what and where it would fit. One that is there is never ended for what it
holds. A node without `host_bytes` has no limit. Placed jobs count as they were estimated until they are measured; the placer,
which is told what was, sees that they fit.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import msgspec

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core.inputs_and_instructions import HostMeasured, Instruction, Log, Send
from verl_mux.coordinator.core.records import HostMemory, Job, JobState, State
from verl_mux.coordinator.core.settings import Config
from verl_mux.placement.job_needs import GPU_KINDS, GpuKind
from verl_mux.placement.model import JobSpec, Pin
from verl_mux.profiling.eventlog import events

GB = 10**9
SETTLED = 2
AGENT, ITSELF = "agent", "job"
# What an agent sees is on record again when it differs by so much: each time is a line of the journal.
_NEWS_BYTES, _NEWS_SHARE = 64 * 2**20, 0.02
# Of GPUs whose kind the configuration does not tell.
_PROCESS_GB = min(kind.process_gb for kind in GPU_KINDS.values())


# --- what a job needs -------------------------------------------------------------------------------------------------


def told(asked: m.Register, nodes: Mapping[str, list[str]], config: Config) -> dict[str, HostMemory]:
    """By node, of a job that names its nodes (`nodes`: pools spelt out). One that tells nothing counts by what is measured."""
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for side, names in nodes.items():
        if not (states := asked.host_memory.get(side)):
            continue
        for node in names:
            gpus = asked.gpus.get(node, asked.gpus.get(side, 0))
            found[node].update({**states, "processes": gpus * _process_bytes(node, config)})
    return {node: HostMemory(told=dict(kinds)) for node, kinds in found.items()}


def estimated(pin: Pin) -> dict[str, HostMemory]:
    """By node, of a job that was placed."""
    sides = zip((pin.rollout, pin.train), pin.job.memory_gb, strict=True)
    return {node: HostMemory(told={"estimated": round(gb * GB)}) for nodes, gb in sides for node in nodes}


def _process_bytes(node: str, config: Config) -> int:
    pool = next(pool for pool in config.pools.values() if any(member.name == node for member in pool.nodes))
    given: Mapping[str, GpuKind] = config.placement.kinds if config.placement is not None else {}
    kind = {**GPU_KINDS, **given}.get(pool.kind or "")
    return round((kind.process_gb if kind is not None else _PROCESS_GB) * GB)


def counted(job: Job, node: str) -> int:
    """Bytes that count for it on the node; see the module."""
    found = job.host_memory.get(node)
    if found is None:
        return 0
    return found.most or max(sum(found.told.values()), sum(found.measured.values()))


def held_on(node: str, state: State) -> dict[str, int]:
    """By job; those that hold nothing are left out."""
    held = {job.name: counted(job, node) for job in state.jobs.values() if node in job.host_memory}
    return {job: num_bytes for job, num_bytes in held.items() if num_bytes}


# --- whether it fits --------------------------------------------------------------------------------------------------


def refusal(asked: m.Register, nodes: Mapping[str, list[str]], state: State, config: Config) -> str | None:
    """Why a job that names its nodes does not fit beside those that are there, in words; None: it does."""
    needs = told(asked, nodes, config)
    for node in dict.fromkeys(name for names in nodes.values() for name in names):
        need = needs.get(node, HostMemory())
        if not _fits(node, sum(need.told.values()), state, config):
            return _does_not_fit(asked.job, node, need, state, config)
    return None


def _fits(node: str, need: int, state: State, config: Config) -> bool:
    capacity = config.nodes[node].host_bytes
    return capacity is None or sum(held_on(node, state).values()) + need <= capacity


def _does_not_fit(job: str, node: str, need: HostMemory, state: State, config: Config) -> str:
    held, capacity = held_on(node, state), config.nodes[node].host_bytes or 0
    kinds, free = _list({kind: num_bytes for kind, num_bytes in need.told.items() if num_bytes}), capacity - sum(held.values())
    left = f"{_gb(free)} are free" if free >= 0 else f"{_gb(-free)} too many are held"
    return (
        f"job {job!r} needs {_gb(sum(need.told.values()))} of host memory on node {node!r}{f' ({kinds})' if kinds else ''}: of"
        f" {_gb(capacity)} there, {left}; {_holders(node, held, state)}; {_advice(node, need, held, state, config)}"
    )


def _holders(node: str, held: Mapping[str, int], state: State) -> str:
    if not held:
        return "nobody holds any"
    words = []
    for name, num_bytes in sorted(held.items(), key=lambda entry: -entry[1]):
        by = {AGENT: "measured by its host's agent", ITSELF: "measured by itself"}.get(_source(state.jobs[name], node), "told")
        words.append(f"{name} {_gb(num_bytes)} ({by})")
    return f"held by {', '.join(words)}"


def _source(job: Job, node: str) -> str:
    """Whose word what counts is."""
    found = job.host_memory[node]
    return found.source if counted(job, node) > sum(found.told.values()) or found.most else ""


def _advice(node: str, need: HostMemory, held: Mapping[str, int], state: State, config: Config) -> str:
    """Where it would fit, or whose end would make room."""
    wanted, capacity = sum(need.told.values()), config.nodes[node].host_bytes or 0
    pool = next(pool for pool in config.pools.values() if any(member.name == node for member in pool.nodes))
    others = [member.name for member in pool.nodes if member.name != node and _fits(member.name, wanted, state, config)]
    if others:
        return f"it fits on {', '.join(others)}"
    if wanted > capacity:
        return "it never fits there"
    enough = [job for job, num_bytes in held.items() if sum(held.values()) - num_bytes + wanted <= capacity]
    return f"it fits when {' or '.join(enough)} has ended" if enough else f"it fits when {' and '.join(held)} have ended"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / GB:.1f} GB"


def _list(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {num_bytes / GB:.1f}" for kind, num_bytes in kinds.items())


# --- what was measured ------------------------------------------------------------------------------------------------


def seen(report: m.AgentReport, state: State, config: Config) -> list[HostMeasured]:
    """What an agent's report says of jobs' host memory, as far as it is news. A process counts for the node whose device it
    uses, else for all nodes of its job on that host in equal parts."""
    here = {node.name for node in config.nodes.values() if node.host in report.host.names}
    jobs = {job.uid: job for job in state.jobs.values() if job.state is not JobState.ENDED}
    found: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for holder in report.holders:
        mine = [node for node in jobs[holder.uid].all_nodes if node in here] if holder.uid in jobs else []
        nodes = [node for node in mine if holder.bytes.get(node)] or mine
        for node in nodes if holder.host else ():
            found[holder.uid, node].update({kind: num_bytes // len(nodes) for kind, num_bytes in holder.host.items()})
    news = {at: kinds for at, kinds in found.items() if _is_news(jobs[at[0]].host_memory.get(at[1]), sum(kinds.values()))}
    return [HostMeasured(job=jobs[uid].name, uid=uid, node=node, bytes=dict(kinds)) for (uid, node), kinds in news.items()]


def _is_news(known: HostMemory | None, total: int) -> bool:
    if known is None or known.source != AGENT:
        return True
    before = sum(known.measured.values())
    return abs(total - before) > max(_NEWS_BYTES, _NEWS_SHARE * before)


def measured(state: State, config: Config, job: Job, what: HostMeasured | m.HostReport) -> list[Instruction]:
    """Puts on record what the job holds on a node. What it tells of itself does not count where an agent is heard."""
    if isinstance(what, m.HostReport):
        if what.node not in job.all_nodes:
            reason = f"job {job.name!r} reports host memory on {what.node!r}; allowed: its nodes {', '.join(job.all_nodes)}"
            return [Send(what.client, m.Refused(about="host memory", reason=reason))]
        if _is_looked_at(what.node, state, config):
            return []
    known = job.host_memory.get(what.node, HostMemory())
    bytes_now = {kind: num_bytes for kind, num_bytes in what.bytes.items() if num_bytes > 0}
    job.host_memory[what.node] = msgspec.structs.replace(
        known,
        measured=bytes_now,
        source=AGENT if isinstance(what, HostMeasured) else ITSELF,
        most=max(known.most, sum(bytes_now.values())) if job.finished >= SETTLED else 0,
    )
    held = held_on(what.node, state)
    node = config.nodes.get(what.node)
    about = {
        **{"job": job.name, "node": what.node, "bytes": sum(bytes_now.values()), "kinds": bytes_now},
        **{"source": job.host_memory[what.node].source, "counted": held.get(job.name, 0)},
        **{"node_bytes": sum(held.values()), "capacity": node.host_bytes if node else None},
    }
    return [Log(events.HOST_MEMORY, about)]


def revised(job: Job, spec: JobSpec) -> JobSpec:
    """The placed job with the host memory that it was seen to take, where that is other than what it is placed by."""
    for side, gb in zip(("rollout", "train"), spec.memory_gb, strict=True):
        most = max((job.host_memory[node].most for node in job.nodes.get(side, ()) if node in job.host_memory), default=0)
        placed_by = round(gb * GB)
        if not most or abs(most - placed_by) <= max(_NEWS_BYTES, _NEWS_SHARE * placed_by):
            continue
        if not spec.colocated:
            spec = msgspec.structs.replace(spec, **{f"{side}_memory_gb": most / GB})
        elif side == "train":  # where both are; nobody sees which part is whose
            spec = msgspec.structs.replace(spec, rollout_memory_gb=0.0, train_memory_gb=most / GB)
    return spec


def _is_looked_at(node: str, state: State, config: Config) -> bool:
    place = config.nodes[node].host if node in config.nodes else None
    return any(host.agent and not host.gone and place in host.names for host in state.hosts.values())


# --- what is shown ----------------------------------------------------------------------------------------------------


def about(node: str, capacity: int | None, jobs: Mapping[str, Job]) -> dict[str, Any]:
    """For `verl-mux status`: `jobs` are those that hold some there, by name."""
    entries = {
        name: {"counted": counted(job, node), **msgspec.structs.asdict(job.host_memory[node])} for name, job in jobs.items()
    }
    return {"capacity": capacity, "held": sum(entry["counted"] for entry in entries.values()), "jobs": entries}
