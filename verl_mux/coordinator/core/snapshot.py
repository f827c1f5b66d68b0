"""What `verl-mux status` shows: the records as one plain dictionary, times relative to `now`. Pure."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from verl_mux.coordinator.core import queueing
from verl_mux.coordinator.core.fillers import usage
from verl_mux.coordinator.core.hosts import memory as host_memory
from verl_mux.coordinator.core.placement import moving, prediction, sentences
from verl_mux.coordinator.core.records import Job, JobState, Lease, Request, State
from verl_mux.coordinator.core.settings import Config, Node


def describe(state: State, config: Config, now: float, waits_for: dict[str, list[str]]) -> dict[str, Any]:
    """`waits_for`: per silent or dying job, the processes whose end its nodes wait for, in words."""
    sorted_out = _SortedOut(state, config)
    return {
        "token": state.token,
        "started": state.started or config.expect_jobs == 0,
        "segment": {"index": state.segment, "mode": queueing.mode(state, config), "of": len(config.schedule)},
        "pools": {
            name: {"nodes": {node.name: _node(node, state, sorted_out, now) for node in pool.nodes}}
            for name, pool in config.pools.items()
        },
        "jobs": {job.name: _job(job, sorted_out, now, waits_for.get(job.name, [])) for job in state.jobs.values()},
        "placement": _placement(state, config, now),
        "why": sentences.told(state, config),
    }


class _SortedOut:
    """The records by node and by job: with thousands of each, none is looked at once for every other."""

    def __init__(self, state: State, config: Config) -> None:
        self.leases_on: defaultdict[str, list[Lease]] = defaultdict(list)
        self.requests_on: defaultdict[str, list[tuple[Request, str | None]]] = defaultdict(list)
        self.memory_on: defaultdict[str, dict[str, dict[str, int]]] = defaultdict(dict)
        self.host_memory_on: defaultdict[str, dict[str, Job]] = defaultdict(dict)
        self.tokens: defaultdict[str, list[int]] = defaultdict(list)
        self.phases: defaultdict[str, list[str]] = defaultdict(list)
        for lease in state.leases.values():
            self.tokens[lease.job].append(lease.token)
            for node in dict.fromkeys(lease.nodes):
                self.leases_on[node].append(lease)
        owner = queueing.turn(state, config) if queueing.mode(state, config) == "sequential" else None
        for request in state.requests:
            self.phases[request.job].append(request.phase)
            if request.is_fillers:  # it stands in nobody's queue
                continue
            held_back = queueing.held_back(request, state, config, owner)
            for node in dict.fromkeys(request.nodes):
                self.requests_on[node].append((request, held_back))
        for job in state.jobs.values():
            for node, tags in job.memory.items():
                if tags:
                    self.memory_on[node][job.name] = tags
            for node in job.host_memory:
                self.host_memory_on[node][job.name] = job


def _placement(state: State, config: Config, now: float) -> dict[str, Any] | None:
    """Who shares which nodes by the coordinator's own decision, the periods predicted for them, who waits, who moves."""
    if config.placement is None:
        return None
    return {
        "groups": {group.name: prediction.about(group, state, config) for group in state.placed.groups},
        "waiting": [entry.job.name for entry in state.placed.waiting],
        "moves": moving.told(state, now),
    }


def _node(node: Node, state: State, sorted_out: _SortedOut, now: float) -> dict[str, Any]:
    peaks, memory = state.peaks.get(node.name, {}), sorted_out.memory_on[node.name]
    return {
        "host": node.host,
        "gpu_ids": node.gpu_ids,
        "gpus": node.gpus,
        "cpus": node.cpus,
        "usd_per_hour": node.usd_per_hour,
        "device_bytes": node.device_bytes,
        "fenced": state.fenced.get(node.name),
        "draining": node.drain,
        "holders": [_holder(lease, state, now) for lease in sorted_out.leases_on[node.name]],
        "queue": [
            {
                **{"job": request.job, "phase": request.phase, "step": request.step},
                **{"waited_s": now - request.asked_at, "held_back": held_back},
            }
            for request, held_back in sorted_out.requests_on[node.name]
        ],
        "usage": usage.describe(state, node.name, sorted_out.leases_on[node.name], now),
        "memory": memory,
        "bytes": sum(sum(tags.values()) for tags in memory.values()),
        "peak_bytes": max(peaks.values(), default=0),
        "peak_bytes_by_segment": dict(peaks),
        "host_memory": host_memory.about(node.name, node.host_bytes, sorted_out.host_memory_on[node.name]),
    }


def _holder(lease: Lease, state: State, now: float) -> dict[str, Any]:
    job = state.jobs[lease.job]
    return {
        **{"job": lease.job, "phase": lease.phase, "step": lease.step, "token": lease.token},
        **{"held_s": now - lease.granted_at, "note": job.note},
        "state": "held" if job.state is JobState.LIVE else "reclaiming",
        "overdue": lease.token in job.overdue,
        "filler": job.filler,
    }


def _job(job: Job, sorted_out: _SortedOut, now: float, waits_for: list[str]) -> dict[str, Any]:
    plain = ("host", "pid", "nodes", "seed", "steps", "reason", "note", "metrics", "initialised", "filler")
    return {
        **{field: getattr(job, field) for field in plain},
        "state": job.state.value,
        "in_state_s": now - job.since,
        "step": max(job.asked, job.reported),
        "steps_done": job.finished,
        "progress": list(job.progress) if job.progress else None,
        "tokens": sorted_out.tokens[job.name],
        "waiting": sorted_out.phases[job.name],
        "waits_for": waits_for,
    }
