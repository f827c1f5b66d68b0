"""Which registrations and requests are refused, and in what words. Pure functions over the records."""

from __future__ import annotations

from verl_mux.coordinator import messages as m
from verl_mux.coordinator import placing
from verl_mux.coordinator.config import Config
from verl_mux.coordinator.records import Job, JobState, State
from verl_mux.errors import UserError


def refuse(asked: m.Register, known: Job | None, state: State, config: Config) -> m.Refused | None:
    """`known`: the job on record under that name, if any."""
    if known is not None and known.state is not JobState.ENDED and known.uid != asked.uid:
        return _name_taken(known)
    if known is not None and known.uid == asked.uid and _given_up(known, asked):
        return _no(f"job {asked.job!r} was given up: {known.reason}")
    for other in state.jobs.values():
        if other.uid == asked.uid and other.name != asked.job and other.state is not JobState.ENDED:
            return _no(f"uid {asked.uid!r} is that of job {other.name!r}; every start needs its own VERL_MUX_JOB_UID")
    try:
        if asked.wants_placement:
            placing.check(asked, state, config)
        else:
            placing.named_by_hand(asked, resolve(asked, config), state)
    except UserError as error:
        return _no(str(error))
    return None


def _name_taken(known: Job) -> m.Refused:
    ending = known.state is JobState.DYING
    what = "is ending, but its processes are not all gone" if ending else "is running"
    reason = f"a job named {known.name!r} {what} (pid {known.pid} on {known.host}); job names are unique"
    return _no(reason, retry=ending)


def _given_up(known: Job, asked: m.Register) -> bool:
    return known.state is JobState.DYING or (known.state is JobState.ENDED and asked.again)


def _no(reason: str, retry: bool = False) -> m.Refused:
    return m.Refused(about="register", reason=reason, retry=retry)


def resolve(asked: m.Register, config: Config) -> dict[str, list[str]]:
    """Nodes per side with pool names spelt out. Raises UserError for what is not there or too large."""
    if not asked.nodes or any(side not in m.SIDES for side in asked.nodes):
        raise UserError(f"job {asked.job!r} names nodes for {sorted(asked.nodes)}; allowed sides: {', '.join(m.SIDES)}")
    nodes = {side: _spell_out(asked.job, side, names, config) for side, names in asked.nodes.items()}
    known = {*nodes, *(name for names in nodes.values() for name in names)}
    for where, gpus in asked.gpus.items():
        if where not in known:
            allowed = ", ".join(sorted(known))
            raise UserError(f"job {asked.job!r} asks for {gpus} GPUs on {where!r}; allowed there: {allowed}")
        for name in nodes.get(where, [where]):
            _check_gpus(asked.job, name, gpus, config)
    return nodes


def _spell_out(job: str, side: str, names: list[str], config: Config) -> list[str]:
    spelt: list[str] = []
    for name in names:
        if config.node(name):
            spelt.append(name)
        elif name in config.pools:
            spelt += [node.name for node in config.pools[name].nodes]
        else:
            raise UserError(
                f"job {job!r} asks for {side} on {name!r}, which is no pool or node here;"
                f" pools and their nodes: {config.describe_pools()}"
            )
    if not spelt:
        raise UserError(f"job {job!r} names no node for {side}; pools and their nodes: {config.describe_pools()}")
    return list(dict.fromkeys(spelt))


def _check_gpus(job: str, name: str, gpus: int, config: Config) -> None:
    node = config.node(name)
    if gpus > node.gpus:
        pool, members = next((pool, p.nodes) for pool, p in config.pools.items() if node in p.nodes)
        total = sum(member.gpus for member in members)
        raise UserError(
            f"job {job!r} asks for {gpus} GPUs on node {name!r}, which has {node.gpus}"
            f" (pool {pool!r} has {total} on {len(members)} nodes)"
        )


def refuse_request(asked: m.LeaseRequest, job: Job, state: State) -> str | None:
    """Why the request cannot even wait, or None."""
    if asked.phase not in m.PHASES:
        return f"phase {asked.phase!r} is not known; allowed: {', '.join(m.PHASES)}"
    if asked.step < 0 or (asked.phase == "init" and asked.step > 0):
        return f"phase {asked.phase!r} with step {asked.step}; steps count from 1, and 0 is init and what comes before"
    if not asked.nodes or not set(asked.nodes) <= set(job.all_nodes):
        return f"job {job.name!r} asks for nodes {asked.nodes}; it registered {job.all_nodes}"
    for lease in state.leases_of(job.name):
        if shared := sorted(set(lease.nodes) & set(asked.nodes)):
            return (
                f"job {job.name!r} asks for {asked.phase} on {shared[0]!r}, which it holds under token {lease.token}"
                f" ({lease.phase}, step {lease.step}): release that first"
            )
    return None
