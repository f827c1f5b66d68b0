"""A coordinator's process in the made world: the real state machine behind the real delivery, a made disk, crashes at any point.

Points at which it may end: before an input is decided, before and after it is on disk, and before each message that it sends.
Made by schedules.py; pure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from bench.protocol_model.world import World
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core.leases import LAST_TOKEN, token_at, tokens_before
from verl_mux.coordinator.core.queueing import RunningTime
from verl_mux.coordinator.core.reaping import Sight, judge
from verl_mux.coordinator.core.records import (
    DriverDied,
    Input,
    Instruction,
    Job,
    JobEvicted,
    JobState,
    ProcessesGone,
    Send,
    State,
    What,
)
from verl_mux.coordinator.core.settings import Config
from verl_mux.coordinator.core.state import IllegalMove, Machine, UnknownJob
from verl_mux.coordinator.journal import Delivery

HOST = "here"
_LOOK_EVERY_S = 0.5
_input = msgspec.msgpack.Decoder(Input)
_state = msgspec.msgpack.Decoder(State)


class Crashed(Exception):
    pass


class DieAt(NamedTuple):
    """At the `nth` message of this type: when it is `received`, when it is `written`, or when its first answer is `sent`."""

    kind: type[m.FromJob]
    point: str
    nth: int


class Disk:
    """What a journal does for the delivery; `snapshot` and `inputs` outlive the process. `skipped`: a planted fault."""

    blocked: str | None = None

    def __init__(self, point: Callable[[str], None], skipped: bool) -> None:
        self.snapshot = msgspec.msgpack.encode(State())
        self.inputs: list[bytes] = []
        self.pending: list[Input] = []
        self._point, self._skipped = point, skipped

    def append(self, given: Input) -> None:
        self.pending.append(given)

    def commit(self, machine: Machine) -> bool:
        self._point("")
        if not self._skipped:
            self.inputs += [msgspec.msgpack.encode(given) for given in self.pending]
        self.pending = []
        self._point("written")
        return True


class CoordinatorProcess:
    """`remembers`: it keeps a journal; without, each start knows nothing and settles."""

    def __init__(self, world: World, config: Config, remembers: bool, planted: str = "", die_at: DieAt | None = None) -> None:
        self._die_at, self._left = die_at, die_at.nth if die_at else 0
        self._world, self._config, self.remembers, self._planted = world, config, remembers, planted
        self._disk = Disk(self._point, skipped=planted == "journal skipped")
        self._starts = 0
        self._fuse: int | None = None
        self._paused_until = 0.0
        self._waiting: list[Callable[[], None]] = []  # what came during a pause
        self.is_up = False
        self.ran = 0.0  # seconds for which it was up and not paused
        self._ran_from = 0.0
        self.jobs: dict[str, Any] = {}  # JobProcess, whose module imports this one
        self._clients: dict[str, Callable[[m.Message], None]] = {}
        self.machine: Machine
        self.start()

    # --- its life ---

    def start(self) -> None:
        self._starts += 1
        self._fuse = None
        now = self._world.now
        self.machine = Machine(self._config, f"e{self._starts}")
        if self.remembers:
            self._restore()
        elif self._starts > 1 and self._planted != "journal skipped":
            self.machine.settle(LAST_TOKEN)
            self.machine.state.token = token_at(self._world.wall())
        self._disk.pending = []
        self._delivery = Delivery(self._disk, self.machine, self._carry_out, self._soon)  # type: ignore[arg-type]
        self.machine.resume(now)
        self.is_up, self._paused_until, self._ran_from = True, 0.0, now
        number = self._starts
        self._world.later(_LOOK_EVERY_S, lambda: self._look(number))

    def _restore(self) -> None:
        """As journal.py does."""
        self.machine = Machine(self._config, self.machine.epoch, _state.decode(self._disk.snapshot))
        for body in self._disk.inputs:
            self.machine.handle(_input.decode(body))
        state = self.machine.state
        state.token = max(state.token, tokens_before(self._starts))
        if state.settle_until is not None:
            self.machine.settle(state.unknown_up_to)
        self._disk.snapshot, self._disk.inputs = msgspec.msgpack.encode(state), []

    def crash(self) -> None:
        if not self.is_up:
            return
        self._world.fault("coordinator killed")
        self.ran = self.running_time()
        self.is_up, self._waiting = False, []
        self._world.later(self._world.rng.choice([0.2, 2.0, 8.0, 30.0]) * self._world.rng.random(), self.start)

    def crash_soon(self) -> None:
        """At one of the next points."""
        self._fuse = self._world.rng.randrange(12)

    def pause(self, seconds: float) -> None:
        if self.is_up and self._world.now >= self._paused_until:
            self._world.fault("coordinator paused")
            if seconds > RunningTime.PAUSE_S:
                self.ran, self._ran_from = self.running_time(), self._world.now + seconds
            self._paused_until = self._world.now + seconds
            self._world.later(seconds, self._catch_up)

    def _catch_up(self) -> None:
        waiting, self._waiting = self._waiting, []
        for action in waiting:
            self._do(action)

    def running_time(self) -> float:
        return self.ran + max(0.0, self._world.now - self._ran_from) * self.is_up

    def _point(self, name: str) -> None:
        if self._die_at is not None and self._left <= 0 and self._die_at.point == name:
            self._die_at = None
            raise Crashed
        if self._fuse is not None and name != "sent":  # what comes after it is a point of its own
            self._fuse -= 1
            if self._fuse < 0:
                raise Crashed

    def _do(self, action: Callable[[], None]) -> None:
        if not self.is_up:
            return
        if self._world.now < self._paused_until:
            self._waiting.append(action)
            return
        try:
            action()
        except Crashed:
            self.crash()

    def _soon(self, action: Callable[[], None]) -> None:
        number = self._starts
        self._world.later(self._world.rng.choice([0.0, 0.001]), lambda: self._do(action) if number == self._starts else None)

    # --- messages ---

    def receive(self, message: m.FromJob, reply: Callable[[m.Message], None], heard: Callable[[], None]) -> None:
        """`heard`: called unless the sender is unknown. A job that was forgotten is heard when it registers: what it said
        before the connection broke may come late, while its answer, UNKNOWN, is lost."""

        def take() -> None:
            self._clients[message.client] = reply
            if self._knows(message):
                heard()
            try:
                self._take(message)  # type: ignore[arg-type]
            except UnknownJob:
                reply(m.Unknown())
            except IllegalMove:
                reply(m.JobEnded(reason=self.machine.state.jobs[message.job].reason))

        self._do(take)

    def _knows(self, message: m.FromJob) -> bool:
        return isinstance(message, m.Register) or message.job in self.machine.state.jobs

    def _take(self, what: What | Input) -> None:
        given = what if isinstance(what, Input) else Input(self._world.now, what)
        if self._die_at is not None and isinstance(given.what, self._die_at.kind):
            self._left -= 1
        self._point("received")
        keep = self.machine.changes(given)
        self._delivery.take(given, self.machine.handle(given), keep)

    def _carry_out(self, instruction: Instruction) -> None:
        if not isinstance(instruction, Send):
            return
        self._point("")
        message = instruction.message
        if isinstance(message, m.LeaseGrant):
            self._world.granted(message.token, message.key)
        if reply := self._clients.get(instruction.client):
            reply(message)
        self._point("sent")

    # --- processes ---

    def _look(self, number: int) -> None:
        if number == self._starts and self.is_up:
            self._do(self._look_around)
            self._world.later(_LOOK_EVERY_S, lambda: self._look(number))

    def _look_around(self) -> None:
        for job in list(self.machine.state.jobs.values()):
            alive = job.state in (JobState.LIVE, JobState.SILENT)
            if alive and job.host == HOST and not self.jobs[job.uid].driver_lives:
                self._take(DriverDied(job=job.name, uid=job.uid))
        for given in self.machine.due(self._world.now):
            self._take(given)
        self._delivery.flush()
        for job in list(self.machine.state.jobs.values()):
            if job.state is JobState.DYING:
                self._reap(job)

    def _reap(self, job: Job) -> None:
        process = self.jobs[job.uid]
        alive = process.members() if job.host == HOST else []
        own = Sight("", [HOST], "", {job.uid: alive})
        verdict = judge(job, [own], self.machine.state, self._config, self._world.now)
        everything_ended = job.host != HOST and not process.members()
        released = everything_ended and self._world.rng.random() < 0.05  # by an operator who looked at the host
        if verdict.gone or released or self._planted == "early grant":
            self._take(ProcessesGone(job=job.name, uid=job.uid))
        for member in alive if verdict.end else []:
            self._world.later(0.02, lambda pid=member.pid: process.end_process(pid))  # type: ignore[misc]

    def evict(self, job: Any) -> None:
        def take() -> None:
            known = self.machine.state.jobs.get(job.name)
            if known is not None and known.state in (JobState.LIVE, JobState.SILENT):
                self._world.fault("evicted")
                self.jobs[known.uid].evicted = True
                self._take(JobEvicted(job=job.name, uid=known.uid, reason="evicted"))

        self._do(take)
