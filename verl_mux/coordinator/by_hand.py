"""What somebody who may says by hand: a job is to end, what it held elsewhere is free, a node is given to nobody. Pure."""

from __future__ import annotations

from collections.abc import Callable

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core.hosts import pools
from verl_mux.coordinator.core.inputs_and_instructions import (
    BudgetSet,
    HostReleased,
    JobEvicted,
    MoveGivenUp,
    NodeDrained,
    NodeJoined,
    NodeLeaving,
    NodeReleased,
    OwedPaid,
    ProcessesGone,
    What,
)
from verl_mux.coordinator.core.records import Job, JobState, State
from verl_mux.coordinator.core.scaling import joining
from verl_mux.coordinator.core.settings import Config
from verl_mux.errors import UserError

_RUNNING = (JobState.LIVE, JobState.SILENT)
Decision = tuple[list[What], m.Message]
# Where processes of a job are seen to live, in words, by its name and uid; empty: nowhere.
Seen = Callable[[str, str], str]
Asked = m.Evict | m.Free | m.Drain | m.NodeAdd | m.NodeRemove | m.SetBudget


def decide(asked: Asked, state: State, config: Config, seen: Seen) -> Decision:
    """What follows, and the answer. Asked twice, it is done once."""
    if isinstance(asked, m.Evict):
        return _evict(asked, state)
    if isinstance(asked, m.SetBudget):
        return _budget(asked, state)
    if isinstance(asked, m.Drain):
        return _drain(asked, state, config)
    if isinstance(asked, m.NodeAdd):
        return _add(asked, config)
    if isinstance(asked, m.NodeRemove):
        return _remove(asked, state, config)
    if asked.name in state.jobs:
        return _free_job(state.jobs[asked.name], state, seen)
    hosts = [key for key, host in state.hosts.items() if asked.name in (key, *host.names)]
    if hosts and asked.name not in config.nodes:
        return _free_hosts(asked.name, hosts, state, seen)
    return _free_node(asked.name, state, config, seen)


def _drain(asked: m.Drain, state: State, config: Config) -> Decision:
    if asked.node not in config.nodes:
        return [], _no(f"no node {asked.node!r} is known here; pools and their nodes: {config.describe_pools()}")
    if (asked.node in state.draining) is not asked.undo:
        return [], m.Done(text=f"node {asked.node!r} {'is given to who asks' if asked.undo else 'is draining already'}")
    what = NodeDrained(node=asked.node, undo=asked.undo)
    if asked.undo:
        return [what], m.Done(text=f"node {asked.node!r} is given to who asks again")
    holders = sorted({lease.job for lease in state.leases.values() if asked.node in lease.nodes})
    left = f"; {', '.join(holders)} holds it until the end of a phase" if holders else ""
    return [what], m.Done(text=f"nobody gets node {asked.node!r} any more{left}")


def _add(asked: m.NodeAdd, config: Config) -> Decision:
    there = {name: pool for pool, members in config.pools.items() for name in (node.name for node in members.nodes)}
    known = config.nodes.get(asked.node)
    if known is not None and there[asked.node] == asked.pool and (known.host, known.gpu_ids) == (asked.host, asked.gpu_ids):
        return [], m.Done(text=f"node {asked.node!r} is in pool {asked.pool!r} already")
    try:
        node = joining.like_its_pool(config, asked)
    except UserError as error:
        return [], _no(str(error))
    return [NodeJoined(pool=asked.pool, node=node)], m.Done(text=f"node {asked.node!r} is in pool {asked.pool!r}")


def _remove(asked: m.NodeRemove, state: State, config: Config) -> Decision:
    if asked.node not in config.nodes:
        return [], _no(f"no node {asked.node!r} is known here; pools and their nodes: {config.describe_pools()}")
    pool, members = next((name, p.nodes) for name, p in config.pools.items() if any(n.name == asked.node for n in p.nodes))
    if all(node.name == asked.node or node.name in state.leaving for node in members):
        return [], _no(f"node {asked.node!r} is the last of pool {pool!r}, and a pool has at least one")
    needed = pools.needed_by(asked.node, state)
    if needed is not None and asked.if_idle:
        return [], _no(f"node {asked.node!r} is not idle: {needed}")
    out: list[What] = [] if asked.node in state.leaving else [NodeLeaving(node=asked.node)]
    out += _lost_with(asked.node, state) if asked.gone else []
    left = "" if needed is None else f", but {needed}" if not asked.gone else "; jobs on it end"
    return out, m.Done(text=f"nobody new gets node {asked.node!r}, and it is no more when nobody needs it{left}")


def _lost_with(node: str, state: State) -> list[What]:
    """What is over when the node is: the jobs on it, and the places there that were kept for jobs that move."""
    out: list[What] = []
    for job in state.jobs.values():
        if job.state in _RUNNING and node in job.all_nodes:
            out.append(JobEvicted(job=job.name, uid=job.uid, reason=f"its node {node} is gone"))
    for name, moving in state.moves.items():
        group = state.placed.group_of(name)
        if moving.left_at is not None and group is not None and node in (*group.rollout_nodes, *group.train_nodes):
            out.append(MoveGivenUp(job=name))
    return [*out, NodeReleased(node=node)]


def _budget(asked: m.SetBudget, state: State) -> Decision:
    job, account = state.jobs.get(asked.job), state.accounts.get(asked.job)
    if job is None or job.state not in _RUNNING or account is None:
        return [], _no(f"no job {asked.job!r} runs here; jobs: {_names(state)}")
    goes_on = "goes on" if account.usd < asked.usd else "begins no other step"
    what = BudgetSet(job=job.name, uid=job.uid, usd=asked.usd)
    return [what], m.Done(text=f"job {job.name!r} has cost {account.usd:.2f} of {asked.usd:.2f} USD and {goes_on}")


def _evict(asked: m.Evict, state: State) -> Decision:
    job = state.jobs.get(asked.job)
    if job is None:
        return [], _no(f"no job {asked.job!r} is known here; jobs: {_names(state)}")
    if job.state not in _RUNNING:
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
    if job.state in _RUNNING:
        return _no(f"job {job.name!r} is {job.state.value}: end it first, with `verl-mux evict {job.name}`")
    where = seen(job.name, job.uid)
    return _still_there(job.name, where) if where else None


def _still_there(job: str, where: str) -> m.Refused:
    return _no(f"processes of job {job!r} run {where}: what it holds comes free when they are gone")


def _names(state: State) -> str:
    return ", ".join(name for name, job in state.jobs.items() if job.state is not JobState.ENDED) or "none"


def _no(reason: str) -> m.Refused:
    return m.Refused(about="by hand", reason=reason)
