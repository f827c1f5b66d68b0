"""How much of the time in which no job used a node was used by fillers. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from verl_mux.coordinator.core.records import Lease, State, Usage


def count(state: State, lease: Lease, nodes: Iterable[str], now: float) -> None:
    """These nodes of the lease come back."""
    for node in nodes:
        _add(state.usage.setdefault(node, Usage(since=lease.granted_at)), lease, state, now)


def describe(state: State, node: str, leases: Iterable[Lease], now: float) -> dict[str, Any]:
    """Seconds since the first lease on the node, in which jobs and fillers used it; `bubble_filled`: what share of the time
    that jobs left was used, None where they left none. `leases`: those on the node now."""
    known = state.usage.get(node)
    running = list(leases)
    since = known.since if known else min((lease.granted_at for lease in running), default=now)
    found = Usage(since=since, jobs=known.jobs, fillers=known.fillers) if known else Usage(since=since)
    for lease in running:
        _add(found, lease, state, now)
    bubble = now - found.since - found.jobs
    filled = min(found.fillers / bubble, 1.0) if bubble > 0 else None
    return {"seconds": now - found.since, "jobs_s": found.jobs, "fillers_s": found.fillers, "bubble_filled": filled}


def _add(usage: Usage, lease: Lease, state: State, now: float) -> None:
    seconds = now - lease.granted_at
    if state.jobs[lease.job].filler:
        usage.fillers += seconds
    else:
        usage.jobs += seconds
