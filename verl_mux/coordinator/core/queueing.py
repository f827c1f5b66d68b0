"""Who may go next. Pure functions over the records: no I/O, no clock, nothing changed except by `advance`.

Requests stand in one list in order of arrival, which is a queue per node: a request heads the queue of a node when no
earlier request that may run names it. It is granted when it heads the queues of all its nodes and all are free, so it
gets all or waits, and, since all queue in one order, no two wait for each other. Jobs of a co-execution group that has an order
of its own queue in that order.

A request that is *held back* keeps its place but does not stand in anybody's way:
- `settling`  the coordinator lost its memory and first lets jobs assert the leases they hold;
- `silent`    its job is not heard from;
- `fenced`    one of its nodes is on a host where nobody can look, or something of a dead job may be left there;
- `draining`  one of its nodes is given to nobody any more;
- `start`     step 1 and later wait until `expect_jobs` jobs are through with init and ask for their first step;
- `barrier`   its step lies in a later segment of the schedule than the current one;
- `turn`      in a sequential segment, another job has the turn.

A request that could never be granted does not even get a place: see `refusal`. Requests of fillers stand in no queue: see
fillers/granting.py.
"""

from __future__ import annotations

from collections.abc import Iterable

from verl_mux.coordinator.bus import limits
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core.hosts import fences
from verl_mux.coordinator.core.records import Job, JobState, Lease, Request, State
from verl_mux.coordinator.core.settings import Config, Segment


def segment_of(schedule: list[Segment], step: int) -> int:
    """Index of the segment that the 1-based `step` lies in; steps past the end stay in the last one."""
    end = 0
    for index, segment in enumerate(schedule[:-1]):
        end += segment.steps or 0  # only the last may leave them out
        if step <= end:
            return index
    return len(schedule) - 1


def mode(state: State, config: Config) -> str:
    return config.schedule[state.segment].mode


def turn(state: State, config: Config) -> Job | None:
    """The job whose turn it is in a sequential segment: the first registered that is not through with it."""
    running = sorted((job for job in state.jobs.values() if takes_part(job, state)), key=lambda job: job.order)
    return next((job for job in running if _has_steps_left(job, state, config) or _is_in_a_step(job, state)), None)


def takes_part(job: Job, state: State) -> bool:
    """In turns and barriers."""
    return job.running


def _is_in_a_step(job: Job, state: State) -> bool:
    return any(lease.step > 0 for lease in state.leases_of(job.name))


def _has_steps_left(job: Job, state: State, config: Config) -> bool:
    return segment_of(config.schedule, job.finished + 1) <= state.segment and not _past_the_end(job, state, config)


def _past_the_end(job: Job, state: State, config: Config) -> bool:
    """True when the last segment has a length of its own and the job is through with it."""
    last = state.segment == len(config.schedule) - 1
    return last and config.schedule[-1].steps is not None and job.finished >= sum(s.steps or 0 for s in config.schedule)


def advance(state: State, config: Config) -> bool:
    """Opens the start gate and the next segment once every job that counts has arrived. True if a segment began."""
    if not state.started:
        jobs = [job for job in state.jobs.values() if not job.filler]
        gone = (JobState.DYING, JobState.ENDED)
        arrived = sum(job.initialised or job.state in gone for job in jobs)
        state.started = arrived >= config.expect_jobs
    if state.segment == len(config.schedule) - 1:
        return False
    running = [job for job in state.jobs.values() if takes_part(job, state)]
    if not state.started or not running:
        return False
    reached = min(segment_of(config.schedule, job.finished + 1) for job in running)
    began = reached > state.segment
    state.segment = max(state.segment, reached)
    return began


def held_back(request: Request, state: State, config: Config, owner: Job | None = None) -> str | None:
    """Why the request does not even stand in its queues (see the module's list), or None.

    owner: whose turn it is, by whoever asks for many requests; None: it is looked up.
    """
    if state.settle_until is not None:
        return "settling"
    if state.jobs[request.job].state is not JobState.LIVE:
        return "silent"
    if refused := fences.refused(request.nodes, state, config):
        return refused
    if request.step == 0:
        return None
    if not state.started:
        return "start"
    if segment_of(config.schedule, request.step) > state.segment:
        return "barrier"
    if mode(state, config) == "sequential":
        owner = owner or turn(state, config)
        # A job through with all its steps may still validate: it takes its place in the queue like anybody.
        if owner is not None and owner.name != request.job and state.jobs[request.job].running:
            return "turn"
    return None


