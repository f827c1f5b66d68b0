"""Which nodes a filler gets, and when. Pure.

A filler asks for any so many of the nodes that it names. It gets them as soon as so many are *open*: nobody holds them, no job
that is heard from has asked for them, whatever holds that job's request back, and they are neither fenced nor draining. So no
filler is started where a job is about to begin, and since jobs never see the requests of fillers in their queues, none ever
waits behind one.

A filler may ask that the time in which a node is open be expected to last. What is expected follows from how long the last
phases of the jobs on that node were: a job that uses other nodes comes back when its phase there is over. Where a job has not
shown how long that takes, or is between two phases, it counts as coming at once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core.hosts import fences
from verl_mux.coordinator.core.records import Job, JobState, Request, State
from verl_mux.coordinator.core.settings import Config


def refusal(asked: m.LeaseRequest, job: Job) -> str | None:
    """Why a request has no form that fits who asks, or None."""
    if not job.filler:
        given = asked.num_nodes or asked.least
        return f"job {job.name!r} asks for any {asked.num_nodes} nodes: only a filler may" if given else None
    if asked.phase == "init" or asked.step:
        return f"filler {job.name!r} asks for {asked.phase}, step {asked.step}; fillers have neither init nor steps"
    if not 1 <= asked.num_nodes <= len(set(asked.nodes)):
        return f"filler {job.name!r} asks for any {asked.num_nodes} of {len(set(asked.nodes))} nodes"
    return None


def is_open(node: str, state: State) -> bool:
    """By definition; the index over who waits finds the same."""
    held = any(node in lease.nodes for lease in state.leases.values())
    return not held and not any(node in request.nodes and keeps_out(request, state) for request in state.requests)


def keeps_out(request: Request, state: State) -> bool:
    """Whether a request keeps fillers off the nodes that it names."""
    return not request.is_fillers and state.jobs[request.job].state is JobState.LIVE


def grantable(
    requests: Iterable[Request], state: State, config: Config, is_open: Callable[[str], bool], now: float
) -> list[tuple[Request, list[str]]]:
    """The requests of fillers to grant now, in order of arrival, each with its nodes."""
    granted: list[tuple[Request, list[str]]] = []
    taken: set[str] = set()
    for request in requests if state.settle_until is None else ():
        if state.jobs[request.job].state is not JobState.LIVE:
            continue
        free = [
            node
            for node in dict.fromkeys(request.nodes)
            if node not in taken and is_open(node) and not fences.refused([node], state, config)
        ]
        if request.least:
            free = [node for node in free if open_for(node, state, now) >= request.least]
        if len(free) >= request.num_nodes:
            nodes = free[: request.num_nodes]
            taken.update(nodes)
            granted.append((request, nodes))
    return granted


def open_for(node: str, state: State, now: float) -> float:
    """Seconds until a job is expected to ask for the node, on which none runs now; infinite where none will."""
    coming = [job for job in state.jobs.values() if job.running and node in job.all_nodes]
    ends = _expected_ends(state, {job.name for job in coming}, now)
    return min((max(ends[job.name], default=now) - now for job in coming), default=math.inf)


def _expected_ends(state: State, names: set[str], now: float) -> defaultdict[str, list[float]]:
    """Of the phases that these jobs run or wait for: when each is over if it takes as long as the last of its kind."""
    ends: defaultdict[str, list[float]] = defaultdict(list)
    for lease in state.leases.values():
        if lease.job in names:
            ends[lease.job].append(max(now, lease.granted_at + state.jobs[lease.job].last.get(lease.phase, 0.0)))
    for request in state.requests:
        if request.job in names:
            ends[request.job].append(now + state.jobs[request.job].last.get(request.phase, 0.0))
    return ends
