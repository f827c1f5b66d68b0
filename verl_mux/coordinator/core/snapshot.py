"""What `verl-mux status` shows: the records as one plain dictionary.

Runs in the coordinator, called by server.py; pure and read-only.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import msgspec

from verl_mux.coordinator.core import hosts, placed_jobs, queueing
from verl_mux.coordinator.core.leases import count_usage
from verl_mux.coordinator.core.records import RUNNING, Job, JobState, Lease, Moving, Request, State, Usage
from verl_mux.coordinator.core.settings import Config, Node
from verl_mux.placement.explain import where


def describe(state: State, config: Config, now: float, waits_for: dict[str, list[str]]) -> dict[str, Any]:
    """`waits_for`: per silent or dying job, the processes whose end its nodes wait for, in words."""
    owner = queueing.turn(state, config) if queueing.mode(state, config) == "sequential" else None
    queue = [(request, queueing.held_back(request, state, config, owner)) for request in state.requests if not request.is_fillers]
    return {
        "token": state.token,
        "started": state.started or config.expect_jobs == 0,
        "segment": {"index": state.segment, "mode": queueing.mode(state, config), "of": len(config.schedule)},
        "pools": {
            name: {"nodes": {node.name: _node(node, state, config, queue, now) for node in pool.nodes}}
            for name, pool in config.pools.items()
        },
        "jobs": {job.name: _job(job, state, now, waits_for.get(job.name, [])) for job in state.jobs.values()},
        "placement": _placement(state, config, now),
        "why": reasons(state, config),
    }


def _node(node: Node, state: State, config: Config, queue: list[tuple[Request, str | None]], now: float) -> dict[str, Any]:
    peaks, jobs = state.peaks.get(node.name, {}), state.jobs.values()
    memory = {job.name: tags for job in jobs if (tags := job.memory.get(node.name))}
    leases = [lease for lease in state.leases.values() if node.name in lease.nodes]
    shown = ("host", "gpu_ids", "gpus", "cpus", "usd_per_hour", "device_bytes")
    return {
        **{field: getattr(node, field) for field in shown},
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
        "host_memory": _host_memory(node, state, config),
    }


def _host_memory(node: Node, state: State, config: Config) -> dict[str, Any]:
    held = {
        job.name: {"counted": hosts.counted(job, node.name), **msgspec.to_builtins(job.host_memory[node.name])}
        for job in state.jobs.values()
        if node.name in job.host_memory
    }
    most, _ = hosts.limit(node.name, state, config)
    about = {"capacity": most.bytes if most else None, "capacity_source": most.source if most else None}
    return {**about, "held": sum(entry["counted"] for entry in held.values()), "jobs": held}


def _usage(state: State, node: str, leases: list[Lease], now: float) -> dict[str, Any]:
    """Seconds since the first lease on the node, and for how many jobs and fillers used it; `bubble_filled`: the share that
    fillers used of the time that jobs left, None where they left none. `leases`: those on the node now."""
    known = state.usage.get(node) or Usage(since=min((lease.granted_at for lease in leases), default=now))
    total = msgspec.structs.replace(known)
    for lease in leases:
        count_usage(total, lease, state, now)
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
        "note_s": now - job.noted_at if job.note else None,
        "step": max(job.asked, job.reported),
        "steps_done": job.finished,
        "progress": list(job.progress) if job.progress else None,
        "tokens": [lease.token for lease in state.leases_of(job.name)],
        "waiting": [request.phase for request in state.requests if request.job == job.name],
        "waits_for": waits_for,
    }


# --- placement ---


def _placement(state: State, config: Config, now: float) -> dict[str, Any] | None:
    """The co-execution groups with their predicted periods, the jobs that wait to be placed, and those that move."""
    if config.placement is None:
        return None
    return {
        "groups": {group.name: placed_jobs.about(group, state, config) for group in state.placed.groups},
        "waiting": [entry.job.name for entry in state.placed.waiting],
        "moves": {name: _move(state, name, moving, now) for name, moving in state.moves.items()},
    }


def _move(state: State, name: str, moving: Moving, now: float) -> str:
    group, job = state.placed.group_of(name), state.jobs.get(name)
    pin = group.pin_of(name) if group is not None else None
    to = f"moves to {', '.join([*pin.rollout, *pin.train])}" if pin is not None else "moves"
    if moving.left_at is None:
        return f"{to}: asked {now - moving.since:.0f} s ago, it leaves at the end of its step"
    if placed_jobs.is_away(moving, job):
        return f"{to}: it left {now - moving.left_at:.0f} s ago after step {moving.done}, and its place is kept"
    return f"{to}: it came back and has yet to begin step {moving.done + 1}"


def reasons(state: State, config: Config) -> dict[str, str]:
    """Why each job that runs or waits to be placed is where it is, by name."""
    on: defaultdict[str, dict[str, None]] = defaultdict(dict)
    jobs = [job for job in state.jobs.values() if job.state in RUNNING and not job.filler]
    for job in jobs:
        for node in job.all_nodes:
            on[node][job.name] = None
    sentences = {job.name: _sentence(job, on, config) for job in jobs}
    return {name: sentence for name, sentence in sentences.items() if sentence}


def _sentence(job: Job, on: dict[str, dict[str, None]], config: Config) -> str:
    because = job.watched.because if job.watched is not None else ""
    if not job.nodes:
        return f"{job.name} waits to be placed{because and f': {because}'}" if job.watched is not None else ""
    others = {node: [name for name in on[node] if name != job.name] for node in job.all_nodes}
    sentence = where(job.name, job.all_nodes, others)
    if job.watched is not None:
        return f"{sentence}{because and f', {because}'}"
    advice = "; to be put where it adds the least, let the coordinator choose (mux.nodes=auto)" if config.placement else ""
    return f"{sentence}, as it names {'these nodes' if len(job.all_nodes) > 1 else 'this node'}{advice}"