def refusal(asked: m.LeaseRequest, job: Job, leases: list[Lease], waiting: int) -> str | None:
    """Why the request cannot even wait, or None. leases: of the job. waiting: its requests."""
    if asked.phase not in m.PHASES:
        return f"phase {asked.phase!r} is not known; allowed: {', '.join(m.PHASES)}"
    if asked.step < 0 or (asked.phase == "init" and asked.step > 0):
        return f"phase {asked.phase!r} with step {asked.step}; steps count from 1, and 0 is init and what comes before"
    if not asked.nodes or not set(asked.nodes) <= set(job.all_nodes):
        return f"job {job.name!r} asks for nodes {asked.nodes}; it registered {job.all_nodes}"
    if waiting >= limits.REQUESTS_OF_A_JOB:
        return f"job {job.name!r} has {limits.REQUESTS_OF_A_JOB} requests that wait; no more are allowed"
    for lease in leases:
        if shared := sorted(set(lease.nodes) & set(asked.nodes)):
            return (
                f"job {job.name!r} asks for {asked.phase} on {shared[0]!r}, which it holds under token {lease.token}"
                f" ({lease.phase}, step {lease.step}): release that first"
            )
    return None


def in_order(requests: Iterable[Request], state: State) -> list[Request]:
    """By the order of their co-execution groups, others in order of arrival, in which they are given."""
    return sorted(requests, key=lambda request: rank(request, state))


def rank(request: Request, state: State) -> int:
    """Of jobs that were placed, see scheduling/time/order.py; who names its nodes shares them with none of those."""
    watched = state.jobs[request.job].watched
    return 0 if watched is None or request.step == 0 else watched.rank


def grantable(state: State, config: Config) -> list[Request]:
    """The requests of jobs to grant now, in order. Init is always exclusive; an uncoordinated segment excludes nobody but
    fillers."""
    shared = mode(state, config) == "uncoordinated"
    owner = turn(state, config) if mode(state, config) == "sequential" else None
    taken = {node for lease in state.leases.values() for node in lease.nodes}
    filled = {node for lease in state.leases.values() if state.jobs[lease.job].filler for node in lease.nodes}
    granted = []
    for request in in_order(state.requests, state):
        if request.is_fillers or held_back(request, state, config, owner):
            continue
        if taken.isdisjoint(request.nodes) or (shared and request.step > 0 and filled.isdisjoint(request.nodes)):
            granted.append(request)
        taken.update(request.nodes)
    return granted


def contended(job: Job, state: State, config: Config) -> list[str]:
    """The job's nodes that another job stands in the queue for, in the job's order."""
    wanted = {
        node
        for request in state.requests
        if request.job != job.name and not request.is_fillers and not held_back(request, state, config)
        for node in request.nodes
    }
    return [node for node in job.all_nodes if node in wanted]


def gangs(job: Job, state: State, config: Config) -> list[list[str]]:
    """What of the job's leases would let another job begin, if it alone came back: of each request that is the first on all
    of its nodes and waits for nobody else, the nodes that this job holds. Of leases of several nodes; others cannot be parted."""
    mine = {node for lease in state.leases.values() if lease.job == job.name and len(lease.nodes) > 1 for node in lease.nodes}
    others = {node for lease in state.leases.values() for node in lease.nodes} - mine
    found, taken = [], set[str]()
    for request in in_order(state.requests, state) if mine else ():
        if request.is_fillers or held_back(request, state, config):
            continue
        needed = [node for node in job.all_nodes if node in mine and node in request.nodes]
        if needed and request.job != job.name and taken.isdisjoint(request.nodes) and others.isdisjoint(request.nodes):
            found.append(needed)
        taken.update(request.nodes)
    return sorted(found)
