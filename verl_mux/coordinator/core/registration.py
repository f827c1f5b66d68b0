"""How a job comes in: refused with what was given and what there is, or put on record; further clients join it, and leases held
through a restart are claimed.

Runs in the coordinator, called by state.py; pure.

Claims: a coordinator that may not know what its predecessor granted settles: for one lease time it grants nothing, and clients,
which register again with a coordinator that they do not know, claim their leases. Claims are believed about tokens of that time
(`unknown_up_to`), as the predecessor kept leases apart. Where two leases meet on a node the later one is right: the other one
must have ended before the later was granted. A claim needs the proof that came with its grant: without it a job could take the
node of another by a number that is later still. A pause of the coordinator does not count, as it hears no client then.
"""

from __future__ import annotations

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core import queueing
from verl_mux.coordinator.core.leases import Leases, close, epoch_of, tokens_before
from verl_mux.coordinator.core.records import Instruction, Job, JobState, Lease, Log, Send
from verl_mux.coordinator.core.settings import FILLER_GRACE_S, Config
from verl_mux.errors import UserError
from verl_mux.profiling.eventlog import events


def refuse(core: Leases, asked: m.Register) -> m.Refused | None:
    """Why the job may not register now; None: it may."""
    known = core.state.jobs.get(asked.job)
    try:
        reason = _refusal(core, asked, known)
    except UserError as error:
        reason = str(error)
    is_ending = known is not None and known.state is JobState.DYING and known.uid != asked.uid
    return m.Refused(about="register", reason=reason, retry=is_ending) if reason else None


def _refusal(core: Leases, asked: m.Register, known: Job | None) -> str | None:
    """Raises UserError, which refuses too."""
    name, jobs = asked.job, core.state.jobs
    clients: list[str] = []
    if known is not None and known.uid == asked.uid:
        clients = known.clients
        if known.state is JobState.DYING or (known.state is JobState.ENDED and asked.again):
            return f"job {name!r} was given up: {known.reason}"
    elif known is not None and known.state is not JobState.ENDED:
        doing = "is ending, but its processes are not all gone" if known.state is JobState.DYING else "is running"
        return f"a job named {name!r} {doing} (pid {known.pid} on {known.host}); job names are unique"
    if "/" in name:
        return f"job {name!r} has a slash in its name, which names folders; give it another (mux.job, or trainer.experiment_name)"
    if any(job.uid == asked.uid and job.name != name and job.state is not JobState.ENDED for job in jobs.values()):
        return f"job {name!r} carries another job's uid; every start needs its own VERL_MUX_JOB_UID"
    if len(clients) >= m.CLIENTS_OF_A_JOB and asked.client not in clients:
        return f"job {name!r} has {len(clients)} clients; at most {m.CLIENTS_OF_A_JOB} are allowed"
    if known is None and len(jobs) >= m.JOBS:
        return f"{len(jobs)} jobs are on record; at most {m.JOBS} are allowed"
    if asked.filler and asked.wants_placement:
        return f"filler {name!r} leaves its nodes to the coordinator; it must name pools or nodes"
    # It runs on its nodes already, by what is on record, or by what it says that an earlier coordinator answered.
    is_known = bool(asked.placed) or (known is not None and known.uid == asked.uid and known.state is not JobState.ENDED)
    nodes = {} if asked.wants_placement else _resolve(asked, core.config)
    return next(filter(None, [feature.refusal(asked, nodes, is_known) for feature in core.features]), None)


def register(core: Leases, now: float, what: m.Register) -> list[Instruction]:
    """Puts a registration on record that `refuse` lets pass."""
    out: list[Instruction] = []
    job = core.state.jobs.get(what.job)
    if job is None or job.uid != what.uid or not job.clients:
        job = _new_job(core, now, what)
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
    _take_claims(core, job, what, now)
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


def _new_job(core: Leases, now: float, what: m.Register) -> Job:
    core.state.num_registered += 1
    job = core.state.jobs[what.job] = Job(name=what.job, uid=what.uid, order=core.state.num_registered, since=now)
    _take_for_driver(job, what)
    job.nodes = {} if what.wants_placement else _resolve(what, core.config)
    job.seed, job.steps, job.filler, job.grace = what.seed, what.steps, what.filler, what.grace
    return job


def _take_for_driver(job: Job, what: m.Register) -> None:
    job.host, job.pid, job.started, job.boot, job.space = what.host, what.pid, what.started, what.boot, what.space


