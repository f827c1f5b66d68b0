"""What jobs report for people to see, and what `verl-mux status` shows: the records as one plain dictionary.

Runs in the coordinator: state.py calls `REPORTS`, server.py calls `describe`; pure. No report decides which job runs, except that
finished steps count for turns, and those that are left for turns and for whether a move pays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core import fillers, hosts, moving, observing, queueing
from verl_mux.coordinator.core.records import Instruction, Job, JobState, Lease, Log, Request, Send, State, Usage
from verl_mux.coordinator.core.settings import Config, Node
from verl_mux.profiling.eventlog import events

# --- what jobs report ---


def progress(state: State, job: Job, what: m.Progress) -> list[Instruction]:
    job.progress = (what.done, what.total)
    return []


def step_report(state: State, job: Job, what: m.StepReport) -> list[Instruction]:
    job.reported, job.metrics = max(job.reported, what.step), what.metrics
    job.steps = job.steps if what.steps is None else what.steps
    return [Log(events.STEP_REPORT, {"job": job.name, **what.metrics}, step=what.step)]


def memory(state: State, job: Job, what: m.MemoryReport) -> list[Instruction]:
    tags = {**job.memory.get(what.node, {}), **what.tags}
    held = {tag: num_bytes for tag, num_bytes in tags.items() if num_bytes > 0}
    if reason := _unbelievable(job, what.node, held):
        return [Send(what.client, m.Refused(about="memory", reason=reason))]
    job.memory[what.node] = held
    count_peak(state, what.node)
    extra = {"job": job.name, "node": what.node, "tags": what.tags, "node_bytes": state.bytes_on(what.node)}
    return [Log(events.MEMORY, extra)]


def _unbelievable(job: Job, node: str, tags: dict[str, int]) -> str | None:
    """Why the report is not kept: made-up nodes and tags must not fill the memory."""
    if node not in job.all_nodes:
        return f"job {job.name!r} reports memory on {node!r}; allowed: its nodes {', '.join(job.all_nodes)}"
    if len(tags) > m.TAGS_ON_A_NODE:
        return f"job {job.name!r} reports {len(tags)} tags on {node!r}; at most {m.TAGS_ON_A_NODE} are allowed"
    return None


def note(state: State, job: Job, what: m.PhaseNote) -> list[Instruction]:
    job.note = what.note
    return []


def members(state: State, job: Job, what: m.MemberReport) -> list[Instruction]:
    job.members = what.members
    return []


def count_peak(state: State, node: str) -> None:
    """Peaks are counted apart for init and for each segment, since comparing segments is what they are for."""
    during = str(state.segment) if state.stepping else "init"
    peaks = state.peaks.setdefault(node, {})
    peaks[during] = max(peaks.get(during, 0), state.bytes_on(node))


REPORTS: dict[type[m.FromJob], Callable[..., list[Instruction]]] = {
    m.Progress: progress,
    m.StepReport: step_report,
    m.MemoryReport: memory,
    m.PhaseNote: note,
    m.MemberReport: members,
}


# --- what status shows ---


def describe(state: State, config: Config, now: float, waits_for: dict[str, list[str]]) -> dict[str, Any]:
    """`waits_for`: per silent or dying job, the processes whose end its nodes wait for, in words."""
    owner = queueing.turn(state, config) if queueing.mode(state, config) == "sequential" else None
    queue = [(r, queueing.held_back(r, state, config, owner)) for r in state.requests if not r.is_fillers]
    return {
        "token": state.token,
        "started": state.started or config.expect_jobs == 0,
        "segment": {"index": state.segment, "mode": queueing.mode(state, config), "of": len(config.schedule)},
        "pools": {
            name: {"nodes": {node.name: _node(node, state, queue, now) for node in pool.nodes}}
            for name, pool in config.pools.items()
        },
        "jobs": {job.name: _job(job, state, now, waits_for.get(job.name, [])) for job in state.jobs.values()},
        "placement": _placement(state, config, now),
        "why": observing.reasons(state, config),
    }


def _placement(state: State, config: Config, now: float) -> dict[str, Any] | None:
    """The co-execution groups with their predicted periods, the jobs that wait to be placed, and those that move."""
    if config.placement is None:
        return None
    return {
        "groups": {group.name: observing.about(group, state, config) for group in state.placed.groups},
        "waiting": [entry.job.name for entry in state.placed.waiting],
        "moves": moving.sentences(state, now),
    }


def _node(node: Node, state: State, queue: list[tuple[Request, str | None]], now: float) -> dict[str, Any]:
    peaks, jobs = state.peaks.get(node.name, {}), state.jobs.values()
    memory = {job.name: tags for job in jobs if (tags := job.memory.get(node.name))}
    leases = [lease for lease in state.leases.values() if node.name in lease.nodes]
    return {
        "host": node.host,
        "gpu_ids": node.gpu_ids,
        "gpus": node.gpus,
        "cpus": node.cpus,
        "usd_per_hour": node.usd_per_hour,
        "device_bytes": node.device_bytes,
        "fenced": state.fenced.get(node.name),
        "draining": node.drain,
        "holders": [_holder(lease, state, now) for lease in leases],
        "queue": [
            {
                **{"job": request.job, "phase": request.phase, "step": request.step},
                **{"waited_s": now - request.asked_at, "held_back": held_back},
            }
            for request, held_back in queue
            if node.name in request.nodes
        ],
        "usage": _usage(state, node.name, leases, now),
        "memory": memory,
        "bytes": sum(sum(tags.values()) for tags in memory.values()),
        "peak_bytes": max(peaks.values(), default=0),
        "peak_bytes_by_segment": dict(peaks),
        "host_memory": hosts.about(node.name, node.host_bytes, {job.name: job for job in jobs if node.name in job.host_memory}),
    }


def _usage(state: State, node: str, leases: list[Lease], now: float) -> dict[str, Any]:
    """Seconds since the first lease on the node, and for how many jobs and fillers used it; `bubble_filled`: the share that
    fillers used of the time that jobs left, None where they left none. `leases`: those on the node now."""
    known = state.usage.get(node)
    since = known.since if known else min((lease.granted_at for lease in leases), default=now)
    total = Usage(since=since, jobs=known.jobs if known else 0.0, fillers=known.fillers if known else 0.0)
    for lease in leases:
        fillers.count(total, lease, state, now)
    bubble = now - total.since - total.jobs
    filled = min(total.fillers / bubble, 1.0) if bubble > 0 else None
    return {"seconds": now - total.since, "jobs_s": total.jobs, "fillers_s": total.fillers, "bubble_filled": filled}


def _holder(lease: Lease, state: State, now: float) -> dict[str, Any]:
    job = state.jobs[lease.job]
    return {
        **{"job": lease.job, "phase": lease.phase, "step": lease.step, "token": lease.token},
        **{"held_s": now - lease.granted_at, "note": job.note},
        "state": "held" if job.state is JobState.LIVE else "reclaiming",
        "overdue": lease.token in job.overdue,
        "filler": job.filler,
    }


def _job(job: Job, state: State, now: float, waits_for: list[str]) -> dict[str, Any]:
    plain = ("host", "pid", "nodes", "seed", "steps", "reason", "note", "metrics", "initialised", "filler")
    return {
        **{field: getattr(job, field) for field in plain},
        "state": job.state.value,
        "in_state_s": now - job.since,
        "step": max(job.asked, job.reported),
        "steps_done": job.finished,
        "progress": list(job.progress) if job.progress else None,
        "tokens": [lease.token for lease in state.leases_of(job.name)],
        "waiting": [request.phase for request in state.requests if request.job == job.name],
        "waits_for": waits_for,
    }
