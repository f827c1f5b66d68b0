"""How long the coordinator bears with a job: one that is silent, and one whose phase takes far longer than its phases do. Pure.

Silence takes nodes away when it lasted longer than the lease, by a clock that counts the time in which the coordinator itself
ran, and another job waits; or, if nobody does, when it lasted longer by SILENT_TIMEOUT_S still. The silent job has by then
fenced itself, see docs/protocol.md; if it cannot, because it is stopped, its processes are ended before anybody gets its nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from verl_mux.coordinator.bus.conversation import BEAT_EVERY_S, FENCED_AFTER, RECONNECTS_WITHIN_S
from verl_mux.coordinator.core import queueing
from verl_mux.coordinator.core.inputs_and_instructions import JobRevoked, JobSilent, PhaseOverdue, What
from verl_mux.coordinator.core.records import Job, JobState, Lease, State
from verl_mux.coordinator.core.settings import OVERDUE_FACTOR, OVERDUE_LEAST_S, SILENT_TIMEOUT_S, Config


def first_look(config: Config) -> float:
    """Seconds of running time after which a coordinator at an address of which no earlier one is known may grant, if it can be
    reached from its own machine only and nobody from before has spoken.

    Why nobody then holds a lease. Whoever holds one is on this machine, where no network keeps a client away. Without its
    coordinator it tries to connect again within twice RECONNECTS_WITHIN_S, and it beats every BEAT_EVERY_S. That a running
    process does what is due within 1 - FENCED_AFTER of the lease is what fencing relies on as well. So each job that runs
    has spoken by the end of the three; then all is as after a loss of memory, and the coordinator settles for the whole
    lease. A job that is stopped says nothing, but then that does not help it for a lease either (docs/protocol.md, What may
    be assumed).
    """
    return min(config.lease_timeout, 2 * RECONNECTS_WITHIN_S + BEAT_EVERY_S + (1 - FENCED_AFTER) * config.lease_timeout)


def is_late(heard: float, now: float, config: Config) -> bool:
    """Both in running time."""
    return now - heard > config.lease_timeout


def is_nearly_late(heard: float, now: float, config: Config) -> bool:
    """Whether its lease may end before the next look: the job has fenced itself by now. Both in running time."""
    return FENCED_AFTER * config.lease_timeout < now - heard <= config.lease_timeout


def is_lost(heard: float, now: float, config: Config) -> bool:
    """Silent for so long that nobody need wait for its nodes. Both in running time."""
    return now - heard > config.lease_timeout + SILENT_TIMEOUT_S


def silent(state: State, config: Config, heard: Mapping[str, float], now: float) -> tuple[dict[str, Job], list[What]]:
    """The silent jobs by name, and what tells of those that are so only now."""
    running = [job for job in state.jobs.values() if job.state in (JobState.LIVE, JobState.SILENT)]
    late = [job for job in running if job.state is JobState.LIVE and is_late(heard[job.name], now, config)]
    found = {job.name: job for job in (*late, *(job for job in running if job.state is JobState.SILENT))}
    return found, [JobSilent(job=job.name, uid=job.uid) for job in late]


def revoked(
    silent: Mapping[str, Job], state: State, config: Config, heard: Mapping[str, float], now: float, running: float
) -> list[What]:
    """What takes their nodes from those silent jobs that others wait for, or that nobody need wait for any more."""
    waited = {job.name for job in in_the_way(silent, state, config)} if silent else set()
    over = [job for job in silent.values() if job.name in waited or is_lost(heard[job.name], running, config)]
    since = may_not_use_since(now, config)
    return [JobRevoked(job=job.name, uid=job.uid, since=since, waited=job.name in waited) for job in over]


def may_not_use_since(now: float, config: Config) -> float:
    """From when a job that is found silent beyond its lease at `now` had to keep off its nodes."""
    return now - (1 - FENCED_AFTER) * config.lease_timeout


def in_the_way(silent: Mapping[str, Job], state: State, config: Config) -> list[Job]:
    """The silent jobs on whose nodes a job that is not silent waits, or for whose turn, or at a barrier that they are before."""
    waiting = [request for request in state.requests if request.job not in silent and not request.is_fillers]
    why = [(request, queueing.held_back(request, state, config)) for request in waiting]
    wanted = {node for request, reason in why if reason is None for node in request.nodes}
    holders = {lease.job for lease in state.leases.values() if not wanted.isdisjoint(lease.nodes)}
    stuck = any(reason in ("turn", "barrier") for _, reason in why)
    return [job for job in silent.values() if job.name in holders or (stuck and _holds_the_schedule_up(job, state, config))]


def _holds_the_schedule_up(job: Job, state: State, config: Config) -> bool:
    if queueing.mode(state, config) == "sequential" and queueing.turn(state, config) is job:
        return True
    return queueing.takes_part(job, state) and queueing.segment_of(config.schedule, job.finished + 1) <= state.segment


def limit(job: Job, phase: str) -> float | None:
    """Seconds after which a phase of this kind counts as hung; None while the job has not shown how long it takes."""
    longest = job.longest.get(phase)
    return None if longest is None else max(OVERDUE_LEAST_S, OVERDUE_FACTOR * longest)


def is_overdue(job: Job, lease: Lease, now: float) -> bool:
    after = limit(job, lease.phase)
    return job.state is JobState.LIVE and not job.filler and after is not None and now - lease.granted_at > after


def overdue(state: State, now: float, but: Collection[str]) -> list[What]:
    """What tells of phases that have come to count as hung, once each. `but`: jobs by name, of which that is not asked."""
    out: list[What] = []
    for lease in state.leases.values():
        job = state.jobs[lease.job]
        if job.name in but or lease.token in job.overdue or not is_overdue(job, lease, now):
            continue
        out.append(PhaseOverdue(job=job.name, uid=job.uid, token=lease.token))
    return out


def phase_ended(job: Job, lease: Lease, now: float) -> None:
    """Its length is what later ones are measured against."""
    job.last[lease.phase] = now - lease.granted_at
    job.longest[lease.phase] = max(job.longest.get(lease.phase, 0.0), now - lease.granted_at)
    job.overdue = [token for token in job.overdue if token != lease.token]
