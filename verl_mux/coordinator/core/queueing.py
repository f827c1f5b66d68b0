"""Which request may go next, and how long the coordinator waits for a silent job.

Runs in the coordinator (called by state.py, leases.py, registration.py and snapshot.py) and in what_if's replays; pure, and
changes nothing but in `advance` and `phase_ended`.

Queues. Requests stand in one list in order of arrival, which is a queue per node: a request heads the queue of a node when no
earlier request that may run names it. It is granted when it heads the queues of all its nodes and all are free, so it gets all or
waits, and, since all queue in one order, no two wait for each other. Jobs of a co-execution group that has an order of its own
queue in that order.

A request that is *held back* keeps its place but is in no other request's way:
- `settling`  the coordinator lost its memory and first lets jobs claim the leases they hold;
- `silent`    its job is not heard from;
- `fenced`    one of its nodes is on a host where nothing looks, or something of a dead job may be left there;
- `draining`  one of its nodes is given to no job any more;
- `start`     step 1 and later wait until `expect_jobs` jobs are through with init and ask for their first step;
- `barrier`   its step lies in a later segment of the schedule than the current one;
- `turn`      in a sequential segment, another job has the turn.

A request that could never be granted does not even get a place: see `refusal`.

Fillers (`verl-mux hold`) take nodes that no job uses or waits for, and leave when a job wants one. Their requests stand in no
queue, so no job waits behind one. A filler gets any `num_nodes` of the nodes that it names, once that many are open.

Silence takes nodes away when it lasted longer than the lease, by a clock that counts the time in which the coordinator itself
ran, and another job waits; or, if none does, when it lasted longer by SILENT_TIMEOUT_S still. The silent job has by then fenced
itself, see docs/protocol.md; if it cannot, because it is stopped, its processes are ended before another job gets its nodes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.bus.conversation import FENCED_AFTER
from verl_mux.coordinator.core import records as r
from verl_mux.coordinator.core.records import RUNNING, Job, JobState, Lease, Request, State, What
from verl_mux.coordinator.core.settings import FILLER_GRACE_S, SILENT_TIMEOUT_S, Config, Segment

# A phase counts as overdue when it takes this many times the job's longest of its kind, and this many seconds; the first of its
# kind after the third time: it may be measured against none, and one that hangs holds its nodes.
OVERDUE_FACTOR, OVERDUE_LEAST_S, OVERDUE_FIRST_S = 10.0, 600.0, 7200.0

# --- the schedule ---


def segment_of(schedule: list[Segment], step: int) -> int:
    """Index of the segment that the 1-based `step` lies in; steps past the end stay in the last one."""
    end = 0
    for index, segment in enumerate(schedule[:-1]):
        end += segment.steps or 0  # only the last may leave them out
        if step <= end:
            return index
    return len(schedule) - 1


def mode(state: State, config: Config) -> str:
    return config.schedule[state.segment].mode


def turn(state: State, config: Config) -> Job | None:
    """The job whose turn it is in a sequential segment: the first registered that is not through with it."""
    running = sorted((job for job in state.jobs.values() if job.running), key=lambda job: job.order)
    in_a_step = {lease.job for lease in state.leases.values() if lease.step > 0}
    return next((job for job in running if job.name in in_a_step or _has_steps_left(job, state, config)), None)


def _has_steps_left(job: Job, state: State, config: Config) -> bool:
    """False also when the last segment has a length of its own and the job is through with it."""
    last = config.schedule[-1]
    is_past = last.steps is not None and job.finished >= sum(segment.steps or 0 for segment in config.schedule)
    is_last = state.segment == len(config.schedule) - 1
    return segment_of(config.schedule, job.finished + 1) <= state.segment and not (is_last and is_past)


def advance(state: State, config: Config) -> bool:
    """Opens the start gate and the next segment once every job that counts has arrived. True if a segment began."""
    if not state.started:
        gone = (JobState.DYING, JobState.ENDED)
        arrived = sum(job.initialised or job.state in gone for job in state.jobs.values() if not job.filler)
        state.started = arrived >= config.expect_jobs
    running = [job for job in state.jobs.values() if job.running]
    if not state.started or not running or state.segment == len(config.schedule) - 1:
        return False
    before, reached = state.segment, min(segment_of(config.schedule, job.finished + 1) for job in running)
    state.segment = max(before, reached)
    return state.segment > before


# --- the queues ---


def refusal(asked: m.LeaseRequest, job: Job, leases: list[Lease], waiting: int) -> str | None:
    """Why the request cannot even wait, or None. `leases`: of the job; `waiting`: the number of its requests."""
    if not job.filler and asked.num_nodes:
        return f"job {job.name!r} asks for any {asked.num_nodes} nodes: only a filler may"
    if job.filler and (asked.phase == "init" or asked.step):
        return f"filler {job.name!r} asks for {asked.phase}, step {asked.step}; fillers have neither init nor steps"
    if job.filler and not 1 <= asked.num_nodes <= len(set(asked.nodes)):
        return f"filler {job.name!r} asks for any {asked.num_nodes} of {len(set(asked.nodes))} nodes"
    if asked.phase not in m.PHASES:
        return f"phase {asked.phase!r} is not known; allowed: {', '.join(m.PHASES)}"
    if asked.step < 0 or (asked.phase == "init" and asked.step > 0):
        return f"phase {asked.phase!r} with step {asked.step}; steps count from 1, and 0 is init and what comes before"
    if not asked.nodes or not set(asked.nodes) <= set(job.all_nodes):
        return f"job {job.name!r} asks for nodes {asked.nodes}; it registered {job.all_nodes}"
    if waiting >= m.REQUESTS_OF_A_JOB:
        return f"job {job.name!r} has {m.REQUESTS_OF_A_JOB} requests that wait; no more are allowed"
    for lease in leases:
        if shared := sorted(set(lease.nodes) & set(asked.nodes)):
            return (
                f"job {job.name!r} asks for {asked.phase} on {shared[0]!r}, which it holds under token {lease.token}"
                f" ({lease.phase}, step {lease.step}): release that first"
            )
    return None


def is_shut(nodes: Collection[str], state: State, config: Config) -> str | None:
    """Why one of these nodes is given to no job now, in one word; None: all may be given."""
    if not state.fenced.keys().isdisjoint(nodes):
        return "fenced"
    return None if config.draining.isdisjoint(nodes) else "draining"


def held_back(request: Request, state: State, config: Config, owner: Job | None = None) -> str | None:
    """Why the request does not even stand in its queues (see the module's list), or None. `owner`: the job whose turn it is,
    where the caller asks for many requests; None: it is looked up."""
    if state.settle_until is not None:
        return "settling"
    if state.jobs[request.job].state is not JobState.LIVE:
        return "silent"
    if shut := is_shut(request.nodes, state, config):
        return shut
    if request.step == 0:
        return None
    if not state.started:
        return "start"
    if segment_of(config.schedule, request.step) > state.segment:
        return "barrier"
    if mode(state, config) == "sequential":
        owner = owner or turn(state, config)
        # A job through with all its steps may still validate: it takes its place in the queue like any other.
        if owner is not None and owner.name != request.job and state.jobs[request.job].running:
            return "turn"
    return None


def standing(state: State, config: Config) -> list[Request]:
    """The requests of jobs that are not held back, in the order in which they may go: by the order of their co-execution groups
    (ORDERS in placement), others in order of arrival. A job that names its nodes shares them with no placed job."""

    def rank(request: Request) -> int:
        watched = state.jobs[request.job].watched
        return 0 if watched is None or request.step == 0 else watched.rank

    owner = turn(state, config) if mode(state, config) == "sequential" else None
    requests = sorted((request for request in state.requests if not request.is_fillers), key=rank)
    return [request for request in requests if not held_back(request, state, config, owner)]


def grantable(state: State, config: Config) -> list[Request]:
    """The requests of jobs to grant now, in order. Init is always exclusive; in an uncoordinated segment jobs share nodes, but
    not with fillers."""
    shared = mode(state, config) == "uncoordinated"
    taken = {node for lease in state.leases.values() for node in lease.nodes}
    filled = {node for lease in state.leases.values() if state.jobs[lease.job].filler for node in lease.nodes}
    granted = []
    for request in standing(state, config):
        if taken.isdisjoint(request.nodes) or (shared and request.step > 0 and filled.isdisjoint(request.nodes)):
            granted.append(request)
        taken.update(request.nodes)
    return granted


def contention(state: State, config: Config) -> Iterator[tuple[Job, list[str], list[list[str]]]]:
    """Each job that is heard from, in order of registration, with its nodes that another job stands in the queue for, in the
    job's order, and its gangs."""
    waiting = standing(state, config)
    wanted: defaultdict[str, set[str]] = defaultdict(set)
    for request in waiting:
        for node in request.nodes:
            wanted[node].add(request.job)
    gangs_of = gangs(waiting, state)
    for job in sorted(state.jobs.values(), key=lambda job: job.order):
        if job.state is JobState.LIVE:
            yield job, [node for node in job.all_nodes if wanted.get(node, {job.name}) != {job.name}], gangs_of.get(job.name, [])


def gangs(waiting: Iterable[Request], state: State) -> dict[str, list[list[str]]]:
    """By job: what of its leases would let another job begin, if it alone came back: of each request that is the first on all
    of its nodes and waits for no other job, the nodes that this job holds. Of leases of several nodes; others cannot be
    parted."""
    taken, firsts = set[str](), []
    for request in waiting:
        if taken.isdisjoint(request.nodes):
            firsts.append(request)
        taken.update(request.nodes)
    held = {node for lease in state.leases.values() for node in lease.nodes}
    own: defaultdict[str, set[str]] = defaultdict(set)
    for lease in state.leases.values():
        own[lease.job].update(lease.nodes if len(lease.nodes) > 1 else [])
    out: defaultdict[str, list[list[str]]] = defaultdict(list)
    for name, nodes in own.items():
        for request in firsts:
            if request.job != name and not nodes.isdisjoint(request.nodes) and (held - nodes).isdisjoint(request.nodes):
                out[name].append([n for n in state.jobs[name].all_nodes if n in nodes and n in request.nodes])
    return {name: sorted(sets) for name, sets in out.items()}


# --- fillers ---


def for_filler(request: Request, state: State, config: Config) -> list[str]:
    """The nodes to grant a filler's request now; empty: it waits. A node is open when no lease names it, no job that is heard
    from has asked for it, and it is neither fenced nor draining."""
    live = {job.name for job in state.jobs.values() if job.state is JobState.LIVE}
    if state.settle_until is not None or request.job not in live:
        return []
    taken = {node for lease in state.leases.values() for node in lease.nodes}
    taken.update(node for each in state.requests if not each.is_fillers and each.job in live for node in each.nodes)
    nodes = [node for node in dict.fromkeys(request.nodes) if node not in taken and not is_shut([node], state, config)]
    return nodes[: request.num_nodes] if len(nodes) >= request.num_nodes else []


def late_fillers(called_back: Mapping[int, float], state: State, config: Config, running: float) -> list[What]:
    """The inputs that end fillers which were asked to leave and have not left within their grace. `called_back`: by token, in
    running time."""
    late: dict[str, What] = {}
    for token, since in called_back.items():
        job = state.jobs[state.leases[token].job]
        grace = max(FILLER_GRACE_S, min(job.grace, config.lease_timeout))
        reason = f"a job waited for what it held, and it had not left after {grace:g} s"
        if running - since > grace and job.state in RUNNING:
            late[job.name] = r.JobEvicted(job=job.name, uid=job.uid, reason=reason)
    return list(late.values())


# --- silence ---


class RunningTime:
    """Seconds for which the coordinator has run, by the times at which it looked at its clock: it stands still in its pauses."""

    # More between two looks at the clock is a pause of the coordinator itself, or a clock that was set: no job was silent then.
    PAUSE_S = 1.0

    def __init__(self) -> None:
        self._seconds = 0.0
        self._looked: float | None = None

    def at(self, now: float) -> float:
        looked = now if self._looked is None else self._looked
        return self._seconds + (now - looked if 0 <= now - looked <= self.PAUSE_S else 0.0)

    def look(self, now: float) -> float:
        self._seconds, self._looked = self.at(now), now
        return self._seconds


def silence(state: State, config: Config, heard: Mapping[str, float], now: float, running: float) -> tuple[set[str], list[What]]:
    """Names of the silent jobs, and the inputs: for those that are silent only now, and those that take the nodes from jobs for
    which others wait, or whose silence is too long. `heard`, `running`: in running time."""
    late = [job for job in state.jobs.values() if job.state is JobState.LIVE and running - heard[job.name] > config.lease_timeout]
    silent = {job.name: job for job in (*late, *(job for job in state.jobs.values() if job.state is JobState.SILENT))}
    out: list[What] = [r.JobSilent(job=job.name, uid=job.uid) for job in late]
    waited = {job.name for job in in_the_way(silent, state, config)} if silent else set()
    since = now - (1 - FENCED_AFTER) * config.lease_timeout  # from then on a job found silent now had to keep off its nodes
    for name, job in silent.items():
        if name in waited or running - heard[name] > config.lease_timeout + SILENT_TIMEOUT_S:
            out.append(r.JobRevoked(job=name, uid=job.uid, since=since, waited=name in waited))
    return set(silent), out


def in_the_way(silent: Mapping[str, Job], state: State, config: Config) -> list[Job]:
    """The silent jobs on whose nodes a job that is not silent waits, or for whose turn, or at a barrier that they are before."""
    waiting = [request for request in state.requests if request.job not in silent and not request.is_fillers]
    why = [(request, held_back(request, state, config)) for request in waiting]
    wanted = {node for request, reason in why if reason is None for node in request.nodes}
    holders = {lease.job for lease in state.leases.values() if not wanted.isdisjoint(lease.nodes)}
    stuck = any(reason in ("turn", "barrier") for _, reason in why)
    return [job for job in silent.values() if job.name in holders or (stuck and _holds_the_schedule_up(job, state, config))]


def _holds_the_schedule_up(job: Job, state: State, config: Config) -> bool:
    if mode(state, config) == "sequential" and turn(state, config) is job:
        return True
    return job.running and segment_of(config.schedule, job.finished + 1) <= state.segment


# --- phases that take far too long ---


def overdue(state: State, now: float, but: Collection[str]) -> list[What]:
    """The inputs for phases that have come to count as overdue, once each. `but`: names of jobs that are left out."""
    out: list[What] = []
    for lease in state.leases.values():
        job, longest = state.jobs[lease.job], state.jobs[lease.job].longest.get(lease.phase)
        if job.state is not JobState.LIVE or job.filler or job.name in but or lease.token in job.overdue:
            continue
        most = OVERDUE_FIRST_S if longest is None else max(OVERDUE_LEAST_S, OVERDUE_FACTOR * longest)
        if now - lease.granted_at > most:
            out.append(r.PhaseOverdue(job=job.name, uid=job.uid, token=lease.token))
    return out


def phase_ended(job: Job, lease: Lease, now: float) -> None:
    """Its length is what later ones are measured against."""
    job.longest[lease.phase] = max(job.longest.get(lease.phase, 0.0), now - lease.granted_at)
    job.overdue = [token for token in job.overdue if token != lease.token]
