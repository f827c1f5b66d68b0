"""The coordinator's mind: a pure state machine. `handle(event)` changes the records and returns instructions.

Theory of operation
- Everything that decides lives here and in the modules called from here (queueing, admission, registration,
  placing, observing, telemetry). No I/O, no clock: an event says when it happened.
- A job moves by the table MOVES. A move that is not in it raises IllegalMove and changes nothing.
- A lease is given out with a token that is higher than all before it. It ends when its client releases it, or when its
  job has ENDED; never while a process of the job may still be on the node.
- Silence alone takes no node away: a driver that was stopped or starved for a while finds its leases as they were,
  since nobody else can have got the nodes. Only death does, and then only once the processes are gone.
- After each event all requests that can be granted are granted; see `queueing` for who may go.

Invariants (asserted by tests/coordinator/test_histories.py)
1. Outside uncoordinated segments no node is named by two leases.
2. A lease is granted for exactly the nodes of its request: a gang gets all or waits. Some may go back before the rest.
3. Tokens strictly increase, across restarts too.
4. Per node, requests that may run are granted in order of arrival.
5. A dead job's nodes come free once, at ProcessesGone, and not before.
6. When every holder releases, every request that may run is granted in the end.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from verl_mux.coordinator import admission, observing, placing, prediction, queueing, registration, telemetry
from verl_mux.coordinator import messages as m
from verl_mux.coordinator.config import Config
from verl_mux.coordinator.events import (
    DriverDied,
    Event,
    Instruction,
    JobExited,
    JobSilent,
    Log,
    ProcessesGone,
    Send,
    Settled,
)
from verl_mux.coordinator.records import Job, JobState, Lease, Request, State

ABSENT = None
LIVE, SILENT, DYING, ENDED = JobState.LIVE, JobState.SILENT, JobState.DYING, JobState.ENDED

_TALK = (
    *(m.Register, m.LeaseRequest, m.LeaseCancel, m.LeaseRelease, m.LeaseShrink, m.Heartbeat, m.Detach),
    *(m.Progress, m.StepReport, m.MemoryReport, m.PhaseNote, m.MemberReport),
)
_DEATHS = dict.fromkeys((m.Failing, DriverDied, JobExited), DYING)
MOVES: dict[JobState | None, dict[type, JobState]] = {
    ABSENT: {m.Register: LIVE, JobExited: ENDED},
    LIVE: {**dict.fromkeys(_TALK, LIVE), m.Deregister: ENDED, JobSilent: SILENT, **_DEATHS},
    SILENT: {**dict.fromkeys(_TALK, LIVE), m.Deregister: ENDED, **_DEATHS},
    DYING: {JobExited: DYING, ProcessesGone: ENDED},
    ENDED: {m.Register: LIVE, JobExited: ENDED},
}


class IllegalMove(ValueError):
    """The event is not allowed in the job's state."""


class UnknownJob(LookupError):
    """No record of this start of the job."""


