"""The coordinator's decisions: a pure state machine. `Machine.handle(input)` changes the records and returns instructions.

Runs in the coordinator, called by server.py with every message and observation, and by the journal at a restart.

Theory of operation
- Everything that decides lives here and in the modules called from here (queueing, leases, registration, and the features,
  which are called at the moments listed in leases.py). No I/O, no clock: an input says when it came.
- A job moves by the table MOVES. A move that is not in it raises IllegalMove and changes nothing.
- A lease is given out with a token that is higher than all before it. It ends when its client releases it, or when its
  job has ENDED; never while a process of the job may still be on the node.
- Silence for a while takes no node away: a driver that was stopped or starved finds its leases as they were. Silence beyond
  the lease does when another job waits, or when it lasts: the job is then over, and dies like any other (see queueing.py).
- The nodes of a dying job come free once its processes are gone, and not before: each when nothing of the job is left on its
  host, and a node that names no host when nothing is left at all. Where nothing can look a node is fenced, and the job lets go of
  it.
- After each input all requests that can be granted are granted: first those of jobs, then those of fillers (see queueing.py).

                     Register                 silence                   (sign of life: back to LIVE)
    absent / ENDED -----------------> LIVE -------------------> SILENT
          ^                            |  driver dead, Failing,   |   revoked
          |                            |  evicted                 |
          |  Deregister                v                          v
          +--------------------------- DYING <--------------------+      ProcessesGone: ENDED

Invariants (asserted by tests/coordinator/test_histories.py)
1. Outside uncoordinated segments no node is named by two leases.
2. A lease is granted for exactly the nodes of its request: a gang gets all or waits. Some may go back before the rest.
   A filler gets as many of them as it asked for, and none that a job waits for.
3. Tokens strictly increase, across restarts too.
4. Per node, requests that may run are granted in order of arrival, or of their co-execution group where it has an order.
5. A dead job's nodes come free once, at NodeEmpty, NodesOwed (but then they are fenced) or ProcessesGone, and not before.
6. When every holder releases, every request that may run is granted in the end.
7. No node is granted while it is fenced or draining.
"""

from __future__ import annotations

from collections import defaultdict

import msgspec

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.bus.conversation import REGISTER
from verl_mux.coordinator.core import FEATURES, queueing, registration
from verl_mux.coordinator.core import records as r
from verl_mux.coordinator.core.leases import Handler, Leases, about, answer_to_release, asked_for, spent
from verl_mux.coordinator.core.records import AboutJob, Input, Instruction, Job, JobState, Log, Request, Send, State
from verl_mux.coordinator.core.settings import SILENT_TIMEOUT_S, Config
from verl_mux.profiling.eventlog import events

NEVER_REGISTERED = "exited before it registered"
ABSENT = None
LIVE, SILENT, DYING, ENDED = JobState.LIVE, JobState.SILENT, JobState.DYING, JobState.ENDED

_REPORTS: tuple[type[m.FromJob], ...] = (m.Progress, m.StepReport, m.MemoryReport, m.PhaseNote, m.MemberReport)
_TALK: tuple[type[m.FromJob], ...] = (
    *(m.Register, m.LeaseRequest, m.LeaseCancel, m.LeaseRelease, m.LeaseShrink, m.Heartbeat, m.Detach, m.HostReport),
    *_REPORTS,
)
_HEARD: dict[type, JobState] = dict.fromkeys(_TALK, LIVE)
_DEATHS: dict[type, JobState] = dict.fromkeys((m.Failing, r.DriverDied, r.JobExited, r.JobEvicted), DYING)
# Which inputs a job may meet in which of its states, and the state that it is in then.
MOVES: dict[JobState | None, dict[type, JobState]] = {
    ABSENT: {m.Register: LIVE, r.JobExited: ENDED},
    LIVE: {**_HEARD, m.Deregister: ENDED, r.PhaseOverdue: LIVE, r.HostMeasured: LIVE, r.JobSilent: SILENT, **_DEATHS},
    SILENT: {**_HEARD, m.Deregister: ENDED, r.HostMeasured: SILENT, r.JobRevoked: DYING, **_DEATHS},
    DYING: {r.JobExited: DYING, r.HostMeasured: DYING, r.NodeEmpty: DYING, r.NodesOwed: DYING, r.ProcessesGone: ENDED},
    ENDED: {m.Register: LIVE, r.JobExited: ENDED},
}

