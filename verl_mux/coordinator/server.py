"""The running coordinator: a ROUTER socket and a watch over processes, around the state machine.

Thin on purpose: a frame or an observation becomes an event, the machine decides, the journal remembers, and then the
instructions are carried out. It may run in a thread of any process: `start()` gives the address, `stop()` ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from verl_mux.coordinator import members
from verl_mux.coordinator import messages as m
from verl_mux.coordinator.config import Config
from verl_mux.coordinator.events import FROM_JOB, DriverDied, Event, JobExited, Log, ProcessesGone
from verl_mux.coordinator.journal import Journal
from verl_mux.coordinator.reaping import judge
from verl_mux.coordinator.records import Job, JobState
from verl_mux.coordinator.snapshot import describe
from verl_mux.coordinator.state import IllegalMove, UnknownJob
from verl_mux.errors import Failure, UserError

log = logging.getLogger(__name__)

WATCH_EVERY_S = 0.5
REAP_EVERY_S = 0.25


class Coordinator:
    """made -> `start()` -> serves in a thread of its own -> `stop()`. Also a context manager.

    `event_log`: anything with `log(event, duration_sec=None, extra=None, step=None)`.
    `journal_path` None: leases survive no restart, except that jobs assert theirs again.
    """

    def __init__(self, config: Config, journal_path: str | Path | None = None, bind: str = "tcp://127.0.0.1:0",
                 event_log: Any = None):  # fmt: skip
        self.config = config
        self.address: str | None = None
        self._bind, self._event_log = bind, event_log
        self._journal = Journal(journal_path)
        self._machine = self._journal.restore(config, epoch=uuid.uuid4().hex)
        self._machine.resume(time.time())
        self._waits_for: dict[str, list[str]] = {}
        self._killed: set[m.Member] = set()  # said once, done until it is gone
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._failure: BaseException | None = None

    def start(self) -> str:
        """Returns the address with the real port. Raises UserError when the address cannot be bound."""
        self._thread = threading.Thread(target=self._main, name="verl-mux-coordinator", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            self._journal.close()
            raise self._failure
        return self.address

    def wait(self, enough: threading.Event) -> None:
        """Blocks until `enough` is set. Raises Failure if the service ends by itself."""
        while not enough.wait(timeout=1.0):
            if not self._thread.is_alive():
                raise Failure(f"the coordinator stopped: {self._failure}")

    def stop(self) -> None:
        """Ends the service; jobs keep what they hold and wait for the next one at this address."""
        if self._thread is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()
        self._journal.close()

    def __enter__(self) -> Coordinator:
        self.start()
        return self

    def __exit__(self, *error) -> None:
        self.stop()

    def snapshot(self) -> dict[str, Any]:
        """Everything that `verl-mux status` shows, as plain data."""
        return self._call(self._describe)

    def job_exited(self, name: str) -> None:
        """For whoever started the job: it is over. Its nodes are given on when no process of it is left.

        After `kill_grace` seconds those that are left are killed, unless the configuration says `kill: false`.
        """
        self._call(lambda: (self._take(JobExited(job=name)), self._told.set()))

    def _call(self, function) -> Any:
        """Runs in the loop's thread, where the machine lives."""

        async def wrapped():
            return function()

        if self._thread is None or not self._thread.is_alive():
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
        with zmq.asyncio.Context() as context:
            self._router = context.socket(zmq.ROUTER)
            self._router.linger = 500
            self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a client that reconnects takes its name over
            try:
                self._router.bind(self._bind)
            except zmq.ZMQError as error:
                self._router.close()
                raise UserError(f"cannot bind {self._bind!r}: {error}; expected a free tcp://HOST:PORT") from error
            self.address = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
            tasks = [asyncio.create_task(work()) for work in (self._receive, self._watch)]
            self._ready.set()
            stopping = asyncio.create_task(self._stopping.wait())
            done, _ = await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            self._router.close()
            for task in done - {stopping}:
                task.result()

    async def _receive(self) -> None:
        while True:
            identity, frame = (await self._router.recv_multipart())[:2]
            try:
                self._answer(identity, m.decode(frame))
            except m.WrongVersion as error:
                self._send(identity, m.Refused(about="register", reason=str(error)))

    def _answer(self, identity: bytes, message: m.Message) -> None:
        if isinstance(message, m.StatusRequest):
            return self._send(identity, m.Status(snapshot=self._describe()))
        if not isinstance(message, FROM_JOB):
            return log.warning("a %s came to the coordinator, which takes none", type(message).__name__)
        if isinstance(message, m.Register):
            self._look_for_dead_drivers()  # a name is free again as soon as its process is gone
        try:
            self._take(message)
        except UnknownJob:
            self._send(identity, m.Unknown())
        except IllegalMove:
            self._send(identity, m.JobEnded(reason=self._machine.state.jobs[message.job].reason))

    def _take(self, what) -> None:
        """The heart: decide, remember, carry out."""
        event = what if isinstance(what, Event) else Event(time.time(), what)
        keep = self._machine.changes(event)
        instructions = self._machine.handle(event)
        if keep:
            self._journal.append(event, self._machine)
        for instruction in instructions:
            if isinstance(instruction, Log):
                self._record(instruction)
            else:
                self._send(instruction.client.encode(), instruction.message)

    def _send(self, identity: bytes, message: m.Message) -> None:
        """Goes out at once, or is queued by ZeroMQ; dropped if the client is not there, who then asks again."""
        self._router.send_multipart([identity, m.encode(message)])

    def _record(self, line: Log) -> None:
        if self._event_log is not None:
            self._event_log.log(line.event, duration_sec=line.duration, extra=line.extra, step=line.step)

    def _describe(self) -> dict[str, Any]:
        found = describe(self._machine.state, self.config, time.time(), self._waits_for)
        return {"address": self.address, **found}

    # --- the watch over processes ---

    async def _watch(self) -> None:
        while True:
            self._look_for_dead_drivers()
            for event in self._machine.due(time.time()):
                self._take(event)
            unwell = [job for job in self._jobs() if job.state in (JobState.SILENT, JobState.DYING)]
            self._waits_for = {job.name: await self._reap(job) for job in unwell}
            dying = any(job.state is JobState.DYING for job in self._jobs())
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._told.wait(), REAP_EVERY_S if dying else WATCH_EVERY_S)
            self._told.clear()

    def _jobs(self) -> list[Job]:
        return list(self._machine.state.jobs.values())

    def _look_for_dead_drivers(self) -> None:
        for job in self._jobs():
            alive = job.state in (JobState.LIVE, JobState.SILENT)
            if alive and members.is_here(job.driver) and not members.is_alive(job.driver):
                self._take(DriverDied(job=job.name, uid=job.uid))

    async def _reap(self, job: Job) -> list[str]:
        """Frees the nodes of a dead job once nothing of it is left; until then says in words what is."""
        uid = job.uid if job.state is JobState.DYING else None  # reading every environment is dear
        known = [job.driver, *job.members]
        # Looked for twice: what a dying process starts while the first look goes on may be missed by it.
        alive = await asyncio.to_thread(lambda: members.survivors(uid, known) or members.survivors(uid, known))
        verdict = judge(job, alive, members.HOST, self.config, time.time())
        if verdict.gone and job.state is JobState.DYING:
            self._take(ProcessesGone(job=job.name, uid=job.uid))
        for member in verdict.kill:
            if member not in self._killed:
                log.warning("killing pid %d, which outlived job %r", member.pid, job.name)
                self._killed.add(member)
            members.kill(member)
        return verdict.waits_for