class Machine:
    """Owns the records. `epoch` names this start of the coordinator; `heard` is when each job last sent anything."""

    def __init__(self, config: Config, epoch: str = "", state: State | None = None):
        self.config = config
        self.epoch = epoch
        self.state = state if state is not None else State()
        self.heard: dict[str, float] = {}

    def handle(self, event: Event) -> list[Instruction]:
        """Raises IllegalMove or UnknownJob and then has changed nothing."""
        now, what = event.now, event.what
        if isinstance(what, Settled):
            self.state.settle_until = None
            return self._settle(now)
        job = self._job_of(what)
        if isinstance(what, m.Register) and (refusal := admission.refuse(what, job, self.state, self.config)):
            return [Send(what.client, refusal)]
        if isinstance(what, m.Detach) and job.clients == [what.client]:
            what = m.Deregister(job=what.job, uid=what.uid, client=what.client)  # the last to leave ends the job
        after = self._next_state(job, what)
        if isinstance(what, m.FromJob):
            self.heard[what.job] = now
        out = self._enter(job, after, now) if job else []
        out += _HANDLERS[type(what)](self, now, job, what)
        return out + self._settle(now)

    def resume(self, now: float) -> None:
        """After a restart: no job has been silent yet."""
        self.heard = dict.fromkeys(self.state.jobs, now)

    def due(self, now: float) -> list[Event]:
        """What the passing of time has brought about; to be handled like any other event."""
        live = [job for job in self.state.jobs.values() if job.state is LIVE]
        late = [job for job in live if now - self.heard[job.name] > self.config.lease_timeout]
        settled = self.state.settle_until is not None and now >= self.state.settle_until
        return [Event(now, JobSilent(job=job.name, uid=job.uid)) for job in late] + [Event(now, Settled())] * settled

    def changes(self, event: Event) -> bool:
        """False for a mere sign of life, which needs no place in the journal."""
        job = self.state.jobs.get(event.what.job) if isinstance(event.what, m.Heartbeat) else None
        return job is None or job.state is not LIVE

    # --- moves ---

    def _job_of(self, what) -> Job | None:
        job = self.state.jobs.get(what.job)
        if isinstance(what, (m.Register, JobExited)) or (job and what.uid == job.uid):
            return job
        raise UnknownJob(f"no job {what.job!r} of this start is known")

    def _next_state(self, job: Job | None, what) -> JobState:
        state = job.state if job else ABSENT
        if (after := MOVES[state].get(type(what))) is None:
            known_as = state.value if state else "absent"
            raise IllegalMove(f"job {what.job!r} is {known_as}: {type(what).__name__} is not allowed")
        return after

    def _enter(self, job: Job, after: JobState, now: float) -> list[Instruction]:
        """Puts the job into its next state, and takes away what it may not keep there."""
        before = job.state
        if before is after:
            return []
        job.state, job.since = after, now
        if after is DYING:
            job.died_at = now
        if after in (DYING, ENDED):
            self._drop_requests(lambda request: request.job == job.name)
        if after is ENDED:
            job.memory, job.members, job.progress, job.note = {}, [], None, ""
            return self._start(*placing.leave(self.state, self.config, job, now))
        return [Log("job_resumed", {"job": job.name})] if (before, after) == (SILENT, LIVE) else []

    def _start(self, started: list[Job], out: list[Instruction]) -> list[Instruction]:
        """Tells jobs that waited for nodes which they got."""
        for job in started:
            out += [Send(c, registration.welcome(self.state, self.config, job, c, self.epoch)) for c in job.clients]
        return out

    # --- a job's messages ---

    def _register(self, now: float, job: Job | None, what: m.Register) -> list[Instruction]:
        return registration.register(self.state, self.config, self.epoch, now, what)

    def _request(self, now: float, job: Job, what: m.LeaseRequest) -> list[Instruction]:
        if lease := self._lease_by_key(job, what.key):
            return [Send(what.client, _grant(lease))]
        if any(request.key == what.key for request in self.state.requests):
            return []
        if reason := admission.refuse_request(what, job, self.state):
            return [Send(what.client, m.Refused(about=what.key, reason=reason))]
        self.state.requests.append(request := Request(asked_at=now, **_asked(what)))
        observing.asked(job, request)
        job.has_asked = True
        job.asked = max(job.asked, what.step)
        job.initialised = job.initialised or what.step > 0
        return []

    def _cancel(self, now: float, job: Job, what: m.LeaseCancel) -> list[Instruction]:
        self._drop_requests(lambda request: request.key == what.key)
        lease = self._lease_by_key(job, what.key)
        return [self._free(lease, now)] if lease else []

    def _release(self, now: float, job: Job, what: m.LeaseRelease) -> list[Instruction]:
        lease = self.state.leases.get(what.token)
        if lease is None or lease.job != job.name:
            return [Send(what.client, _stale(what.token))]
        job.initialised = job.initialised or lease.phase == "init"
        freed = [self._free(lease, now), Send(what.client, m.LeaseReleased(token=what.token))]
        return freed + (self._observe(job, lease, now) if job.watched else [])

    def _shrink(self, now: float, job: Job, what: m.LeaseShrink) -> list[Instruction]:
        lease = self.state.leases.get(what.token)
        if lease is None or lease.job != job.name:
            return [Send(what.client, _stale(what.token))]
        left = [node for node in lease.nodes if node not in what.nodes]
        gone = [node for node in lease.nodes if node in what.nodes]
        if not left or not gone:  # the last node goes back with the lease
            return []
        self.state.leases[lease.token] = msgspec.structs.replace(lease, nodes=left)
        return [Log("lease_held", {**_about(lease), "nodes": gone}, duration=now - lease.granted_at, step=lease.step)]

    def _observe(self, job: Job, lease: Lease, now: float) -> list[Instruction]:
        """What the phase of a placed job took, and what that changes."""
        out = observing.released(job, lease, self.state.placed.job(job.name), now)
        if spec := observing.revised(job, self.state.placed.job(job.name)):
            out += self._start(*placing.correct(self.state, self.config, spec, now))
        group = self.state.placed.group_of(job.name)
        if lease.phase == "train" and prediction.is_due(group, job, self.state, self.config):
            out.append(prediction.predicted(group, self.state, self.config))
        return out

    def _heartbeat(self, now: float, job: Job, what: m.Heartbeat) -> list[Instruction]:
        queued = [request.key for request in self.state.requests if request.client == what.client]
        stale = [Send(what.client, _stale(token)) for token in what.tokens if not self._holds(job, token)]
        return [*stale, Send(what.client, m.HeartbeatAck(beat=what.beat, epoch=self.epoch, queued=queued))]

    def _report(self, now: float, job: Job, what: m.FromJob) -> list[Instruction]:
        token = getattr(what, "token", None)
        if token is not None and not self._holds(job, token):
            return [Send(what.client, _stale(token))]
        return telemetry.REPORTS[type(what)](self.state, job, what)

    def _detach(self, now: float, job: Job, what: m.Detach) -> list[Instruction]:
        self._drop_requests(lambda request: request.client == what.client)
        job.clients = [client for client in job.clients if client != what.client]
        return [self._free(lease, now) for lease in self.state.leases_of(job.name) if lease.client == what.client]

    def _deregister(self, now: float, job: Job, what: m.Deregister) -> list[Instruction]:
        job.reason = "finished"
        freed = [self._free(lease, now) for lease in self.state.leases_of(job.name)]
        if not job.has_asked:  # it only looked whether it would be taken; an expected job is still to come
            del self.state.jobs[job.name]
        return [*freed, _exited(job), *_dismiss(job)]

    def _failing(self, now: float, job: Job, what: m.Failing) -> list[Instruction]:
        job.reason = what.reason
        return [_exited(job)]

    # --- what the server saw ---

    def _silent(self, now: float, job: Job, what: JobSilent) -> list[Instruction]:
        return [Log("job_silent", {"job": job.name, "pid": job.pid, "host": job.host})]

    def _died(self, now: float, job: Job, what: DriverDied) -> list[Instruction]:
        job.reason = "its driver process died"
        return [_exited(job)]

    def _told_exited(self, now: float, job: Job | None, what: JobExited) -> list[Instruction]:
        if job is None:
            job = Job(name=what.job, uid="", order=0, since=now, state=ENDED, reason="exited before it registered")
            self.state.jobs[what.job] = job
        elif job.told or job.state is ENDED:
            return []
        job.told = True
        job.reason = job.reason or "said to have exited by what started it"
        return [_exited(job)]

    def _gone(self, now: float, job: Job, what: ProcessesGone) -> list[Instruction]:
        out: list[Instruction] = []
        for lease in self.state.leases_of(job.name):
            reclaimed = Log("lease_reclaimed", _about(lease), duration=now - job.died_at, step=lease.step)
            out += [self._free(lease, now), reclaimed]
        return [*out, *_dismiss(job)]

    # --- leases ---

    def _settle(self, now: float) -> list[Instruction]:
        """Brings the schedule, the queues, and what clients know of contention up to date."""
        out: list[Instruction] = []
        if queueing.advance(self.state, self.config):
            out.append(Log("segment", {"index": self.state.segment, "mode": queueing.mode(self.state, self.config)}))
            for node in self.state.peaks:
                telemetry.count_peak(self.state, node)
        for request in queueing.grantable(self.state, self.config):
            out += self._give(request, now)
        for job in self.state.jobs.values():
            nodes = queueing.contended(job, self.state, self.config)
            if job.state is LIVE and nodes != job.contended:
                job.contended = nodes
                out += [Send(client, m.Contended(nodes=nodes)) for client in job.clients]
        return out

    def _give(self, request: Request, now: float) -> list[Instruction]:
        self.state.token += 1
        self.state.stepping = self.state.stepping or request.step > 0
        lease = Lease(token=self.state.token, granted_at=now, **_asked(request))
        self.state.leases[lease.token] = lease
        self._drop_requests(lambda other: other.key == request.key)
        waited = Log("lease_wait", _about(lease), duration=now - request.asked_at, step=lease.step)
        return [Send(lease.client, _grant(lease)), waited]

    def _free(self, lease: Lease, now: float) -> Log:
        del self.state.leases[lease.token]
        return Log("lease_held", _about(lease), duration=now - lease.granted_at, step=lease.step)

    def _holds(self, job: Job, token: int) -> bool:
        lease = self.state.leases.get(token)
        return lease is not None and lease.job == job.name

    def _lease_by_key(self, job: Job, key: str) -> Lease | None:
        return next((lease for lease in self.state.leases_of(job.name) if lease.key == key), None)

    def _drop_requests(self, unwanted: Callable[[Request], bool]) -> None:
        self.state.requests = [request for request in self.state.requests if not unwanted(request)]