# Inputs that are handled again where the machine fails at one. To keep a copy before each would cost as much as all records.
_HANDLED_AGAIN = 64
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(State).decode
_input = msgspec.msgpack.Decoder(Input).decode


class IllegalMove(ValueError):
    """The input is not allowed in the job's state."""


class UnknownJob(LookupError):
    """No record of this start of the job."""


class Fault(Exception):
    """The machine raised what it should not (see the cause); its records are as they were before."""


def is_refusal(out: list[Instruction]) -> bool:
    """Whether the input from which only this follows was refused, and has changed nothing."""
    return len(out) == 1 and isinstance(out[0], Send) and isinstance(out[0].message, m.Refused)


def next_state(job: Job | None, what: AboutJob) -> JobState:
    """`job` None: there is no record of it. Raises IllegalMove."""
    state = job.state if job else ABSENT
    if (after := MOVES[state].get(type(what))) is None:
        known_as = state.value if state else "absent"
        raise IllegalMove(f"job {what.job!r} is {known_as}: {type(what).__name__} is not allowed")
    return after


class Machine(Leases):
    """Owns the records. `epoch` names this start of the coordinator; `heard`: running time when each job was last heard."""

    def __init__(self, config: Config, epoch: str = "", state: State | None = None):
        super().__init__(config, epoch, state if state is not None else State())
        self.heard: dict[str, float] = {}
        self._unheard: set[str] = set()  # jobs that have not spoken since the restart
        self._copy: tuple[bytes, Config] | None = None  # the records as they were before the inputs that follow
        self._handled: list[bytes] = []  # encoded
        self.features = [feature(self) for feature in FEATURES]
        self._handlers: defaultdict[type, list[Handler]] = defaultdict(list)
        for handlers in (self._own_handlers(), *(feature.handlers() for feature in self.features)):
            for kind, handler in handlers.items():
                self._handlers[kind].append(handler)

    def handle(self, given: Input) -> list[Instruction]:
        """Raises IllegalMove or UnknownJob and then has changed nothing."""
        now, what = given.now, given.what
        if not isinstance(what, AboutJob):
            return self._call_handlers(now, None, what) + self._settle(now)
        job = self._job_of(what)
        if isinstance(what, m.Register) and (refusal := registration.refuse(self, what)):
            return [Send(what.client, refusal)]
        if isinstance(what, m.Detach) and job is not None and job.clients == [what.client]:
            what = m.Deregister(job=what.job, uid=what.uid, client=what.client)  # the last to leave ends the job
        if isinstance(what, m.Deregister) and job is not None and what.client in job.clients[1:]:
            what = m.Detach(job=what.job, uid=what.uid, client=what.client)  # it took itself for the first for a moment
        after = next_state(job, what)
        if isinstance(what, m.FromJob):
            self.heard[what.job] = self.running.at(now)
        if isinstance(what, m.Heartbeat) and job is not None and job.state is after:
            return self._heartbeat(now, job, what)  # by far the most frequent; nothing follows from it
        if isinstance(what, m.Deregister) and job is not None:
            for feature in self.features:
                feature.leaves(now, job, what)
        out = self._enter(job, after, now) if job else []
        return out + self._call_handlers(now, job, what) + self._settle(now)

    def attempt(self, given: Input) -> list[Instruction]:
        """As `handle`, and changes nothing either where it raises what it should not: that comes out as Fault."""
        changes, name = self.changes(given), getattr(given.what, "job", "")
        if changes and (self._copy is None or len(self._handled) >= _HANDLED_AGAIN):
            self._copy, self._handled = (_encode(self.state), self.config), []
        heard = self.heard.get(name)
        try:
            out = self.handle(given)
            encoded = _encode(given)  # so the journal can write it
            self._handled += [encoded] if changes and not is_refusal(out) else []
            return out
        except (IllegalMove, UnknownJob):
            raise
        except Exception as error:
            if changes and self._copy is not None:
                again = Machine(self._copy[1], self.epoch, _decode(self._copy[0]))
                for encoded in self._handled:
                    again.handle(_input(encoded))
                self.state, self.config = again.state, again.config
            self.heard.pop(name, None)
            if heard is not None:
                self.heard[name] = heard
            raise Fault(f"{type(given.what).__name__}: {type(error).__name__}") from error

    @property
    def size(self) -> int:
        """Bytes that all records take in a snapshot, as of some inputs ago."""
        return len(self._copy[0]) if self._copy is not None else 0

    def resume(self, now: float) -> None:
        """After a restart: no job has been silent yet."""
        self.heard = dict.fromkeys(self.state.jobs, self.running.look(now))
        self.called_back, self._unheard = {}, set(self.state.jobs)
        for feature in self.features:
            feature.resumed(now)

    def due(self, now: float) -> list[Input]:
        """What the passing of time has brought about; to be handled like any other input, in this order."""
        running = self.running.look(now)
        silent, out = queueing.silence(self.state, self.config, self.heard, now, running)
        out += queueing.overdue(self.state, now, but=silent)
        self.called_back = {token: since for token, since in self.called_back.items() if token in self.state.leases}
        out += queueing.late_fillers(self.called_back, self.state, self.config, running)
        for feature in self.features:
            out += feature.due(now)
        if self.state.settle_until is not None and running >= self.state.settle_until:
            out.append(r.Settled())
        return [Input(now, what) for what in out]

    def settles_for(self, now: float) -> float | None:
        """Seconds for which nothing will be granted, if the coordinator makes no pause; None: it does not settle."""
        until = self.state.settle_until
        return None if until is None else max(until - self.running.at(now), 0.0)

    def changes(self, given: Input) -> bool:
        """False for a mere sign of life, and for an end that is known or is of no job: those need no place in the journal."""
        what = given.what
        if isinstance(what, r.JobExited):
            return not self._is_no_news(self.state.jobs.get(what.job))
        job = self.state.jobs.get(what.job) if isinstance(what, m.Heartbeat) else None
        return job is None or job.state is not LIVE

    def _is_no_news(self, exited: Job | None) -> bool:
        """The end of a job that never registered matters only while jobs are expected: it is not waited for any more."""
        if exited is None:
            return self.state.started or self.config.expect_jobs == 0
        return exited.has_exited or exited.state is ENDED

    # --- moves ---

    def _own_handlers(self) -> dict[type, Handler]:
        return {
            m.Register: lambda now, job, what: registration.register(self, now, what),
            m.LeaseRequest: self._request,
            m.LeaseCancel: self._cancel,
            m.LeaseRelease: self._release,
            m.LeaseShrink: self._shrink,
            m.Heartbeat: self._heartbeat,
            **dict.fromkeys(_REPORTS, self._report),
            m.Detach: self._detach,
            m.Deregister: self._deregister,
            m.Failing: lambda now, job, what: [self._over(job, what.reason), Send(what.client, m.JobEnded(reason=what.reason))],
            r.JobSilent: lambda now, job, what: [Log(events.JOB_SILENT, {"job": job.name, "pid": job.pid, "host": job.host})],
            r.JobRevoked: self._revoked,
            r.JobEvicted: lambda now, job, what: self._condemn(job, what.reason),
            r.PhaseOverdue: self._late_phase,
            r.DriverDied: lambda now, job, what: [self._over(job, "its driver process died")],
            r.JobExited: self._exited,
            r.ProcessesGone: self._gone,
            r.Settled: self._settled,
        }

    def _call_handlers(self, now: float, job: Job | None, what: object) -> list[Instruction]:
        return [instruction for handler in self._handlers[type(what)] for instruction in handler(now, job, what)]

    def _job_of(self, what: AboutJob) -> Job | None:
        """Only a registered client speaks for a job; one of a job that is dying or over is answered that it has ended."""
        job = self.state.jobs.get(what.job)
        speaks = not isinstance(what, m.FromJob) or (
            job is not None and (job.state in (DYING, ENDED) or what.client in job.clients)
        )
        if isinstance(what, (m.Register, r.JobExited)) or (job is not None and what.uid == job.uid and speaks):
            return job
        raise UnknownJob(f"no job {what.job!r} of this start is known")

    def _enter(self, job: Job, after: JobState, now: float) -> list[Instruction]:
        """Puts the job into its next state, and takes away what it may not keep there."""
        before = job.state
        if before is after:
            return []
        job.state, job.since = after, now
        if after is DYING:
            job.died_at = now
        if after in (DYING, ENDED):
            self.drop(self._requests_of(job))
        if after is ENDED:
            self._forget_oldest_ended(but=job)
            job.memory, job.members, job.progress, job.note = {}, [], None, ""
            return [instruction for feature in self.features for instruction in feature.ended(now, job)]
        return [Log(events.JOB_RESUMED, {"job": job.name})] if (before, after) == (SILENT, LIVE) else []

    def _forget_oldest_ended(self, but: Job) -> None:
        """Ended jobs count as arrived until all that were expected have; after that they are only there to be seen."""
        if self.state.started and len(self.state.jobs) > m.ENDED_JOBS_REMEMBERED:
            ended = [name for name, job in self.state.jobs.items() if job.state is ENDED and job is not but]
            for name in ended[: -m.ENDED_JOBS_REMEMBERED]:
                self._forget(name)

    def _forget(self, name: str) -> None:
        del self.state.jobs[name]
        self.heard.pop(name, None)

    def _requests_of(self, job: Job) -> list[Request]:
        return [request for request in self.state.requests if request.job == job.name]

    # --- a job's messages ---

    def _request(self, now: float, job: Job, what: m.LeaseRequest) -> list[Instruction]:
        if what.number < job.registrations.get(what.client, 0):
            return []  # late: a coordinator without memory would not know that its lease was given back long ago
        if lease := self.lease_by_key(job, what.key):
            return [Send(what.client, self.grant(lease))]
        waiting = self._requests_of(job)
        if what.key in job.spent or any(request.key == what.key for request in waiting):
            return []
        if reason := queueing.refusal(what, job, self.state.leases_of(job.name), len(waiting)):
            return [Send(what.client, m.Refused(about=what.key, reason=reason))]
        request = Request(asked_at=now, num_nodes=what.num_nodes, **asked_for(what))
        self.state.requests.append(request)
        job.has_asked = True
        job.asked = max(job.asked, what.step)
        return [instruction for feature in self.features for instruction in feature.requested(now, job, request)]

    def _cancel(self, now: float, job: Job, what: m.LeaseCancel) -> list[Instruction]:
        self.drop([request for request in self._requests_of(job) if request.key == what.key])
        done = Send(what.client, m.LeaseCancelled(key=what.key))
        if lease := self.lease_by_key(job, what.key):
            return [self.free(lease, now), done]
        spent(job, what.key)
        return [done]

    def _release(self, now: float, job: Job, what: m.LeaseRelease) -> list[Instruction]:
        lease = self.lease_of(job, what.token)
        if lease is None:
            return [Send(what.client, answer_to_release(job, what.token, is_anothers=what.token in self.state.leases))]
        queueing.phase_ended(job, lease, now)
        out: list[Instruction] = [self.free(lease, now), Send(what.client, m.LeaseReleased(token=what.token))]
        return out + [instruction for feature in self.features for instruction in feature.released(now, job, lease)]

    def _shrink(self, now: float, job: Job, what: m.LeaseShrink) -> list[Instruction]:
        done = Send(what.client, m.LeaseShrunk(key=what.key))
        lease = self.lease_of(job, what.token)
        gone = [node for node in lease.nodes if node in what.nodes] if lease else []
        if lease is None or not gone or gone == lease.nodes:  # the last node goes back with the lease
            return [done]
        self.shrink(lease, gone, now)
        return [done, Log(events.LEASE_HELD, {**about(lease), "nodes": gone}, duration=now - lease.granted_at, step=lease.step)]

    def _heartbeat(self, now: float, job: Job, what: m.Heartbeat) -> list[Instruction]:
        queued = [request.key for request in self.state.requests if request.client == what.client]
        leases = self.state.leases_of(job.name)
        ack = m.HeartbeatAck(
            beat=what.beat,
            epoch=self.epoch,
            queued=[*queued, *([REGISTER] if not job.nodes else [])],
            tokens=[token for token in what.tokens if any(lease.token == token for lease in leases)],
            move=max(feature.move_of(job) for feature in self.features),
        )
        # A grant that went astray, or one that its client no longer wants and releases.
        again: list[m.Message] = [
            self.grant(lease) for lease in leases if lease.client == what.client and lease.token not in what.tokens
        ]
        self._unheard.discard(job.name)
        if job.filler and job.contended:  # what was pushed before may have gone astray
            self._call_back(now, job)
            again.append(m.Contended(nodes=job.contended, gangs=job.gangs))
        return [Send(what.client, message) for message in (*again, ack)]

    def _report(self, now: float, job: Job, what: m.FromJob) -> list[Instruction]:
        """For people to see; but finished steps count for turns, and those that are left for whether a move pays."""
        token = getattr(what, "token", None)
        if token is not None and self.lease_of(job, token) is None:
            return []  # late; a client that holds a stale token learns it at the next heartbeat
        if isinstance(what, m.Progress):
            job.progress = (what.done, what.total)
        elif isinstance(what, m.PhaseNote):
            job.note, job.noted_at = what.note, now if what.note != job.note else job.noted_at
        elif isinstance(what, m.MemberReport):
            job.members = what.members
        elif isinstance(what, m.StepReport):
            job.reported, job.metrics = max(job.reported, what.step), what.metrics
            job.steps = job.steps if what.steps is None else what.steps
            return [Log(events.STEP_REPORT, {"job": job.name, **what.metrics}, step=what.step)]
        elif isinstance(what, m.MemoryReport):
            return self._memory(job, what)
        return []

    def _memory(self, job: Job, what: m.MemoryReport) -> list[Instruction]:
        """Made-up nodes and tags must not fill the memory."""
        tags = {tag: held for tag, held in {**job.memory.get(what.node, {}), **what.tags}.items() if held > 0}
        reason = ""
        if what.node not in job.all_nodes:
            reason = f"job {job.name!r} reports memory on {what.node!r}; allowed: its nodes {', '.join(job.all_nodes)}"
        elif len(tags) > m.TAGS_ON_A_NODE:
            reason = f"job {job.name!r} reports {len(tags)} tags on {what.node!r}; at most {m.TAGS_ON_A_NODE} are allowed"
        if reason:
            return [Send(what.client, m.Refused(about="memory", reason=reason))]
        job.memory[what.node] = tags
        self._count_peak(what.node)
        extra = {"job": job.name, "node": what.node, "tags": what.tags, "node_bytes": self.state.bytes_on(what.node)}
        return [Log(events.MEMORY, extra)]

    def _count_peak(self, node: str) -> None:
        """Peaks are counted apart for init and for each segment, since comparing segments is what they are for."""
        during = str(self.state.segment) if self.state.stepping else "init"
        peaks = self.state.peaks.setdefault(node, {})
        peaks[during] = max(peaks.get(during, 0), self.state.bytes_on(node))

    def _detach(self, now: float, job: Job, what: m.Detach) -> list[Instruction]:
        self.drop([request for request in self._requests_of(job) if request.client == what.client])
        job.clients = [client for client in job.clients if client != what.client]
        job.registrations.pop(what.client, None)
        freed = [self.free(lease, now) for lease in self.state.leases_of(job.name) if lease.client == what.client]
        return [*freed, Send(what.client, m.JobEnded(reason="closed"))]

    def _deregister(self, now: float, job: Job, what: m.Deregister) -> list[Instruction]:
        freed = [self.free(lease, now) for lease in self.state.leases_of(job.name)]
        if not job.has_asked and not what.reason:  # it only looked whether it would be taken; an expected job is still to come
            self._forget(job.name)
        return [*freed, self._over(job, what.reason or "finished"), *_dismiss(job)]

    # --- what the server saw ---

    def _over(self, job: Job, reason: str) -> Log:
        job.reason = reason
        return Log(events.JOB_EXITED, {"job": job.name, "reason": reason})

    def _revoked(self, now: float, job: Job, what: r.JobRevoked) -> list[Instruction]:
        job.died_at = what.since
        waited = "another job waited" if what.waited else f"then for {SILENT_TIMEOUT_S:g} s more"
        return self._condemn(job, f"it was silent beyond its lease of {self.config.lease_timeout:g} s, and {waited}")

    def _condemn(self, job: Job, reason: str) -> list[Instruction]:
        job.condemned = reason
        return [self._over(job, reason), *_dismiss(job)]

    def _late_phase(self, now: float, job: Job, what: r.PhaseOverdue) -> list[Instruction]:
        lease = self.state.leases[what.token]
        job.overdue.append(what.token)
        return [Log(events.PHASE_OVERDUE, about(lease), duration=now - lease.granted_at, step=lease.step)]

    def _exited(self, now: float, job: Job | None, what: r.JobExited) -> list[Instruction]:
        if self._is_no_news(job):
            return []
        if job is None:
            job = Job(name=what.job, uid="", order=0, since=now, state=ENDED, reason=NEVER_REGISTERED)
            self.state.jobs[what.job] = job
        job.has_exited = True
        return [self._over(job, job.reason or "said to have exited by what started it")]

    def _gone(self, now: float, job: Job, what: r.ProcessesGone) -> list[Instruction]:
        out: list[Instruction] = []
        assert job.died_at is not None
        for lease in self.state.leases_of(job.name):
            reclaimed = Log(events.LEASE_RECLAIMED, about(lease), duration=now - job.died_at, step=lease.step)
            out += [self.free(lease, now), reclaimed]
        return [*out, *_dismiss(job)]

    def _settled(self, now: float, job: None, what: r.Settled) -> list[Instruction]:
        self.state.settle_until = None
        return []

    # --- what follows ---

    def _settle(self, now: float) -> list[Instruction]:
        """Brings the schedule, the queues, and what clients know of contention up to date."""
        state, config, out = self.state, self.config, list[Instruction]()
        if queueing.advance(state, config):
            out.append(Log(events.SEGMENT, {"index": state.segment, "mode": queueing.mode(state, config)}))
            for node in state.peaks:
                self._count_peak(node)
        for request in queueing.grantable(state, config):
            out += self.give(request, request.nodes, now)
        for request in [request for request in state.requests if request.is_fillers]:
            if nodes := queueing.for_filler(request, state, config):
                out += self.give(request, nodes, now)
        for job, nodes, gangs in queueing.contention(state, config):
            if (nodes, gangs) != (job.contended, job.gangs):
                job.contended, job.gangs = nodes, gangs
                self._call_back(now, job)
                out += [Send(client, m.Contended(nodes=nodes, gangs=gangs)) for client in job.clients]
        return out

    def _call_back(self, now: float, job: Job) -> None:
        """Notes since when a filler has been asked to leave. This is not on record: after a restart the time to leave begins
        when the filler speaks again."""
        for lease in self.state.leases_of(job.name) if job.filler and job.name not in self._unheard else ():
            if set(lease.nodes).isdisjoint(job.contended):
                self.called_back.pop(lease.token, None)
            else:
                self.called_back.setdefault(lease.token, self.running.at(now))


def _dismiss(job: Job) -> list[Instruction]:
    clients, job.clients = job.clients, []
    return [Send(client, m.JobEnded(reason=job.reason)) for client in clients]
