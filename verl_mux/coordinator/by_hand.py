"""What follows when an operator ends a job, or says that nothing of a dead one is left where the coordinator cannot look.

Runs in the coordinator's loop; called by server.py; pure.
"""

from __future__ import annotations

from collections.abc import Callable

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core.records import (
    RUNNING,
    HostReleased,
    Job,
    JobEvicted,
    JobState,
    NodeReleased,
    OwedPaid,
    ProcessesGone,
    State,
    What,
)
from verl_mux.coordinator.core.settings import Config

Decision = tuple[list[What], m.Message]
# Where processes of a job are seen to live, in words, by its name and uid; empty: nowhere.
Seen = Callable[[str, str], str]


def decide(asked: m.ByHand, state: State, config: Config, seen: Seen) -> Decision:
    """The inputs that follow, and the answer. Asked twice, it is done once."""
    if isinstance(asked, m.Evict):
        return _evict(asked, state)
    if asked.name in state.jobs:
        return _free_job(state.jobs[asked.name], state, seen)
    hosts = [key for key, host in state.hosts.items() if asked.name in (key, *host.names)]
    if hosts and asked.name not in config.nodes:
        return _free_hosts(asked.name, hosts, state, seen)
    return _free_node(asked.name, state, config, seen)


def _evict(asked: m.Evict, state: State) -> Decision:
    job = state.jobs.get(asked.job)
    if job is None:
        return [], _no(f"no job {asked.job!r} is known here; jobs: {_names(state)}")
    if job.state not in RUNNING:
        return [], m.Done(text=f"job {job.name!r} is {job.state.value} already: {job.reason}")
    what = JobEvicted(job=job.name, uid=job.uid, reason="evicted by hand")
    return [what], m.Done(text=f"job {job.name!r} ends; its nodes come free when its processes are gone")


def _free_job(job: Job, state: State, seen: Seen) -> Decision:
    owed = [(key, owed) for key, host in state.hosts.items() for owed in host.owed if owed.job == job.name]
    out: list[What] = [OwedPaid(host=key, uid=owed.uid) for key, owed in owed]
    if job.state is JobState.ENDED and not out:
        return [], m.Done(text=f"job {job.name!r} holds nothing")
    if refusal := _not_free(job, seen):
        return [], refusal
    if job.state is JobState.DYING:
        out.append(ProcessesGone(job=job.name, uid=job.uid))
    return out, m.Done(text=f"what job {job.name!r} held is free")


def _free_node(name: str, state: State, config: Config, seen: Seen) -> Decision:
    holders = {lease.job for lease in state.leases.values() if name in lease.nodes}
    owed = [owed for host in state.hosts.values() for owed in host.owed if name in owed.nodes]
    if not holders and name not in state.fenced:
        if name not in config.nodes and all(node.host != name for node in config.nodes.values()):
            known = f"jobs: {_names(state)}; pools and their nodes: {config.describe_pools()}"
            return [], _no(f"no job, node or host {name!r} is known here; {known}")
        return [], m.Done(text=f"no job holds a node {name!r}; jobs: {_names(state)}")
    for job in sorted(holders):
        if refusal := _not_free(state.jobs[job], seen):
            return [], refusal
    for each in owed:
        if where := seen(each.job, each.uid):
            return [], _still_there(each.job, where)
    return [NodeReleased(node=name)], m.Done(text=f"node {name!r} is free")


def _free_hosts(name: str, keys: list[str], state: State, seen: Seen) -> Decision:
    for key in keys:
        host = state.hosts[key]
        if host.agent and not host.gone:
            return [], _no(f"host {name!r} is looked at by its agent: what is left there comes free when that has seen it gone")
        for owed in host.owed:
            if where := seen(owed.job, owed.uid):
                return [], _still_there(owed.job, where)
    return [HostReleased(host=key) for key in keys], m.Done(
        text=f"nodes of host {name!r} are free of what jobs may have left there"
    )


def _not_free(job: Job, seen: Seen) -> m.Refused | None:
    if job.state in RUNNING:
        return _no(f"job {job.name!r} is {job.state.value}: end it first, with `verl-mux evict {job.name}`")
    where = seen(job.name, job.uid)
    return _still_there(job.name, where) if where else None


def _still_there(job: str, where: str) -> m.Refused:
    return _no(f"processes of job {job!r} run {where}: what it holds comes free when they are gone")


def _names(state: State) -> str:
    return ", ".join(name for name, job in state.jobs.items() if job.state is not JobState.ENDED) or "none"


def _no(reason: str) -> m.Refused:
    return m.Refused(about="by hand", reason=reason)