def _asked(source: m.LeaseRequest | Request) -> dict:
    return {name: getattr(source, name) for name in ("key", "job", "client", "phase", "step", "nodes")}


def _grant(lease: Lease) -> m.LeaseGrant:
    told = ("key", "token", "phase", "step", "nodes", "granted_at")
    return m.LeaseGrant(**{name: getattr(lease, name) for name in told})


def _stale(token: int) -> m.LeaseLost:
    return m.LeaseLost(token=token, reason=f"token {token} is stale: the lease has ended")


def _about(lease: Lease) -> dict:
    return {"job": lease.job, "phase": lease.phase, "nodes": lease.nodes, "token": lease.token}


def _exited(job: Job) -> Log:
    return Log("job_exited", {"job": job.name, "reason": job.reason})


def _dismiss(job: Job) -> list[Instruction]:
    clients, job.clients = job.clients, []
    return [Send(client, m.JobEnded(reason=job.reason)) for client in clients]


_HANDLERS: dict[type, Callable[..., list[Instruction]]] = {
    m.Register: Machine._register,
    m.LeaseRequest: Machine._request,
    m.LeaseCancel: Machine._cancel,
    m.LeaseRelease: Machine._release,
    m.LeaseShrink: Machine._shrink,
    m.Heartbeat: Machine._heartbeat,
    **dict.fromkeys(telemetry.REPORTS, Machine._report),
    m.Detach: Machine._detach,
    m.Deregister: Machine._deregister,
    m.Failing: Machine._failing,
    JobSilent: Machine._silent,
    DriverDied: Machine._died,
    JobExited: Machine._told_exited,
    ProcessesGone: Machine._gone,
}
