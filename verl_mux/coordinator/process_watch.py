"""Finds jobs whose driver died, ends processes that outlive a dead job, and frees its nodes when none is left.

Runs in the coordinator's loop; made by server.py, which takes what is seen as inputs. Touches /proc and, by `members.kill`,
processes of dead jobs on this host. Survivors are looked for in a thread, with one look for all jobs, and what the passing of
time brings about never waits for a look: one that takes seconds would pass for a pause of the coordinator, in which no job is
silent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

from verl_mux.coordinator.bus import members
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.bus.messages import Member
from verl_mux.coordinator.core import hosts
from verl_mux.coordinator.core.reaping import Sight, Sights, Verdict, judge
from verl_mux.coordinator.core.records import RUNNING, DriverDied, Input, Job, JobState, NodeEmpty, NodesOwed, ProcessesGone, What
from verl_mux.coordinator.core.state import IllegalMove, Machine, UnknownJob
from verl_mux.places.place import LOOPBACK

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.25
_AFTER_A_KILL_S = 0.05
_NOTHING_HERE_S = 1.0  # between two looks for jobs of which nothing is left here, and which wait for other hosts
_REST = 3.0  # times its own length without a look follow a look
_JUDGED_TOGETHER = 64  # jobs, before others in the loop have their turn


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
        self._names = [*members.names_of_this_host(), *LOOPBACK]
        self._marked = members.Marked()
        self._looks: dict[str, list[Member]] = {}  # of dying jobs on this host, by uid
        self._looking: asyncio.Task | None = None
        self._look_again_at = 0.0
        self._ending: set[str] = set()  # uids of dying jobs whose processes may be ended
        self._killed: set[Member] = set()  # logged once, ended again until it is gone
        self._has_just_killed = False  # such a process is gone in a moment
        self._wake = asyncio.Event()

    async def run(self, flush: Callable[[], None]) -> None:
        """`flush`: called each time, so that the journal writes what could wait."""
        try:
            while True:
                for step in (self._take_what_is_due, flush, self._look_for_dead_drivers, self._look_for_survivors):
                    try:
                        step()
                    except Exception as error:  # out of descriptors, say: it passes, and the service goes on
                        self._count("faults", "the watch over processes", error)
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), _AFTER_A_KILL_S if self._has_just_killed else LOOK_EVERY_S)
                self._wake.clear()
        finally:
            if self._looking is not None:
                self._looking.cancel()

    def soon(self) -> None:
        """Looks again at once."""
        self._look_again_at = 0.0
        self._wake.set()

    def report(self, report: m.AgentReport) -> m.Message:
        """What an agent saw on its host becomes inputs. Returns the answer, which says what to look for next."""
        state, now = self._machine.state, self._clock()
        if reason := self.sights.refusal(report, state):
            return m.Refused(about="agent", reason=reason)
        for what in (*self.sights.take(report, state, now), *hosts.seen(report, state, self._machine.config)):
            with contextlib.suppress(IllegalMove, UnknownJob):
                self._take(what)
        if report.looks:
            self._conclude([job for job in self._jobs(JobState.DYING) if job.uid in self._looks])
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

    def _take_what_is_due(self) -> None:
        now = self._clock()
        for what in (*self.sights.due(self._machine.state, self._machine.config, now), *self._machine.due(now)):
            self._take(what)

    def _look_for_dead_drivers(self) -> None:
        for job in self._jobs(*RUNNING):
            self._look_for_dead_driver(job)

    def _look_for_dead_driver(self, job: Job) -> None:
        if job.state in RUNNING and members.is_here(job.driver) and not members.is_alive(job.driver):
            self._take(DriverDied(job=job.name, uid=job.uid))

    def _look_for_survivors(self) -> None:
        """Begins a look, if it is time for one: at once for a job that was not looked for since its death."""
        dying, silent = self._jobs(JobState.DYING), self._jobs(JobState.SILENT)
        uids, names = {job.uid for job in dying}, {job.name for job in (*dying, *silent)}
        self._looks = {uid: alive for uid, alive in self._looks.items() if uid in uids}
        self._ending &= uids
        self.waits_for = {name: words for name, words in self.waits_for.items() if name in names}
        if self._looking is not None and not self._looking.done():
            return
        if names and (not uids <= self._looks.keys() or self._clock() >= self._look_again_at):
            self._has_just_killed = False
            self._looking = asyncio.create_task(self._look(dying, silent))

    async def _look(self, dying: list[Job], silent: list[Job]) -> None:
        """Looks once for all of them, frees the nodes of the dying where nothing of them is left, and notes in words what is left
        elsewhere."""
        began = self._clock()
        try:
            found = await asyncio.to_thread(self._alive, _by_uid(dying), _by_uid(silent))
            self._looks |= {job.uid: found[job.uid] for job in dying}
            for at in range(0, len(dying), _JUDGED_TOGETHER):
                self._conclude(dying[at : at + _JUDGED_TOGETHER])
                await asyncio.sleep(0)
            state, config, sights = self._machine.state, self._machine.config, self._sights(found)
            self.waits_for |= {job.name: judge(job, sights, state, config, 0.0).waits_for for job in silent}
        except Exception as error:
            self._count("faults", "the look for survivors", error)
            found = {}
        now = self._clock()
        pause = _AFTER_A_KILL_S if self._has_just_killed else LOOK_EVERY_S if any(found.values()) else _NOTHING_HERE_S
        self._look_again_at = now + max(pause, _REST * (now - began))

    def _alive(self, dying: dict[str, list[Member]], silent: dict[str, list[Member]]) -> dict[str, list[Member]]:
        """The living processes, by uid. Of silent jobs the known ones alone, as reading the environment of each costs time."""
        found = {look.uid: look.alive for look in self._marked.look(dying)} if dying else {}
        return {uid: list(filter(members.is_alive, known)) for uid, known in silent.items()} | found

    def _sights(self, looks: dict[str, list[Member]]) -> list[Sight]:
        return [Sight("", self._names, members.SPACE, looks), *self.sights.on(self._machine.state)]

    def _conclude(self, jobs: Sequence[Job]) -> None:
        """What follows from all looks for jobs that were dying before they began."""
        state, config, sights = self._machine.state, self._machine.config, self._sights(self._looks)
        for job in jobs:
            if job.state is JobState.DYING and state.jobs.get(job.name) is job:
                self.waits_for[job.name] = self._conclude_one(job, judge(job, sights, state, config, self._clock()))

    def _conclude_one(self, job: Job, verdict: Verdict) -> list[str]:
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
        for member in self._looks.get(job.uid, ()) if verdict.end else ():
            if members.kill(member, job.uid) and member not in self._killed:
                log.warning("killed pid %d, which outlived job %r", member.pid, job.name)
                self._killed.add(member)
                self._has_just_killed = True
        return verdict.waits_for


def _by_uid(jobs: Sequence[Job]) -> dict[str, list[Member]]:
    """The processes on this host that are known of each job."""
    return {job.uid: [member for member in (job.driver, *job.members) if members.is_here(member)] for job in jobs}