def _resolve(asked: m.Register, config: Config) -> dict[str, list[str]]:
    """Nodes per side with pool names spelt out. Raises UserError for what is not there or too large."""
    if not asked.nodes or any(side not in m.SIDES for side in asked.nodes):
        raise UserError(f"job {asked.job!r} names nodes for {sorted(asked.nodes)}; allowed sides: {', '.join(m.SIDES)}")
    there = {**{name: [name] for name in config.nodes}, **{name: [n.name for n in p.nodes] for name, p in config.pools.items()}}
    nodes: dict[str, list[str]] = {}
    for side, names in asked.nodes.items():
        known = f"pools and their nodes: {config.describe_pools()}"
        if unknown := [name for name in names if name not in there]:
            raise UserError(f"job {asked.job!r} asks for {side} on {unknown[0]!r}, which is no pool or node here; {known}")
        nodes[side] = list(dict.fromkeys(node for name in names for node in there[name]))
        if not nodes[side]:
            raise UserError(f"job {asked.job!r} names no node for {side}; {known}")
    allowed = {**{node: [node] for side in nodes.values() for node in side}, **nodes}
    for where, gpus in asked.gpus.items():
        if where not in allowed:
            words = ", ".join(sorted(allowed))
            raise UserError(f"job {asked.job!r} asks for {gpus} GPUs on {where!r}; allowed there: {words}")
        for node in (config.nodes[name] for name in allowed[where]):
            if gpus > node.gpus:
                pool, members = next((pool, p.nodes) for pool, p in config.pools.items() if node in p.nodes)
                raise UserError(
                    f"job {asked.job!r} asks for {gpus} GPUs on node {node.name!r}, which has {node.gpus}"
                    f" (pool {pool!r} has {sum(member.gpus for member in members)} on {len(members)} nodes)"
                )
    return nodes


# --- claims ---


def _take_claims(core: Leases, job: Job, what: m.Register, now: float) -> None:
    """Brings the record of the client's leases in line with what it holds, as far as the record may be wrong.

    The answer to each client's next heartbeat says which of its leases were taken over. A registration that comes later than
    one that was sent after it claims nothing.
    """
    state = core.state
    if what.number < job.registrations.get(what.client, 0):
        return
    job.registrations[what.client] = what.number
    if what.again and state.settle_until is not None:
        held = {claim.token for claim in what.held}
        for lease in [each for each in state.leases_of(job.name) if each.client == what.client and each.token not in held]:
            del state.leases[lease.token]
            close(job, lease.token)
    if state.settle_until is not None and what.seen <= state.unknown_up_to:
        _begin_above(core, what.seen)
    for claim in what.held:
        if core.lease_of(job, claim.token) is None and claim.token not in job.closed:
            _take_claim(core, job, what.client, claim, now)


def _take_claim(core: Leases, job: Job, client: str, claim: m.Claim, now: float) -> None:
    """Leases that meet the claimed one on a node, and are earlier, end. What was granted since all could speak is later than
    what is claimed only now, whatever the numbers say."""
    state = core.state
    may_share = queueing.mode(state, core.config) == "uncoordinated" and claim.step > 0
    meets = [each for each in state.leases.values() if not may_share and not set(each.nodes).isdisjoint(claim.nodes)]
    sound = claim.phase in m.PHASES and bool(claim.nodes) and set(claim.nodes) <= set(job.all_nodes)
    is_believed = (
        sound and core.is_proven(job, claim) and 0 < claim.token <= state.unknown_up_to and claim.token not in state.leases
    )
    if not is_believed or any(state.settle_until is None or lease.token > claim.token for lease in meets):
        close(job, claim.token, taken_away=True)
        return
    for lease in meets:
        del state.leases[lease.token]
        close(state.jobs[lease.job], lease.token, taken_away=True)
    fields = {name: getattr(claim, name) for name in ("token", "key", "phase", "step")}
    nodes = list(dict.fromkeys(claim.nodes))
    state.leases[claim.token] = Lease(job=job.name, client=client, granted_at=now, nodes=nodes, **fields)
    _begin_above(core, claim.token)


def _begin_above(core: Leases, token: int) -> None:
    """New tokens are higher than one that a client saw, though the number of this start was lost as well."""
    if token > core.state.token:
        core.state.token = tokens_before(epoch_of(token) + 1)
