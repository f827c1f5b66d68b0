"""What somebody who may says by hand: a job is to end, or what it held elsewhere is free. The server carries it out."""

from __future__ import annotations

from collections.abc import Callable

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core.inputs_and_instructions import JobEvicted, NodeReleased, ProcessesGone, What
from verl_mux.coordinator.core.records import Job, JobState, State

_RUNNING = (JobState.LIVE, JobState.SILENT)


def decide(asked: m.Evict | m.Free, state: State, seen: Callable[[Job], list[m.Member]]) -> tuple[What | None, m.Message]:
    """What follows, and the answer. `seen`: the living processes of a job on this host. Asked twice, it is done once."""
    if isinstance(asked, m.Evict):
        return _evict(asked, state)
    job = state.jobs.get(asked.name)
    return _free_job(job, seen) if job is not None else _free_node(asked.name, state, seen)


def _evict(asked: m.Evict, state: State) -> tuple[What | None, m.Message]:
    job = state.jobs.get(asked.job)
    if job is None:
        return None, _no(f"no job {asked.job!r} is known here; jobs: {_names(state)}")
    if job.state not in _RUNNING:
        return None, m.Done(text=f"job {job.name!r} is {job.state.value} already: {job.reason}")
    what = JobEvicted(job=job.name, uid=job.uid, reason="evicted by hand")
    return what, m.Done(text=f"job {job.name!r} ends; its nodes come free when its processes are gone")


def _free_job(job: Job, seen: Callable[[Job], list[m.Member]]) -> tuple[What | None, m.Message]:
    if job.state is JobState.ENDED:
        return None, m.Done(text=f"job {job.name!r} holds nothing")
    if refusal := _not_free(job, seen):
        return None, refusal
    return ProcessesGone(job=job.name, uid=job.uid), m.Done(text=f"what job {job.name!r} held is free")


def _free_node(name: str, state: State, seen: Callable[[Job], list[m.Member]]) -> tuple[What | None, m.Message]:
    holders = {lease.job for lease in state.leases.values() if name in lease.nodes}
    if not holders:
        return None, m.Done(text=f"no job holds a node {name!r}; jobs: {_names(state)}")
    for job in sorted(holders):
        if refusal := _not_free(state.jobs[job], seen):
            return None, refusal
    return NodeReleased(node=name), m.Done(text=f"node {name!r} is free")


def _not_free(job: Job, seen: Callable[[Job], list[m.Member]]) -> m.Refused | None:
    if job.state in _RUNNING:
        return _no(f"job {job.name!r} is {job.state.value}: end it first, with `verl-mux evict {job.name}`")
    if alive := seen(job):
        pids = ", ".join(str(member.pid) for member in alive)
        return _no(f"processes of job {job.name!r} run on this host (pid {pids}): what it holds comes free when they are gone")
    return None


def _names(state: State) -> str:
    return ", ".join(name for name, job in state.jobs.items() if job.state is not JobState.ENDED) or "none"


def _no(reason: str) -> m.Refused:
    return m.Refused(about="by hand", reason=reason)
