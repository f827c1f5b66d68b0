"""How a job comes in: its record is made, further clients join it, and leases held through a restart are asserted."""

from __future__ import annotations

from verl_mux.coordinator import admission, placing
from verl_mux.coordinator import messages as m
from verl_mux.coordinator.config import Config
from verl_mux.coordinator.events import Instruction, Log, Send
from verl_mux.coordinator.records import Job, Lease, State


def register(state: State, config: Config, epoch: str, now: float, what: m.Register) -> list[Instruction]:
    """For a registration that `admission.refuse` lets pass."""
    out: list[Instruction] = []
    job = state.jobs.get(what.job)
    if job is None or job.uid != what.uid or not job.clients:
        job = _new_job(state, config, now, what)
        out += placing.arrive(state, config, job, what, now) if what.wants_placement else []
        about = {"job": job.name, "nodes": job.nodes, "seed": job.seed, "steps": job.steps, "pid": job.pid}
        out.append(Log("job_registered", about))
    if what.client not in job.clients:
        job.clients.append(what.client)
    job.members = what.members or job.members
    out.append(Send(what.client, welcome(state, config, job, what.client, epoch)))
    return out + [lost for claim in what.held if (lost := _assert(state, job, what.client, claim))]


def welcome(state: State, config: Config, job: Job, client: str, epoch: str) -> m.Registered | m.Queued:
    """The job's nodes; or, of a job that waits to be placed, that it does."""
    if not job.nodes:
        before = [entry.job.name for entry in state.placed.waiting].index(job.name)
        reason = f"job {job.name!r} waits for nodes: no room within everybody's SLO, {before} jobs before it"
        return m.Queued(reason=reason, epoch=epoch)
    return m.Registered(
        nodes=job.nodes,
        cpus={name: config.node(name).cpus for name in job.all_nodes},
        lease_timeout=config.lease_timeout,
        epoch=epoch,
        first=job.clients[0] == client,
    )


def _new_job(state: State, config: Config, now: float, what: m.Register) -> Job:
    if what.again:  # it knows us, we do not know it: memory was lost, and others may hold leases as well
        state.settle_until = now + config.lease_timeout
    state.num_registered += 1
    job = Job(name=what.job, uid=what.uid, order=state.num_registered, since=now, registered_at=now)
    job.host, job.pid, job.started = what.host, what.pid, what.started
    job.nodes = {} if what.wants_placement else admission.resolve(what, config)
    job.seed, job.steps = what.seed, what.steps
    state.jobs[what.job] = job
    return job


def _assert(state: State, job: Job, client: str, claim: m.Claim) -> Send | None:
    """A known lease stays. After a loss of memory the claim is believed: the old coordinator kept leases apart."""
    lease = state.leases.get(claim.token)
    if lease is not None and lease.job == job.name:
        return None
    if lease is not None or state.settle_until is None:
        return Send(client, m.LeaseLost(token=claim.token, reason=f"token {claim.token} is stale"))
    claimed = {name: getattr(claim, name) for name in claim.__struct_fields__}
    state.leases[claim.token] = Lease(job=job.name, client=client, **claimed)
    state.token = max(state.token, claim.token)
    return None
