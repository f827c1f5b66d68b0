"""What `verl-mux status` shows: the records as one plain dictionary, times relative to `now`. Pure."""

from __future__ import annotations

from typing import Any

from verl_mux.coordinator import prediction, queueing
from verl_mux.coordinator.config import Config
from verl_mux.coordinator.records import Job, JobState, State


def describe(state: State, config: Config, now: float, waits_for: dict[str, list[str]]) -> dict[str, Any]:
    """`waits_for`: per silent or dying job, the processes whose end its nodes wait for, in words."""
    return {
        "token": state.token,
        "started": state.started or config.expect_jobs == 0,
        "segment": {"index": state.segment, "mode": queueing.mode(state, config), "of": len(config.schedule)},
        "pools": {
            name: {"nodes": {node.name: _node(node, state, config, now) for node in pool.nodes}}
            for name, pool in config.pools.items()
        },
        "jobs": {job.name: _job(job, state, now, waits_for.get(job.name, [])) for job in state.jobs.values()},
        "placement": _placement(state, config),
    }


def _placement(state: State, config: Config) -> dict[str, Any] | None:
    """Who shares which nodes by the coordinator's own decision, the periods predicted for them, and who waits for nodes."""
    if config.placement is None:
        return None
    return {
        "groups": {group.name: prediction.about(group, state, config) for group in state.placed.groups},
        "waiting": [entry.job.name for entry in state.placed.waiting],
    }


def _node(node, state: State, config: Config, now: float) -> dict[str, Any]:
    peaks = state.peaks.get(node.name, {})
    return {
        "gpus": node.gpus,
        "cpus": node.cpus,
        "usd_per_hour": node.usd_per_hour,
        "device_bytes": node.device_bytes,
        "holders": [_holder(lease, state, now) for lease in state.leases.values() if node.name in lease.nodes],
        "queue": [
            {
                **{"job": request.job, "phase": request.phase, "step": request.step},
                **{"waited_s": now - request.asked_at, "held_back": queueing.held_back(request, state, config)},
            }
            for request in state.requests
            if node.name in request.nodes
        ],
        "memory": {job.name: job.memory[node.name] for job in state.jobs.values() if job.memory.get(node.name)},
        "bytes": state.bytes_on(node.name),
        "peak_bytes": max(peaks.values(), default=0),
        "peak_bytes_by_segment": dict(peaks),
    }


def _holder(lease, state: State, now: float) -> dict[str, Any]:
    job = state.jobs[lease.job]
    return {
        **{"job": lease.job, "phase": lease.phase, "step": lease.step, "token": lease.token},
        **{"held_s": now - lease.granted_at, "note": job.note},
        "state": "held" if job.state is JobState.LIVE else "reclaiming",
    }


def _job(job: Job, state: State, now: float, waits_for: list[str]) -> dict[str, Any]:
    plain = ("uid", "host", "pid", "nodes", "seed", "steps", "reason", "note", "metrics", "initialised")
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
