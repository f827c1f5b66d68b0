"""The coordinator's mind: a pure state machine. `handle(input)` changes the records and returns instructions.

Theory of operation
- Everything that decides lives here and in the modules called from here (queueing, registration, placing,
  observing, telemetry). No I/O, no clock: an input says when it came.
- A job moves by the table in `job_states`. A move that is not in it raises IllegalMove and changes nothing.
- A lease is given out with a token that is higher than all before it. It ends when its client releases it, or when its
  job has ENDED; never while a process of the job may still be on the node.
- Silence for a while takes no node away: a driver that was stopped or starved finds its leases as they were. Silence beyond
  the lease does when another job waits, or when it lasts: the job is then over, and dies like any other (see `patience`).
- The nodes of a dying job come free once its processes are gone, and not before: each when nothing of the job is left on its
  host, and what names no host when nothing is left at all. Where nobody can look a node is fenced, and the job lets go of it.
- After each input all requests that can be granted are granted; see `queueing` for who may go, and `fillers` for what takes
  the nodes that jobs leave.

Invariants (asserted by tests/coordinator/test_histories.py)
1. Outside uncoordinated segments no node is named by two leases.
2. A lease is granted for exactly the nodes of its request: a gang gets all or waits. Some may go back before the rest.
   A filler gets as many of them as it asked for, and none that a job waits for.
3. Tokens strictly increase, across restarts too.
4. Per node, requests that may run are granted in order of arrival, or of precedence where somebody has any.
5. A dead job's nodes come free once, at NodeEmpty, NodesOwed (but then they are fenced) or ProcessesGone, and not before.
6. When every holder releases, every request that may run is granted in the end.
7. No node is granted while it is fenced or draining.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from verl_mux.coordinator.bus import limits
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.bus.conversation import REGISTER
from verl_mux.coordinator.core import patience, queueing, registration, telemetry
from verl_mux.coordinator.core.fillers import granting
from verl_mux.coordinator.core.fillers.calls import Calls
from verl_mux.coordinator.core.hosts import fences, memory, moves
from verl_mux.coordinator.core.inputs_and_instructions import (
    AboutHosts,
    AboutJob,
    AboutMoves,
    DriverDied,
    HostMeasured,
    Input,
    Instruction,
    JobEvicted,
    JobExited,
    JobRevoked,
    JobSilent,
    Log,
    MoveGivenUp,
    NodeEmpty,
    NodeReleased,
    NodesOwed,
    PhaseOverdue,
    Planned,
    PoolsChanged,
    ProcessesGone,
    Send,
    Settled,
    SomebodyWasBefore,
)
from verl_mux.coordinator.core.job_states import UnknownJob, next_state
from verl_mux.coordinator.core.leases import Leases, about, asked_for
from verl_mux.coordinator.core.placement import moving, observing, placing, prediction
from verl_mux.coordinator.core.records import Job, JobState, Lease, Request, State
from verl_mux.coordinator.core.running_time import RunningTime
from verl_mux.coordinator.core.settings import SILENT_TIMEOUT_S, Config
from verl_mux.coordinator.core.tokens import claims, closing
from verl_mux.coordinator.core.waiting import Waiting
from verl_mux.placement.estimator import corrected
from verl_mux.profiling.eventlog import events

NEVER_REGISTERED = "exited before it registered"
LIVE, SILENT, DYING, ENDED = JobState.LIVE, JobState.SILENT, JobState.DYING, JobState.ENDED


class Machine:
    """Owns the records. `epoch` names this start of the coordinator; `heard`: running time when each job was last heard."""

    def __init__(self, config: Config, epoch: str = "", state: State | None = None):
        self.config = config
        self.epoch = epoch
        self.state = state if state is not None else State()
        self.heard: dict[str, float] = {}
        self.calls = Calls()
        self._waiting = Waiting(self.state, config)
        self._running = RunningTime()
        self._leases = Leases(self._waiting, self.calls, self._running, epoch)
        self._resumed_at = 0.0
        self._unheard: set[str] = set()  # jobs of which this start of the coordinator has heard nothing yet

    def handle(self, given: Input) -> list[Instruction]:
        """Raises IllegalMove or UnknownJob and then has changed nothing."""
        now, what = given.now, given.what
        self._waiting.follow(self.state)
        if isinstance(what, Settled):
            self.state.settle_until = None
            return self._settle(now)
        if isinstance(what, SomebodyWasBefore):
            claims.somebody_was_before(self.state, self.config)
            return []
        if isinstance(what, AboutHosts):
            return self._about_hosts(now, what) + self._settle(now)
        if isinstance(what, AboutMoves):
            return self._about_moves(now, what) + self._settle(now)
        job = self._job_of(what)
        if isinstance(what, m.Register) and (refusal := self._refusal(what, job)):
            return [Send(what.client, refusal)]
        if isinstance(what, m.Detach) and job is not None and job.clients == [what.client]:
            what = m.Deregister(job=what.job, uid=what.uid, client=what.client)  # the last to leave ends the job
        if isinstance(what, m.Deregister) and job is not None and what.client in job.clients[1:]:
            what = m.Detach(job=what.job, uid=what.uid, client=what.client)  # it took itself for the first for a moment
        after = next_state(job, what)
        if isinstance(what, m.FromJob):
            self.heard[what.job] = self._running.at(now)
            self._unheard.discard(what.job)
        if isinstance(what, m.Heartbeat) and job is not None and job.state is after:
            return self._heartbeat(now, job, what)  # by far the most frequent; nothing follows from it
        out: list[Instruction] = []
        if isinstance(what, m.Deregister) and job is not None:
            moving.leaves(self.state, job, what, now)
        out += self._enter(job, after, now) if job else []
        out += _HANDLERS[type(what)](self, now, job, what)
        return out + self._settle(now)

    def resume(self, now: float) -> None:
        """After a restart: no job has been silent yet."""
        self.heard = dict.fromkeys(self.state.jobs, self._running.look(now))
        self._unheard = set(self.state.jobs)
        self._resumed_at = now

    def due(self, now: float) -> list[Input]:
        """What the passing of time has brought about; to be handled like any other input, in this order."""
        running = self._running.look(now)
        silent, out = patience.silent(self.state, self.config, self.heard, running)
        out += patience.revoked(silent, self.state, self.config, self.heard, now, running)
        out += self.calls.slow_to_leave(self.state, self.config, running)
        out += patience.overdue(self.state, now, but=silent)
        out += moving.due(self.state, now, self._resumed_at)
        if self.state.settle_until is not None and running >= self.state.settle_until:
            out.append(Settled())
        return [Input(now, what) for what in out]

    def somebody_is_nearly_late(self, now: float) -> bool:
        running = self._running.at(now)
        return any(patience.is_nearly_late(heard, running, self.config) for heard in self.heard.values())

    def settles_for(self, now: float) -> float | None:
        """Seconds for which nothing will be granted, if the coordinator makes no pause; None: it does not settle."""
        until = self.state.settle_until
        return None if until is None else max(until - self._running.at(now), 0.0)

    def takes_nobody_to_be_before(self) -> bool:
        """It settles for a shorter time than it would if it knew of an earlier coordinator."""
        return self.state.settle_until is not None and self.state.settle_until < self.config.lease_timeout

    def changes(self, given: Input) -> bool:
        """False for a mere sign of life, and an end that is known or is nobody's: those need no place in the journal."""
        what = given.what
        if isinstance(what, JobExited):
            return not self._is_no_news(self.state.jobs.get(what.job))
        job = self.state.jobs.get(what.job) if isinstance(what, m.Heartbeat) else None
        return job is None or job.state is not LIVE

    def _is_no_news(self, exited: Job | None) -> bool:
        """Of a job that never registered it matters only while jobs are expected, as it is not to be waited for any more."""
        if exited is None:
            return self.state.started or self.config.expect_jobs == 0
        return exited.told or exited.state is ENDED

    # --- moves ---

    def _job_of(self, what: AboutJob) -> Job | None:
        job = self.state.jobs.get(what.job)
        if isinstance(what, (m.Register, JobExited)) or (job and what.uid == job.uid and _speaks_for(job, what)):
            return job
        raise UnknownJob(f"no job {what.job!r} of this start is known")

    def _refusal(self, asked: m.Register, known: Job | None) -> m.Refused | None:
        return registration.refuse(asked, known, self._waiting.started_as(asked.uid), self.state, self.config)

    def _enter(self, job: Job, after: JobState, now: float) -> list[Instruction]:
        """Puts the job into its next state, and takes away what it may not keep there."""
        before = job.state
        if before is after:
            return []
        job.state, job.since = after, now
        self._waiting.moved(job)
        if after is DYING:
            job.died_at = now
        if after in (DYING, ENDED):
            self._leases.drop(self._waiting.requests_of(job.name))
        if after is ENDED:
            self._forget_oldest_ended(but=job)
            job.memory, job.host_memory, job.members, job.progress, job.note = {}, {}, [], None, ""
            given_up = placing.leave(self.state, job)
            return self._start(placing.told_late(self.state), given_up)
        return [Log(events.JOB_RESUMED, {"job": job.name})] if (before, after) == (SILENT, LIVE) else []

    def _forget_oldest_ended(self, but: Job) -> None:
        """Ended jobs count as arrived until all that were expected have; after that they are only there to be seen."""
        if self.state.started and len(self.state.jobs) > limits.ENDED_JOBS_REMEMBERED:
            ended = [name for name, job in self.state.jobs.items() if job.state is ENDED and job is not but]
            for name in ended[: -limits.ENDED_JOBS_REMEMBERED]:
                self._forget(self.state.jobs[name])

    def _start(self, started: list[Job], out: list[Instruction]) -> list[Instruction]:
        """Tells jobs that asked for nodes which they got, or that they wait."""
        for job in started:
            self._waiting.moved(job)
            out += [Send(c, registration.welcome(self.state, self.config, job, c, self.epoch)) for c in job.clients]
        return out

    def _about_moves(self, now: float, what: AboutMoves) -> list[Instruction]:
        if isinstance(what, Planned):
            return self._start(*placing.carry_out(self.state, self.config, what, now))
        if isinstance(what, MoveGivenUp):
            return placing.give_up(self.state, what.job, "it did not come back in time")
        placing.ask_again(self.state)
        return []

    # --- a job's messages ---

    def _register(self, now: float, job: Job | None, what: m.Register) -> list[Instruction]:
        out = registration.register(self.state, self.config, self.epoch, now, what)
        self._waiting.moved(self.state.jobs[what.job])
        for claim in what.held:
            if claim.token in self.state.leases:
                self._waiting.granted(self.state.leases[claim.token])
        return out

    def _request(self, now: float, job: Job, what: m.LeaseRequest) -> list[Instruction]:
        if what.number < job.registrations.get(what.client, 0):
            return []  # late: a coordinator without memory would not know that its lease was given back long ago
        if lease := self._leases.by_key(job, what.key):
            return [Send(what.client, self._leases.grant(lease))]
        if self._waiting.request(job.name, what.key) or what.key in job.spent:
            return []
        if reason := granting.refusal(what, job):
            return [Send(what.client, m.Refused(about=what.key, reason=reason))]
        if reason := queueing.refusal(what, job, self._waiting.leases_of(job.name), len(self._waiting.requests_of(job.name))):
            return [Send(what.client, m.Refused(about=what.key, reason=reason))]
        request = Request(asked_at=now, num_nodes=what.num_nodes, least=what.least, **asked_for(what))
        self.state.requests.append(request)
        self._waiting.asked(request)
        moved = moving.begins(self.state, self.config, job, what, now)
        observing.asked(job, request)
        job.has_asked = True
        job.asked = max(job.asked, what.step)
        if moved:
            self._correct(job)
        return moved

    def _cancel(self, now: float, job: Job, what: m.LeaseCancel) -> list[Instruction]:
        request = self._waiting.request(job.name, what.key)
        self._leases.drop([request] if request else [])
        lease = self._leases.by_key(job, what.key)
        freed = [self._leases.free(lease, now)] if lease else []
        if not freed:
            closing.spent(job, what.key)
        return [*freed, Send(what.client, m.LeaseCancelled(key=what.key))]

    def _release(self, now: float, job: Job, what: m.LeaseRelease) -> list[Instruction]:
        lease = self._leases.of(job, what.token)
        if lease is None:
            return [Send(what.client, closing.answer(job, what.token, is_anothers=what.token in self.state.leases))]
        patience.phase_ended(job, lease, now)
        freed = self._leases.free(lease, now)
        done = Send(what.client, m.LeaseReleased(token=what.token))
        return [freed, done, *self._observe(job, lease, now)]

    def _shrink(self, now: float, job: Job, what: m.LeaseShrink) -> list[Instruction]:
        done = Send(what.client, m.LeaseShrunk(key=what.key))
        lease = self._leases.of(job, what.token)
        left = [node for node in lease.nodes if node not in what.nodes] if lease else []
        if lease is None or not left or left == lease.nodes:  # the last node goes back with the lease
            return [done]
        gone = [node for node in lease.nodes if node in what.nodes]
        self._leases.shrink(lease, gone, now)
        return [done, Log(events.LEASE_HELD, {**about(lease), "nodes": gone}, duration=now - lease.granted_at, step=lease.step)]

    def _observe(self, job: Job, lease: Lease, now: float) -> list[Instruction]:
        """What the phase of a job took, if it was placed, and what that changes."""
        spec = self.state.placed.job(job.name)
        if job.watched is None or spec is None:
            return []
        observing.counted(job.watched, lease, now)
        if job.name in self.state.moves:  # a phase that ends with a checkpoint for it says nothing of others
            job.watched.free_since = now
            return []
        out = observing.released(job.watched, lease, spec, now)
        self._correct(job, anyway=observing.is_known(job.watched, lease))
        group = self.state.placed.group_of(job.name)
        if group is not None and lease.phase == "train" and prediction.is_due(group, job, self.state, self.config):
            out.append(prediction.predicted(group, self.state, self.config))
        return out

    def _correct(self, job: Job, anyway: bool = False) -> None:
        """The placer is told of a job that turns out other than it was placed by; `anyway`: also of one that does not."""
        spec = self.state.placed.job(job.name)
        if job.watched is not None and spec is not None:
            revised = memory.revised(job, corrected(spec, job.watched.observed) or spec)
            revised = observing.with_move_cost(job.watched, revised)
            if revised is not spec or anyway:
                placing.correct(self.state, revised)

    def _heartbeat(self, now: float, job: Job, what: m.Heartbeat) -> list[Instruction]:
        queued = [*self._waiting.queued_by(what.client), *([REGISTER] if not job.nodes else [])]
        mine = self._waiting.leases_of(job.name)
        held = {lease.token for lease in mine}
        tokens = [token for token in what.tokens if token in held]
        # A grant that went astray, or one that its client no longer wants and releases.
        unheard = [self._leases.grant(lease) for lease in mine if lease.client == what.client and lease.token not in what.tokens]
        move = moving.asked_of(self.state, job)
        ack = m.HeartbeatAck(beat=what.beat, epoch=self.epoch, queued=queued, tokens=tokens, move=move)
        return [Send(what.client, message) for message in (*unheard, *self._call_again(now, job, mine), ack)]

    def _call_again(self, now: float, job: Job, leases: list[Lease]) -> list[m.Contended]:
        """What was pushed to a filler may have gone astray."""
        if not (job.filler and job.contended):
            return []
        self.calls.tell(job, leases, self._running.at(now))
        return [m.Contended(nodes=job.contended, gangs=job.gangs)]

    def _report(self, now: float, job: Job, what: m.FromJob) -> list[Instruction]:
        token = getattr(what, "token", None)
        if token is not None and self._leases.of(job, token) is None:
            return []  # late; who holds a stale token learns it at the next heartbeat
        return telemetry.REPORTS[type(what)](self.state, job, what)

    def _host_memory(self, now: float, job: Job, what: HostMeasured | m.HostReport) -> list[Instruction]:
        out = memory.measured(self.state, self.config, job, what)
        self._correct(job)
        return out

    def _detach(self, now: float, job: Job, what: m.Detach) -> list[Instruction]:
        self._leases.drop([request for request in self._waiting.requests_of(job.name) if request.client == what.client])
        job.clients = [client for client in job.clients if client != what.client]
        job.registrations.pop(what.client, None)
        freed = [self._leases.free(lease, now) for lease in self._waiting.leases_of(job.name) if lease.client == what.client]
        return [*freed, Send(what.client, m.JobEnded(reason="closed"))]

    def _deregister(self, now: float, job: Job, what: m.Deregister) -> list[Instruction]:
        job.reason = what.reason or "finished"
        freed = [self._leases.free(lease, now) for lease in self._waiting.leases_of(job.name)]
        if not job.has_asked and not what.reason:  # it only looked whether it would be taken; an expected job is still to come
            self._forget(job)
        return [*freed, _exited(job), *_dismiss(job)]

    def _failing(self, now: float, job: Job, what: m.Failing) -> list[Instruction]:
        job.reason = what.reason
        return [_exited(job), Send(what.client, m.JobEnded(reason=job.reason))]

    # --- what the server saw ---

    def _silent(self, now: float, job: Job, what: JobSilent) -> list[Instruction]:
        return [Log(events.JOB_SILENT, {"job": job.name, "pid": job.pid, "host": job.host})]

    def _revoked(self, now: float, job: Job, what: JobRevoked) -> list[Instruction]:
        job.died_at = what.since
        waited = "another job waited" if what.waited else f"then for {SILENT_TIMEOUT_S:g} s more"
        return self._condemn(job, f"it was silent beyond its lease of {self.config.lease_timeout:g} s, and {waited}")

    def _evicted(self, now: float, job: Job, what: JobEvicted) -> list[Instruction]:
        return self._condemn(job, what.reason)

    def _condemn(self, job: Job, reason: str) -> list[Instruction]:
        job.reason = job.condemned = reason
        return [_exited(job), *_dismiss(job)]

    def _late_phase(self, now: float, job: Job, what: PhaseOverdue) -> list[Instruction]:
        lease = self.state.leases[what.token]
        job.overdue.append(what.token)
        return [Log(events.PHASE_OVERDUE, about(lease), duration=now - lease.granted_at, step=lease.step)]

    # --- hosts ---

    def _about_hosts(self, now: float, what: AboutHosts) -> list[Instruction]:
        if isinstance(what, PoolsChanged):
            return self._reconfigure(what)
        dying, shut = [job.name for job in self.state.jobs.values() if job.state is DYING], fences.shut(self.state, self.config)
        out = self._leases.take_from(dying, what.node, now) if isinstance(what, NodeReleased) else []
        out += moves.change(self.state, what, now)
        out += self._fence_anew()
        if shut - fences.shut(self.state, self.config):
            placing.open_again(self.state)
        return out

    def _reconfigure(self, what: PoolsChanged) -> list[Instruction]:
        old = self.config
        self.config = self._waiting.config = msgspec.structs.replace(old, pools=what.pools)
        before, after = old.nodes.keys(), self.config.nodes.keys()
        drained = sorted(self.config.draining - old.draining)
        undrained = sorted((old.draining - self.config.draining) & after)
        out: list[Instruction] = [Log(events.POOLS_CHANGED, {"added": sorted(after - before), "removed": sorted(before - after)})]
        out += [Log(events.NODE_DRAINING, {"node": node, "undo": node in undrained}) for node in (*drained, *undrained)]
        out += self._fence_anew()
        for node in drained:
            placing.vacate(self.state, node)
        if undrained or after - before:
            placing.open_again(self.state)
        return out

    def _fence_anew(self) -> list[Instruction]:
        before, self.state.fenced = self.state.fenced, fences.fenced(self.state, self.config)
        self._waiting.look_again()
        out: list[Instruction] = [Log(events.NODE_UNFENCED, {"node": node}) for node in before if node not in self.state.fenced]
        fresh = {node: reason for node, reason in self.state.fenced.items() if before.get(node) != reason}
        return out + [Log(events.NODE_FENCED, {"node": node, "reason": reason}) for node, reason in fresh.items()]

    def _empty(self, now: float, job: Job, what: NodeEmpty) -> list[Instruction]:
        return self._leases.take_from([job.name], what.node, now)

    def _owed(self, now: float, job: Job, what: NodesOwed) -> list[Instruction]:
        moves.owe(self.state, what, now)
        fenced = self._fence_anew()  # before anybody can be given them
        return [*fenced, *(line for node in what.nodes for line in self._leases.take_from([job.name], node, now))]

    def _died(self, now: float, job: Job, what: DriverDied) -> list[Instruction]:
        job.reason = "its driver process died"
        return [_exited(job)]

    def _told_exited(self, now: float, job: Job | None, what: JobExited) -> list[Instruction]:
        if self._is_no_news(job):
            return []
        if job is None:
            job = Job(name=what.job, uid="", order=0, since=now, state=ENDED, reason=NEVER_REGISTERED)
            self.state.jobs[what.job] = job
            self._waiting.moved(job)
        job.told = True
        job.reason = job.reason or "said to have exited by what started it"
        return [_exited(job)]

    def _gone(self, now: float, job: Job, what: ProcessesGone) -> list[Instruction]:
        out: list[Instruction] = []
        assert job.died_at is not None
        for lease in self._waiting.leases_of(job.name):
            reclaimed = Log(events.LEASE_RECLAIMED, about(lease), duration=now - job.died_at, step=lease.step)
            out += [self._leases.free(lease, now), reclaimed]
        return [*out, *_dismiss(job)]

    # --- what follows ---

    def _settle(self, now: float) -> list[Instruction]:
        """Brings the schedule, the queues, and what clients know of contention up to date."""
        out: list[Instruction] = []
        if queueing.advance(self.state, self.config):
            out.append(Log(events.SEGMENT, {"index": self.state.segment, "mode": queueing.mode(self.state, self.config)}))
            for node in self.state.peaks:
                telemetry.count_peak(self.state, node)
        for request in self._waiting.grantable():
            out += self._leases.give(request, request.nodes, now)
            if (watched := self.state.jobs[request.job].watched) is not None:
                observing.granted(watched, request.phase, now)
        for request, nodes in granting.grantable(self._waiting.fillers(), self.state, self.config, self._waiting.is_open, now):
            out += self._leases.give(request, nodes, now)
        for job, nodes, gangs in self._waiting.contended():
            if job.state is LIVE and (nodes, gangs) != (job.contended, job.gangs):
                job.contended, job.gangs = nodes, gangs
                self._call(now, job)
                out += [Send(client, m.Contended(nodes=nodes, gangs=gangs)) for client in job.clients]
        return out

    def _call(self, now: float, job: Job) -> None:
        """It is told what jobs wait for. After a restart it may not be there yet to hear that, and is told when it speaks."""
        if job.filler and job.name not in self._unheard:
            self.calls.tell(job, self._waiting.leases_of(job.name), self._running.at(now))

    def _forget(self, job: Job) -> None:
        del self.state.jobs[job.name]
        self._waiting.forgotten(job)
        self.heard.pop(job.name, None)


def _speaks_for(job: Job, what: AboutJob) -> bool:
    """Only a client that registered; one of a job that is dying or over is told so instead."""
    return not isinstance(what, m.FromJob) or job.state in (DYING, ENDED) or what.client in job.clients


def _exited(job: Job) -> Log:
    return Log(events.JOB_EXITED, {"job": job.name, "reason": job.reason})


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
    **dict.fromkeys((m.HostReport, HostMeasured), Machine._host_memory),
    m.Detach: Machine._detach,
    m.Deregister: Machine._deregister,
    m.Failing: Machine._failing,
    JobSilent: Machine._silent,
    JobRevoked: Machine._revoked,
    JobEvicted: Machine._evicted,
    PhaseOverdue: Machine._late_phase,
    DriverDied: Machine._died,
    JobExited: Machine._told_exited,
    ProcessesGone: Machine._gone,
    NodeEmpty: Machine._empty,
    NodesOwed: Machine._owed,
}
