"""Finds jobs whose driver died, ends processes that outlive a dead job, and frees its nodes when none is left.

Runs in the coordinator's loop (looks for survivors in a thread); made by server.py, which takes what is seen as inputs. Touches
/proc and, by `members.kill`, processes of dead jobs on this host.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from verl_mux.coordinator.bus import members
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.bus.messages import Member
from verl_mux.coordinator.core import hosts
from verl_mux.coordinator.core.reaping import Sight, Sights, Verdict, judge
from verl_mux.coordinator.core.records import RUNNING, DriverDied, Input, Job, JobState, NodeEmpty, NodesOwed, ProcessesGone, What
from verl_mux.coordinator.core.state import IllegalMove, Machine, UnknownJob

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.25
_AFTER_A_KILL_S = 0.05


class ProcessWatch:
    """made -> `run()` until cancelled. Agents' reports, which are looks from other hosts, come in by `report`.

    `waits_for`: by name of a job that is ending or silent, where processes of it are left. `sights`: what agents see.
    """

    def __init__(self, machine: Machine, take: Callable[[What | Input], None], clock: Callable[[], float],
                 count: Callable[[str, object, BaseException], None]) -> None:  # fmt: skip
        """`take`: gives an input to the machine. `clock`: seconds, as of inputs. `count(kind, detail, error)`: for faults."""
        self._machine, self._take, self._clock, self._count = machine, take, clock, count
        self.waits_for: dict[str, list[str]] = {}
        self.sights = Sights()
        self._names = [*members.names_of_this_host(), "localhost", "127.0.0.1", "::1"]
        self._looks: dict[str, list[Member]] = {}  # of dying jobs on this host, by uid
        self._ending: set[str] = set()  # uids of dying jobs whose processes may be ended
        self._killed: set[Member] = set()  # logged once, ended again until it is gone
        self._has_just_killed = False  # such a process is gone in a moment
        self._wake = asyncio.Event()

    async def run(self, flush: Callable[[], None]) -> None:
        """`flush`: called at each look, so that the journal writes what could wait."""
        while True:
            try:
                await self._look_around(flush)
            except Exception as error:  # out of descriptors, say: it passes, and the service goes on
                self._count("faults", "the watch over processes", error)
            pause, self._has_just_killed = _AFTER_A_KILL_S if self._has_just_killed else LOOK_EVERY_S, False
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), pause)
            self._wake.clear()

    def soon(self) -> None:
        """Looks again at once."""
        self._wake.set()

    def report(self, report: m.AgentReport) -> m.Message:
        """What an agent saw on its host becomes inputs. Returns the answer, which says what to look for next."""
        state, now = self._machine.state, self._clock()
        if reason := self.sights.refusal(report, state):
            return m.Refused(about="agent", reason=reason)
        for what in (*self.sights.take(report, state, now), *hosts.seen(report, state, self._machine.config)):
            with contextlib.suppress(IllegalMove, UnknownJob):
                self._take(what)
        for job in self._jobs(JobState.DYING) if report.looks else []:
            if job.uid in self._looks:
                self._conclude(job)
        return self.sights.answer(report, state, self._machine.config, self._machine.epoch, sorted(self._ending))

    def where_alive(self, name: str, uid: str) -> str:
        """Where processes of the job are seen to live, in words; empty: nowhere."""
        job = self._machine.state.jobs.get(name)
        known = [job.driver, *job.members] if job is not None and job.uid == uid else []
        if here := members.survivors(uid, known):
            return f"on this host (pid {', '.join(str(member.pid) for member in here)})"
        hosts = self.sights.carrying(uid)
        return f"on {', '.join(hosts)}" if hosts else ""

    def look_at_driver_before(self, message: m.Register) -> None:
        """A job's name is free as soon as the driver that registered it is gone, also between two looks."""
        job = self._machine.state.jobs.get(message.job)
        if job is not None and job.driver != message.driver:
            self._look_for_dead_driver(job)

    def _jobs(self, *states: JobState) -> list[Job]:
        return [job for job in self._machine.state.jobs.values() if job.state in states]

    async def _look_around(self, flush: Callable[[], None]) -> None:
        for job in self._jobs(*RUNNING):
            self._look_for_dead_driver(job)
        now = self._clock()
        for what in (*self.sights.due(self._machine.state, self._machine.config, now), *self._machine.due(now)):
            self._take(what)
        flush()
        dying = self._jobs(JobState.DYING)
        uids = {job.uid for job in dying}
        self._looks = {uid: alive for uid, alive in self._looks.items() if uid in uids}
        self._ending &= uids
        self.waits_for = {job.name: await self._reap(job) for job in (*dying, *self._jobs(JobState.SILENT))}

    def _look_for_dead_driver(self, job: Job) -> None:
        if job.state in RUNNING and members.is_here(job.driver) and not members.is_alive(job.driver):
            self._take(DriverDied(job=job.name, uid=job.uid))

    async def _reap(self, job: Job) -> list[str]:
        """Frees the nodes of a dead job where nothing of it is left; returns in words what is left elsewhere."""
        is_dying = job.state is JobState.DYING
        uid = job.uid if is_dying else None  # reading the environment of every process costs time
        known = [job.driver, *job.members]
        # Two looks: the first may miss what a dying process starts while it goes on.
        alive = await asyncio.to_thread(lambda: members.survivors(uid, known) or members.survivors(uid, known))
        if is_dying:
            self._looks[job.uid] = alive
            return self._conclude(job)
        if job.state not in RUNNING:
            return []
        return self._judge(job, {job.uid: alive}, 0.0).waits_for

    def _judge(self, job: Job, looks: dict[str, list[Member]], now: float) -> Verdict:
        sights = [Sight("", self._names, members.SPACE, looks), *self.sights.on(self._machine.state)]
        return judge(job, sights, self._machine.state, self._machine.config, now)

    def _conclude(self, job: Job) -> list[str]:
        """What follows from all looks for a job that was dying before they began."""
        verdict = self._judge(job, self._looks, self._clock())
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
            if members.kill(member, job.uid) and member not in self._killed:
                log.warning("killed pid %d, which outlived job %r", member.pid, job.name)
                self._killed.add(member)
                self._has_just_killed = True
        return verdict.waits_for
