"""Which changes of the configuration are allowed while jobs run: at a restart, and when the file is read again. Pure."""

from __future__ import annotations

import msgspec

from verl_mux.coordinator.core.records import JobState, State
from verl_mux.coordinator.core.settings import Config, Node

_ADVICE = "While jobs run, pools and nodes may be added and times changed, and nodes removed that are draining and no job's"


def refusal(state: State, before: Config, after: Config) -> str | None:
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
            if left is not None and (_undrained(left) != _undrained(node) or left not in after.pools.get(name, pool).nodes):
                return f"node {node.name!r} is another. {_ADVICE}"
    return None


def _undrained(node: Node) -> Node:
    return msgspec.structs.replace(node, drain=False)


def _is_needed(node: Node, state: State) -> str | None:
    if reason := needed_by(node.name, state):
        return reason
    return None if node.drain else "is not draining: give it `drain: true` first"


def needed_by(node: str, state: State) -> str | None:
    """Who would miss the node, in words; None: nobody."""
    holders = sorted({lease.job for lease in state.leases.values() if node in lease.nodes})
    if holders:
        return f"job {holders[0]!r} holds it"
    users = [job.name for job in state.jobs.values() if job.state is not JobState.ENDED and node in job.all_nodes]
    if users:
        return f"job {users[0]!r} is registered on it: let it end, or evict it"
    placed = [group.jobs[0].name for group in state.placed.groups if node in (*group.rollout_nodes, *group.train_nodes)]
    return f"job {placed[0]!r} is placed on it: let it end, or evict it" if placed else None


def restart_needed(before: Config, after: Config) -> str | None:
    """Keys that are read at a start alone; None: nothing but pools differs."""
    names = [name for name in before.__struct_fields__ if name != "pools" and getattr(before, name) != getattr(after, name)]
    return f"{', '.join(names)} changed, which takes a restart of the coordinator; pools alone are read again" if names else None
