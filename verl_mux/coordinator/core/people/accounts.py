"""What owners were given and what jobs have cost, counted when a lease comes back. Pure.

An owner's GPU-seconds count for half as much after each `share_half_life`. A job's account is its name's: starts of it add up
until one of them has finished, so a restart or a move begins no new budget.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean

from verl_mux.coordinator.bus import limits
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core.inputs_and_instructions import Log
from verl_mux.coordinator.core.records import Account, Job, JobState, Lease, Request, Served, State
from verl_mux.coordinator.core.settings import Config, ordinary
from verl_mux.errors import UserError
from verl_mux.placement.estimator import LEAST
from verl_mux.placement.model import Cluster
from verl_mux.profiling.eventlog import events

# The part of a budget at which somebody is told.
NEAR = 0.8
_NOBODYS = 1e-3  # GPU-seconds of an owner that are not worth remembering


def check(asked: m.Register, state: State, config: Config, nodes: Iterable[str]) -> None:
    """Whether the job can keep to its budget. nodes: those that it names. Raises UserError."""
    if asked.budget_usd is None:
        return
    free = [node for node in nodes if config.price(node) is None]
    if free:
        raise UserError(
            f"job {asked.job!r} has a budget, but node {free[0]!r} has no price: give it usd_per_hour, or its pool a kind"
        )
    account = state.accounts.get(asked.job)
    expected = _expected_usd(asked, config)
    if expected is not None and account is None and expected > asked.budget_usd:
        raise UserError(
            f"job {asked.job!r} would cost {expected:.2f} USD by its profile ({asked.steps} steps), and its budget is"
            f" {asked.budget_usd:.2f} USD"
        )


def _expected_usd(asked: m.Register, config: Config) -> float | None:
    """By its profile, alone on as many nodes as it asks for, the cheapest that it may get; None: it has none, or does not say how
    long it runs."""
    needs, seen = asked.needs, asked.profiled
    if needs is None or asked.steps is None or min(len(seen.rollout), len(seen.train)) < LEAST:
        return None
    counts, means = (needs.rollout_nodes, needs.train_nodes), (fmean(seen.rollout), fmean(seen.train))

    def usd(cluster: Cluster) -> float:
        names = cluster.train.name if asked.colocated else cluster.rollout.name, cluster.train.name
        prices = [_least_usd(config, name, asked.movable) for name in names]
        return sum(s * count * price / 3600 for s, count, price in zip(means, counts, prices, strict=True))

    return asked.steps * min(map(usd, config.clusters.values()))


def _least_usd(config: Config, pool: str, movable: bool) -> float:
    """Per hour of a node of a pool that jobs are placed on. Nodes that may vanish are for who can be moved."""
    nodes = config.pools[pool].nodes
    return min(config.price(node.name) or 0.0 for node in (nodes if movable else ordinary(nodes)))


def opened(state: State, job: Job, asked: m.Register, now: float) -> None:
    """A start of the job comes."""
    if asked.filler:
        return
    known = state.accounts.get(job.name)
    if known is None or known.owner != asked.owner:
        known = state.accounts[job.name] = Account(owner=asked.owner, since=now)
    job.owner, job.priority, job.budget_usd = asked.owner, asked.priority, asked.budget_usd
    if asked.deadline_s is not None:
        job.deadline = now + asked.deadline_s
    elif asked.within_s is not None:
        job.deadline = known.since + asked.within_s


def closed(state: State, job: Job, what: m.Deregister) -> None:
    """It leaves; its account is settled if it has finished. One that only looked whether it would be taken is still to come."""
    if job.has_asked and not what.reason and not what.moving:
        state.accounts.pop(job.name, None)


def charge(state: State, config: Config, lease: Lease, nodes: Iterable[str], now: float) -> None:
    """These nodes of the lease come back."""
    job = state.jobs[lease.job]
    if job.filler:
        return
    seconds, nodes = now - lease.granted_at, [node for node in nodes if node in config.nodes]
    gpus = sum(max(config.nodes[node].gpus, 1) for node in nodes)
    state.served[job.owner] = Served(gpu_s=served(state, config, job.owner, now) + gpus * seconds, at=now)
    if (account := state.accounts.get(job.name)) is not None:
        account.usd += sum((config.price(node) or 0.0) * seconds / 3600 for node in nodes)


def served(state: State, config: Config, owner: str, now: float) -> float:
    """GPU-seconds of the owner's leases that came back, as they count now."""
    found = state.served.get(owner)
    return 0.0 if found is None else found.gpu_s * 0.5 ** (max(now - found.at, 0.0) / config.share_half_life)


def forget_old(state: State, config: Config, now: float) -> None:
    """Names of owners and jobs come from clients: they must not fill the memory."""
    if len(state.served) > limits.ENDED_JOBS_REMEMBERED:
        for owner in [owner for owner in state.served if served(state, config, owner, now) < _NOBODYS]:
            del state.served[owner]
    away = [name for name in state.accounts if name not in state.jobs or state.jobs[name].state is JobState.ENDED]
    for name in away[: -limits.ENDED_JOBS_REMEMBERED]:
        del state.accounts[name]


def told(state: State, job: Job) -> list[Log]:
    """What is to be said of its budget, once each."""
    account = state.accounts.get(job.name)
    if account is None or not job.budget_usd:
        return []
    about = {"job": job.name, "usd": account.usd, "budget_usd": job.budget_usd, "owner": job.owner}
    if is_spent(job, state) and account.told < 2:
        account.told = 2
        return [Log(events.BUDGET_SPENT, about)]
    if account.usd >= NEAR * job.budget_usd and account.told < 1:
        account.told = 1
        return [Log(events.BUDGET_NEAR, about)]
    return []


def set_budget(state: State, job: Job, usd: float) -> None:
    job.budget_usd = usd
    if (account := state.accounts.get(job.name)) is not None:
        account.told = 0


def is_spent(job: Job, state: State) -> bool:
    account = state.accounts.get(job.name)
    return job.budget_usd is not None and account is not None and account.usd >= job.budget_usd


def is_held(request: Request, state: State) -> bool:
    """It would begin a step, and its job's budget is spent."""
    job = state.jobs[request.job]
    return request.phase == "rollout" and request.step > job.reported and is_spent(job, state)


def is_paused(job: Job, state: State) -> bool:
    """Its budget is spent, and it has no step to finish."""
    return is_spent(job, state) and any(request.job == job.name and is_held(request, state) for request in state.requests)
