"""How a job comes in: refused with what was given and what there is, or put on record; further clients join it, and leases held
through a restart are claimed.

Runs in the coordinator, called by state.py; pure.
"""

from __future__ import annotations

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core import tokens
from verl_mux.coordinator.core.leases import Leases
from verl_mux.coordinator.core.records import Instruction, Job, JobState, Log, Send, State
from verl_mux.coordinator.core.settings import FILLER_GRACE_S, Config
from verl_mux.errors import UserError
from verl_mux.profiling.eventlog import events


def refuse(core: Leases, asked: m.Register) -> m.Refused | None:
    """Why the job may not register now; None: it may."""
    state, known = core.state, core.state.jobs.get(asked.job)
    if known is not None and known.state is not JobState.ENDED and known.uid != asked.uid:
        return _name_taken(known)
    if known is not None and known.uid == asked.uid and _given_up(known, asked):
        return _no(f"job {asked.job!r} was given up: {known.reason}")
    others = (job for job in state.jobs.values() if job.uid == asked.uid and job.name != asked.job)
    if any(other.state is not JobState.ENDED for other in others):
        return _no(f"job {asked.job!r} carries another job's uid; every start needs its own VERL_MUX_JOB_UID")
    if reason := _beyond_limits(asked, known, state):
        return _no(reason)
    # It runs on its nodes already, by what is on record, or by what it says that an earlier coordinator answered.
    is_known = bool(asked.placed) or (known is not None and known.uid == asked.uid and known.state is not JobState.ENDED)
    try:
        nodes = {} if asked.wants_placement else _resolve(asked, core.config)
        reason = next(filter(None, [feature.refusal(asked, nodes, is_known) for feature in core.features]), None)
    except UserError as error:
        return _no(str(error))
    return _no(reason) if reason else None


def register(core: Leases, now: float, what: m.Register) -> list[Instruction]:
    """Puts a registration on record that `refuse` lets pass."""
    state = core.state
    out: list[Instruction] = []
    job = state.jobs.get(what.job)
    if job is None or job.uid != what.uid or not job.clients:
        job = _new_job(state, core.config, now, what)
        for feature in core.features:
            out += feature.registered(now, job, what)
        fills = {"filler": True} if job.filler else {}
        about = {"job": job.name, "nodes": job.nodes, "seed": job.seed, "steps": job.steps, "pid": job.pid, **fills}
        out.append(Log(events.JOB_REGISTERED, about))
    if what.client not in job.clients:
        out += _join(core, job, what)
    job.members = what.members or job.members
    if what.client in job.registrations or not any(feature.answers_later(job) for feature in core.features):
        out.append(Send(what.client, welcome(core, job, what.client, what.number)))
    tokens.take_claims(state, core.config, job, what, now)
    return out


def _join(core: Leases, job: Job, what: m.Register) -> list[Instruction]:
    """Adds a client. The job's first client from before the coordinator forgot everything is its first again, whichever client
    was heard before it: the job ends with it, and with its process."""
    if not (what.first and job.clients):
        job.clients.append(what.client)
        return []
    other = job.clients[0]
    job.clients.insert(0, what.client)
    _take_for_driver(job, what)
    return [Send(other, welcome(core, job, other, job.registrations.get(other, 0)))]


def welcome(core: Leases, job: Job, client: str, answers: int = 0) -> m.Registered | m.Queued:
    """The job's nodes; or, of a job that waits for nodes, why it waits."""
    reason = next(filter(None, (feature.why_queued(job) for feature in core.features)), None)
    if reason is not None:
        return m.Queued(reason=reason, epoch=core.epoch, answers=answers)
    return m.Registered(
        nodes=job.nodes,
        places={name: core.config.nodes[name].place for name in job.all_nodes},
        lease_timeout=core.config.lease_timeout,
        filler_grace=FILLER_GRACE_S,
        epoch=core.epoch,
        first=job.clients[0] == client,
        answers=answers,
    )


def _new_job(state: State, config: Config, now: float, what: m.Register) -> Job:
    state.num_registered += 1
    job = state.jobs[what.job] = Job(name=what.job, uid=what.uid, order=state.num_registered, since=now)
    _take_for_driver(job, what)
    job.nodes = {} if what.wants_placement else _resolve(what, config)
    job.seed, job.steps, job.filler, job.grace = what.seed, what.steps, what.filler, what.grace
    return job


def _take_for_driver(job: Job, what: m.Register) -> None:
    job.host, job.pid, job.started, job.boot, job.space = what.host, what.pid, what.started, what.boot, what.space


def _name_taken(known: Job) -> m.Refused:
    ending = known.state is JobState.DYING
    what = "is ending, but its processes are not all gone" if ending else "is running"
    reason = f"a job named {known.name!r} {what} (pid {known.pid} on {known.host}); job names are unique"
    return _no(reason, retry=ending)


def _beyond_limits(asked: m.Register, known: Job | None, state: State) -> str | None:
    clients = known.clients if known is not None and known.uid == asked.uid else []
    if len(clients) >= m.CLIENTS_OF_A_JOB and asked.client not in clients:
        return f"job {asked.job!r} has {len(clients)} clients; at most {m.CLIENTS_OF_A_JOB} are allowed"
    if known is None and len(state.jobs) >= m.JOBS:
        return f"{len(state.jobs)} jobs are on record; at most {m.JOBS} are allowed"
    return None


def _given_up(known: Job, asked: m.Register) -> bool:
    return known.state is JobState.DYING or (known.state is JobState.ENDED and asked.again)


def _no(reason: str, retry: bool = False) -> m.Refused:
    return m.Refused(about="register", reason=reason, retry=retry)


def _resolve(asked: m.Register, config: Config) -> dict[str, list[str]]:
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
        if name in config.nodes:
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
    node = config.nodes[name]
    if gpus > node.gpus:
        pool, members = next((pool, p.nodes) for pool, p in config.pools.items() if node in p.nodes)
        total = sum(member.gpus for member in members)
        raise UserError(
            f"job {job!r} asks for {gpus} GPUs on node {name!r}, which has {node.gpus}"
            f" (pool {pool!r} has {total} on {len(members)} nodes)"
        )
