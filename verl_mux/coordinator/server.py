"""The running coordinator: a ROUTER socket and a watch over processes, around the state machine.

Thin on purpose: a frame or an observation becomes an input, the machine decides, the journal remembers, and then the
instructions are carried out. It may run in a thread of any process: `start()` gives the address, `stop()` ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from verl_mux.coordinator import access, by_hand, signalling
from verl_mux.coordinator.bus import members
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.bus.access import keys
from verl_mux.coordinator.bus.router import Router
from verl_mux.coordinator.core.hosts import memory, pools
from verl_mux.coordinator.core.hosts.reaping import Sight, judge
from verl_mux.coordinator.core.hosts.sights import Sights
from verl_mux.coordinator.core.inputs_and_instructions import (
    DriverDied,
    Input,
    Instruction,
    JobExited,
    Log,
    NodeEmpty,
    NodesOwed,
    PoolsChanged,
    ProcessesGone,
    SomebodyWasBefore,
    What,
)
from verl_mux.coordinator.core.job_states import IllegalMove, UnknownJob
from verl_mux.coordinator.core.records import Job, JobState
from verl_mux.coordinator.core.rewind import Rewind
from verl_mux.coordinator.core.settings import Config
from verl_mux.coordinator.core.snapshot import describe
from verl_mux.coordinator.core.state import NEVER_REGISTERED
from verl_mux.coordinator.drivers import Drivers
from verl_mux.coordinator.journal import before
from verl_mux.coordinator.journal.delivery import Delivery
from verl_mux.coordinator.journal.journal import Journal
from verl_mux.coordinator.planning import Planning
from verl_mux.coordinator.refusals import Refusals
from verl_mux.coordinator.status_frame import Cached
from verl_mux.errors import Failure, UserError

log = logging.getLogger(__name__)

WATCH_EVERY_S = 0.5
REAP_EVERY_S = 0.25
_AFTER_A_KILL_S = 0.05
_SILENT_LOOKED_AT = 100

_Found = TypeVar("_Found")


class Coordinator:
    """made -> `start()` -> serves in a thread of its own -> `stop()`. Also a context manager.

    `event_log`: anything with `log(event, duration_sec=None, extra=None, step=None)`.
    `journal_path` None: a restart knows of leases only what jobs assert. `reread` reads the configuration again.
    """

    def __init__(self, config: Config, journal_path: str | Path | None = None, bind: str = "tcp://127.0.0.1:0",
                 event_log: Any = None, key_directory: Path | None = None,
                 reread: Callable[[], Config] | None = None):  # fmt: skip
        """Raises UserError for `key_directory` None, unless only this machine reaches `bind`: then its user's own are taken."""
        self._reread = reread
        self._keys = keys.for_bind(bind, key_directory)
        self.address: str | None = None
        self._bind, self._event_log = bind, event_log
        self._journal = Journal(journal_path)
        self._machine = self._journal.restore(config, uuid.uuid4().hex, before.arrive(bind))
        self._clock = self._journal.clock
        self._machine.resume(self._clock.now())
        self._deciding = Rewind(self._machine)
        self._refusals = Refusals()
        self._drivers = Drivers()
        self._status = Cached(self._describe)
        self._sights = Sights()
        self._names = [*members.names_of_this_host(), "localhost", "127.0.0.1", "::1"]
        self._looks: dict[str, list[m.Member]] = {}  # of dying jobs here, by uid
        self._ending: set[str] = set()  # uids of dying jobs whose processes may be ended
        self._waits_for: dict[str, list[str]] = {}
        self._killed: set[m.Member] = set()  # said once, done until it is gone
        self._has_just_killed = False
        self._thread = threading.Thread(target=self._main, name="verl-mux-coordinator", daemon=True)
        self._loop: asyncio.AbstractEventLoop  # there as soon as the thread serves
        self._ready = threading.Event()
        self._failure: BaseException | None = None

    def start(self) -> str:
        """Returns the address with the real port. Raises UserError when the address cannot be bound."""
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            self._journal.close()
            raise self._failure
        assert self.address is not None
        return self.address

    def wait(self, enough: threading.Event) -> None:
        """Blocks until `enough` is set. Raises Failure if the service ends by itself."""
        while not enough.wait(timeout=1.0):
            if not self._thread.is_alive():
                raise Failure(f"the coordinator stopped: {self._failure}")

    def stop(self) -> None:
        """Ends the service; jobs keep what they hold and wait for the next one at this address."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()
            if not self._machine.state.leases and self._machine.state.settle_until is None and self.address is not None:
                before.forget(self.address)
        self._journal.close()

    def __enter__(self) -> Coordinator:
        self.start()
        return self

    def __exit__(self, *error) -> None:
        self.stop()

    @property
    def config(self) -> Config:
        return self._machine.config

    def reload(self) -> str:
        """Takes the pools of the configuration file as it is now. Returns in words what changed. Raises UserError."""
        return self._call(self._reload)

    def snapshot(self) -> dict[str, Any]:
        """Everything that `verl-mux status` shows, as plain data."""
        return self._call(self._describe)

    def _call(self, function: Callable[[], _Found]) -> _Found:
        """Runs in the loop's thread, where the machine lives."""

        async def wrapped() -> _Found:
            return function()

        if not self._thread.is_alive():
            raise Failure("the coordinator is not running")
        return asyncio.run_coroutine_threadsafe(wrapped(), self._loop).result()

    # --- the loop ---

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._failure = error
            if self._ready.is_set():
                log.exception("the coordinator stopped")
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop, self._stopping, self._told = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        self._delivery = Delivery(self._journal, self._machine, self._carry_out, self._loop.call_soon)
        self._planning = Planning(self._machine, self._take, self._clock.now, self._refusals)
        self._planning.look()
        self._router = Router(self._bind, self._keys, self._receive, self._turned_away)
        self.address = self._router.address
        before.note(self.address)
        watching = asyncio.create_task(self._watch())
        self._ready.set()
        await self._stopping.wait()
        watching.cancel()
        self._planning.close()
        self._drivers.close()
        self._delivery.flush()
        self._router.close()

    def _turned_away(self, reason: str) -> None:
        self._refusals.count(reason, "a connection")
        self._somebody_was_before()

    def _receive(self, identity: bytes, role: str, frame: bytes) -> None:
        """Nothing that comes in ends the service: what cannot be read or handled is answered, counted, and forgotten."""
        message = None
        try:
            message = m.decode(frame)
            self._answer(identity, role, message)
        except m.Unreadable as error:
            self._refusals.count("frames refused", error)
            self._somebody_was_before()
            self._send(identity, m.Refused(about=error.about, reason=str(error)))
        except Exception as error:
            about = m.asks_about(message)
            self._refusals.count("faults", f"{about} of {identity!r}", error)
            self._send(identity, m.Refused(about=about, reason="the coordinator failed at this message, and took it back"))

    def _answer(self, identity: bytes, role: str, message: m.AnyMessage) -> None:
        if refusal := access.refusal(identity, role, message):
            self._refusals.count(refusal.kind, refusal.reason)
            return self._send(identity, m.Refused(about=m.asks_about(message), reason=refusal.reason))
        if isinstance(message, m.StatusRequest):
            return self._router.send(identity, self._status.frame())
        if isinstance(message, m.JobOver):
            return self._send(identity, self._told_over(message))
        if isinstance(message, m.ByHand):
            return self._send(identity, self._by_hand(message))
        if isinstance(message, m.AgentReport):
            return self._send(identity, self._agent(message))
        if not isinstance(message, m.FromJob):
            return self._refusals.count("messages that are none for a coordinator", type(message).__name__)
        if isinstance(message, m.Register):
            known = self._machine.state.jobs.get(message.job)
            if known is not None and known.driver != message.driver:  # a name is free as soon as its process is gone
                self._look_at_driver(known)
        try:
            self._take(message)
        except UnknownJob:
            self._send(identity, m.Unknown())
            self._somebody_was_before()
        except IllegalMove:
            self._send(identity, m.JobEnded(reason=self._machine.state.jobs[message.job].reason))

    def _somebody_was_before(self) -> None:
        """This is nobody's first word to the first coordinator here, nor with its keys: another may have been here before."""
        if self._machine.takes_nobody_to_be_before():
            self._take(SomebodyWasBefore())

    def _by_hand(self, message: m.ByHand) -> m.Message:
        decided, answer = by_hand.decide(message, self._machine.state, self.config, self._seen_anywhere)
        for what in decided:
            log.warning("by hand: %s", what)
            self._take(what)
            self._told.set()
        return answer

    def _seen_anywhere(self, name: str, uid: str) -> str:
        job = self._machine.state.jobs.get(name)
        known = [job.driver, *job.members] if job is not None and job.uid == uid else []
        if here := members.survivors(uid, known):
            return f"on this host (pid {', '.join(str(member.pid) for member in here)})"
        hosts = self._sights.carrying(uid)
        return f"on {', '.join(hosts)}" if hosts else ""

    def _reload(self) -> str:
        if self._reread is None:
            raise UserError("this coordinator was not started from a file")
        before, after = self.config, self._reread()
        refusal = pools.restart_needed(before, after) or pools.refusal(self._machine.state, before, after)
        if refusal is not None:
            raise UserError(refusal)
        self._take(PoolsChanged(pools=after.pools))
        return f"pools and their nodes: {after.describe_pools()}"

    def _agent(self, report: m.AgentReport) -> m.Message:
        state, now = self._machine.state, self._clock.now()
        if reason := self._sights.refusal(report, state):
            return m.Refused(about="agent", reason=reason)
        for what in (*self._sights.take(report, state, now), *memory.seen(report, state, self.config)):
            with contextlib.suppress(IllegalMove, UnknownJob):
                self._take(what)
        for job in self._jobs() if report.looks else []:
            if job.state is JobState.DYING and job.uid in self._looks:
                self._conclude(job)
        return self._sights.answer(report, state, self.config, self._machine.epoch, sorted(self._ending))

    def _told_over(self, message: m.JobOver) -> m.JobEnded | m.Unknown:
        """Whoever started the job says that it is over. Its nodes are given on when no process of it is left."""
        job = self._machine.state.jobs.get(message.job)
        if job is not None and job.state is not JobState.ENDED and job.uid != message.uid:
            return m.Unknown()  # an earlier start's end, which does not concern this one
        self._take(JobExited(job=message.job))
        self._told.set()
        known = self._machine.state.jobs.get(message.job)
        return m.JobEnded(reason=known.reason if known is not None else NEVER_REGISTERED)

    def _take(self, what: What | Input) -> None:
        """The heart: decide, remember, carry out."""
        given = what if isinstance(what, Input) else Input(self._clock.now(), what)
        keep = self._machine.changes(given)
        self._delivery.take(given, self._deciding.handle(given), keep)
        self._planning.look()

    def _carry_out(self, instruction: Instruction) -> None:
        try:
            self._do(instruction)
        except Exception as error:  # of one instruction, not of those that follow it
            self._refusals.count("faults", type(instruction).__name__, error)

    def _do(self, instruction: Instruction) -> None:
        if isinstance(instruction, Log):
            return self._record(instruction)
        message = instruction.message
        if isinstance(message, m.LeaseGrant):
            message = msgspec.structs.replace(message, granted_at=self._clock.wall(message.granted_at))
        self._send(instruction.client.encode(), message)

    def _send(self, identity: bytes, message: m.Message) -> None:
        """Dropped if the client is not there, who then asks again."""
        self._router.send(identity, m.encode(message))

    def _record(self, line: Log) -> None:
        if self._event_log is not None:
            self._event_log.log(line.event, duration_sec=line.duration, extra=line.extra, step=line.step)

    def _describe(self) -> dict[str, Any]:
        now = self._clock.now()
        found = describe(self._machine.state, self.config, now, self._waits_for)
        about: dict[str, Any] = {"journal": self._journal.about(), "settling_s": self._machine.settles_for(now)}
        about["hosts"] = self._sights.about(self._machine.state, now)
        return {"address": self.address, "refused": dict(self._refusals.counts), **about, **found}

    # --- the watch over processes ---

    async def _watch(self) -> None:
        while True:
            try:
                await self._look_around()
            except Exception as error:  # out of descriptors, say: it passes, and the service goes on
                self._refusals.count("faults", "the watch over processes", error)
            ending = self._machine.calls or any(job.state is JobState.DYING for job in self._jobs())
            soon = ending or self._machine.somebody_is_nearly_late(self._clock.now())
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._told.wait(), self._pause(bool(soon)))
            self._told.clear()

    def _pause(self, soon: bool) -> float:
        """Until the next look. What was killed is gone in a moment."""
        killed, self._has_just_killed = self._has_just_killed, False
        return _AFTER_A_KILL_S if killed else REAP_EVERY_S if soon else WATCH_EVERY_S

    async def _look_around(self) -> None:
        self._look_for_dead_drivers()
        now = self._clock.now()
        for given in (*self._sights.due(self._machine.state, self.config, now), *self._machine.due(now)):
            self._take(given)
        self._delivery.flush()
        dying = [job for job in self._jobs() if job.state is JobState.DYING]
        uids = {job.uid for job in dying}
        self._looks = {uid: alive for uid, alive in self._looks.items() if uid in uids}
        self._ending &= uids
        silent = [job for job in self._jobs() if job.state is JobState.SILENT]
        # Of a silent job it is only told what still runs: for that not thousands are looked at.
        self._waits_for = {job.name: await self._reap(job) for job in (*dying, *silent[:_SILENT_LOOKED_AT])}

    def _jobs(self) -> list[Job]:
        return list(self._machine.state.jobs.values())

    def _look_for_dead_drivers(self) -> None:
        jobs: dict[m.Member, list[Job]] = {}
        for job in self._jobs():
            if job.state in (JobState.LIVE, JobState.SILENT) and members.is_here(job.driver):
                jobs.setdefault(job.driver, []).append(job)
        for driver in self._drivers.dead(jobs):
            for job in jobs[driver]:
                self._take(DriverDied(job=job.name, uid=job.uid))

    def _look_at_driver(self, job: Job) -> None:
        alive = job.state in (JobState.LIVE, JobState.SILENT)
        if alive and members.is_here(job.driver) and not members.is_alive(job.driver):
            self._take(DriverDied(job=job.name, uid=job.uid))

    async def _reap(self, job: Job) -> list[str]:
        """Frees the nodes of a dead job where nothing of it is left; says in words what is left elsewhere."""
        is_dying = job.state is JobState.DYING
        uid = job.uid if is_dying else None  # reading every environment is dear
        known = [job.driver, *job.members]
        # Looked for twice: what a dying process starts while the first look goes on may be missed by it.
        alive = await asyncio.to_thread(lambda: members.survivors(uid, known) or members.survivors(uid, known))
        if is_dying:
            self._looks[job.uid] = alive
            return self._conclude(job)
        return (
            judge(job, self._all_sights({job.uid: alive}), self._machine.state, self.config, 0.0).waits_for if _runs(job) else []
        )

    def _all_sights(self, looks: dict[str, list[m.Member]]) -> list[Sight]:
        return [Sight("", self._names, members.SPACE, looks), *self._sights.on(self._machine.state)]

    def _conclude(self, job: Job) -> list[str]:
        """What follows from all looks for a job that was dying before they began."""
        verdict = judge(job, self._all_sights(self._looks), self._machine.state, self.config, self._clock.now())
        about = {"job": job.name, "uid": job.uid}
        with contextlib.suppress(IllegalMove, UnknownJob):  # it ended meanwhile
            for node in verdict.free:
                self._take(NodeEmpty(**about, node=node))
            for host, nodes in verdict.owed.items():
                self._take(NodesOwed(**about, host=host, nodes=nodes))
            if verdict.gone:
                self._take(ProcessesGone(**about))
        if verdict.end:
            self._ending.add(job.uid)
        for member in self._looks[job.uid] if verdict.end else []:
            if signalling.kill(member, job.uid) and member not in self._killed:
                log.warning("killed pid %d, which outlived job %r", member.pid, job.name)
                self._killed.add(member)
                self._has_just_killed = True
        return verdict.waits_for


def _runs(job: Job) -> bool:
    return job.state in (JobState.LIVE, JobState.SILENT)
