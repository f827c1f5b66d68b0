"""What follows when an operator ends a job, or says that nothing of a dead one is left where the coordinator cannot look.

Runs in the coordinator's loop; called by server.py; pure.
"""

from __future__ import annotations

from collections.abc import Callable

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core import records as r
from verl_mux.coordinator.core.records import RUNNING, Job, JobState, State, What
from verl_mux.coordinator.core.settings import Config
from verl_mux.errors import UserError

_Decision = tuple[list[What], str]  # the inputs that follow, and what was done, in words
Seen = Callable[[str, str], str]  # where processes of a job are seen to live, in words, by its name and uid; empty: nowhere


def decide(asked: m.ByHand, state: State, config: Config, seen: Seen) -> tuple[list[What], m.Message]:
    """The inputs that follow, and the answer. Asked twice, it is done once."""
    try:
        inputs, text = _evict(asked, state) if isinstance(asked, m.Evict) else _free(asked.name, state, config, seen)
    except UserError as error:
        return [], m.Refused(about="by hand", reason=str(error))
    return inputs, m.Done(text=text)


def _evict(asked: m.Evict, state: State) -> _Decision:
    job = state.jobs.get(asked.job)
    if job is None:
        raise UserError(f"no job {asked.job!r} is known here; jobs: {_names(state)}")
    if job.state not in RUNNING:
        return [], f"job {job.name!r} is {job.state.value} already: {job.reason}"
    what = r.JobEvicted(job=job.name, uid=job.uid, reason="evicted by hand")
    return [what], f"job {job.name!r} ends; its nodes come free when its processes are gone"


def _free(name: str, state: State, config: Config, seen: Seen) -> _Decision:
    """Of a job, a host or a node of that name."""
    if name in state.jobs:
        return _free_job(state.jobs[name], state, seen)
    keys = [key for key, host in state.hosts.items() if name in (key, *host.names)]
    if keys and name not in config.nodes:
        for host in [state.hosts[key] for key in keys]:
            if host.agent and not host.gone:
                reason = "is looked at by its agent: what is left there comes free when that has seen it gone"
                raise UserError(f"host {name!r} {reason}")
            for owed in host.owed:
                _check_gone(owed.job, owed.uid, seen)
        return [r.HostReleased(host=key) for key in keys], f"nodes of host {name!r} are free of what jobs may have left there"
    holders = {lease.job for lease in state.leases.values() if name in lease.nodes}
    if not holders and name not in state.fenced:
        if name not in config.nodes and all(node.host != name for node in config.nodes.values()):
            known = f"jobs: {_names(state)}; pools and their nodes: {config.describe_pools()}"
            raise UserError(f"no job, node or host {name!r} is known here; {known}")
        return [], f"no job holds a node {name!r}; jobs: {_names(state)}"
    for holder in sorted(holders):
        _check_over(state.jobs[holder], seen)
    for owed in (owed for host in state.hosts.values() for owed in host.owed if name in owed.nodes):
        _check_gone(owed.job, owed.uid, seen)
    return [r.NodeReleased(node=name)], f"node {name!r} is free"


def _free_job(job: Job, state: State, seen: Seen) -> _Decision:
    owed = [(key, owed) for key, host in state.hosts.items() for owed in host.owed if owed.job == job.name]
    inputs: list[What] = [r.OwedPaid(host=key, uid=owed.uid) for key, owed in owed]
    if job.state is JobState.ENDED and not inputs:
        return [], f"job {job.name!r} holds nothing"
    _check_over(job, seen)
    if job.state is JobState.DYING:
        inputs.append(r.ProcessesGone(job=job.name, uid=job.uid))
    return inputs, f"what job {job.name!r} held is free"


def _check_over(job: Job, seen: Seen) -> None:
    """Raises UserError while the job runs, or processes of it are seen."""
    if job.state in RUNNING:
        raise UserError(f"job {job.name!r} is {job.state.value}: end it first, with `verl-mux evict {job.name}`")
    _check_gone(job.name, job.uid, seen)


def _check_gone(job: str, uid: str, seen: Seen) -> None:
    if where := seen(job, uid):
        raise UserError(f"processes of job {job!r} run {where}: what it holds comes free when they are gone")


def _names(state: State) -> str:
    return ", ".join(name for name, job in state.jobs.items() if job.state is not JobState.ENDED) or "none"
