"""Whose request goes first among jobs that name their nodes: shares, then priorities, then arrival. Pure.

- The owner who was given the least goes first: GPU-seconds of his leases, those that run included, over his share. What was given
  counts for half after each `share_half_life`, so nobody saves up a claim while he is away, nor pays for ever for a night alone.
- Within an owner the highest priority goes first. A deadline adds one each time that its slack has halved, AGEING_S of waiting
add
  one too: so who is passed is passed for a bounded time, as priorities are bounded.
- No node is left free for it: who is first for all nodes that are free and his goes.

Jobs of a co-execution group keep the order of their group, which everybody's SLO was placed by.
"""

from __future__ import annotations

import math

from verl_mux.coordinator.core.people import accounts
from verl_mux.coordinator.core.records import Job, State
from verl_mux.coordinator.core.settings import Config

AGEING_S = 600.0
# A deadline adds no more than this.
_MOST_HALVINGS = 8


def update(state: State, config: Config, now: float) -> bool:
    """Puts on record who precedes whom of those that ask. Whether that has changed."""
    before, found = state.precedence, {}
    if state.requests and _matters(state, config):
        waiting: dict[str, float] = {}
        for request in state.requests:
            waiting.setdefault(request.job, request.asked_at)
        given = _given(state, config, now)
        keys = {name: (given[state.jobs[name].owner], -urgency(state.jobs[name], at, now)) for name, at in waiting.items()}
        place = {key: number for number, key in enumerate(sorted(set(keys.values())))}
        found = {name: place[key] for name, key in keys.items()}
    state.precedence = found
    return found != before


def of_waiting(state: State, config: Config, now: float) -> dict[str, int]:
    """The same of jobs that wait to be placed, of whom the owner who *holds* the least goes first: by urgency, then by what their
    owners were given."""
    given = _given(state, config, now)
    jobs = [state.jobs[entry.job.name] for entry in state.placed.waiting if entry.job.name in state.jobs]
    keys = {job.name: (-urgency(job, job.came, now), given[job.owner] if config.shares else 0.0) for job in jobs}
    place = {key: number for number, key in enumerate(sorted(set(keys.values())))}
    return {name: place[key] for name, key in keys.items()}


def urgency(job: Job, waits_since: float, now: float) -> int:
    """Its priority, with what its deadline and its waiting add."""
    return job.priority + _halvings(job, now) + int(max(now - waits_since, 0.0) // AGEING_S)


def _halvings(job: Job, now: float) -> int:
    """How often the time that it has left over has halved since it came."""
    if job.deadline is None:
        return 0
    left = max(job.deadline - now - _to_do_s(job), 1e-9)
    return max(0, min(_MOST_HALVINGS, math.floor(math.log2(max(job.deadline - job.came, 1.0) / left))))


def _to_do_s(job: Job) -> float:
    """By its last step; nothing is known before one."""
    steps = (job.steps or 0) - job.finished
    return max(steps, 0) * sum(job.last.values())


def _matters(state: State, config: Config) -> bool:
    return bool(config.shares) or any(
        state.jobs[r.job].priority or state.jobs[r.job].deadline is not None for r in state.requests
    )


def _given(state: State, config: Config, now: float) -> dict[str, float]:
    """By owner of any job: GPU-seconds over his share; all alike where nobody has a share."""
    if not config.shares:
        return dict.fromkeys((job.owner for job in state.jobs.values()), 0.0)
    found = {owner: accounts.served(state, config, owner, now) for owner in {job.owner for job in state.jobs.values()}}
    for lease in state.leases.values():
        if not (job := state.jobs[lease.job]).filler:
            found[job.owner] += sum(max(config.nodes[n].gpus, 1) for n in lease.nodes if n in config.nodes) * (
                now - lease.granted_at
            )
    return {owner: gpu_s / config.shares.get(owner, 1.0) for owner, gpu_s in found.items()}
