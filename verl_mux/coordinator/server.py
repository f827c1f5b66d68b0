"""The running coordinator: serves jobs, agents and operators around the state machine of core/.

Runs in the coordinator's process, in a thread of its own; made by commands.py, by benches and tests. Touches the socket,
the journal and the event log; process_watch.py, which it starts, looks at processes.

    Router, a frame  ->  _receive  ->  _answer  ----.
    ProcessWatch, 4 times a second  ----------------+-->  _take(input):  Machine.attempt decides, Delivery keeps the input
    Planning, an answer of the placer's thread  ----'                      |
    reload (SIGHUP), snapshot (status, /metrics):                          | when the journal is on disk
      from other threads, through _call                                    v
                                                     _carry_out(instruction):  Send -> Router,  Log -> event log

All of it runs in the one loop, but two things: the placer's search (a thread of Planning) and looks at /proc for dead jobs
(asyncio.to_thread). An error while one input is handled is counted, the input is taken back, and the loop goes on.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from verl_mux.coordinator import by_hand
from verl_mux.coordinator.bus import curve_keys, members
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.bus.curve_keys import AGENT, JOB, VIEWER
from verl_mux.coordinator.bus.link import Router
from verl_mux.coordinator.core import hosts, placing
from verl_mux.coordinator.core.placed_jobs import Standing
from verl_mux.coordinator.core.placing import Answerer, Asked, nothing_follows
from verl_mux.coordinator.core.records import HostRoom, Input, Instruction, JobExited, JobState, Log, Planned, PoolsChanged, What
from verl_mux.coordinator.core.settings import Config
from verl_mux.coordinator.core.snapshot import describe
from verl_mux.coordinator.core.state import NEVER_REGISTERED, IllegalMove, Machine, UnknownJob, is_refusal
from verl_mux.coordinator.journal import Delivery, Journal
from verl_mux.coordinator.process_watch import ProcessWatch
from verl_mux.errors import Failure, UserError
from verl_mux.platform.host_memory import room

log = logging.getLogger(__name__)

_LOG_EVERY_S = 60.0
# They are short, and what they give back must not wait.
_SMALL = (m.Heartbeat, m.LeaseCancel, m.LeaseRelease, m.Detach, m.Deregister, m.Failing)
_Found = TypeVar("_Found")


class Coordinator:
    """made -> `start()` -> serves in a thread of its own -> `stop()`. Also a context manager.

    Args:
        journal_path: None: a restart knows of leases only what jobs assert.
        event_log: has `log(event, duration_sec=None, extra=None, step=None)`.
        reread: reads the configuration file again, for `reload`.
    """

    def __init__(self, config: Config, journal_path: str | Path | None = None, bind: str = "tcp://127.0.0.1:0",
                 event_log: Any = None, key_directory: Path | None = None,
                 reread: Callable[[], Config] | None = None):  # fmt: skip
        """Raises UserError for `key_directory` None where other machines reach `bind`; else the user's own keys are used."""
        self._keys = curve_keys.for_bind(bind, key_directory)
        self.address: str | None = None
        self._bind, self._event_log, self._reread = bind, event_log, reread
        self._journal = Journal(journal_path)
        self._machine = self._journal.restore(config, uuid.uuid4().hex, is_first=bind.endswith((":0", ":*")))
        self._machine.secret = self._keys.secret
        self._clock = self._journal.clock
        self._machine.resume(self._clock.now())
        self._refusals, self._allowances = Refusals(), Allowances()
        self._watch = ProcessWatch(self._machine, self._take, self._clock.now, self._refusals.count)
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
        """Ends the service; jobs keep what they hold and wait for the next coordinator at this address."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()
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
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        self._delivery = Delivery(self._journal, self._machine, self._carry_out, self._loop.call_soon)
        self._planning = Planning(self._machine, self._take, self._clock.now, self._refusals)
        self._planning.look()
        self._take_own_room()
        self._router = Router(self._bind, self._keys, self._receive)
        self.address = self._router.address
        watching = asyncio.create_task(self._watch.run(self._delivery.flush))
        self._ready.set()
        await self._stopping.wait()
        watching.cancel()
        self._planning.close()
        self._delivery.flush()
        self._router.close()

    def _take_own_room(self) -> None:
        found, here = room(), f"{members.HOST}/{members.SPACE}"
        own = HostRoom(host=here, names=members.names_of_this_host(), bytes=found.total, source=found.source)
        if self._machine.state.rooms.get(here) != own:
            self._take(own)

    def _take(self, what: What | Input) -> None:
        """The heart: decide, keep in the journal, carry out."""
        taken = what if isinstance(what, Input) else Input(self._clock.now(), what)
        keep, out = self._machine.changes(taken), self._machine.attempt(taken)
        self._delivery.take(taken, out, keep and not is_refusal(out))
        self._planning.look()

    def _carry_out(self, instruction: Instruction) -> None:
        try:
            if isinstance(instruction, Log):
                if self._event_log is not None:
                    duration, extra, step = instruction.duration, instruction.extra, instruction.step
                    self._event_log.log(instruction.event, duration_sec=duration, extra=extra, step=step)
                return
            message = instruction.message
            if isinstance(message, m.LeaseGrant):
                message = msgspec.structs.replace(message, granted_at=self._clock.wall(message.granted_at))
            self._send(instruction.client.encode(), message)
        except Exception as error:  # of one instruction, not of those that follow it
            self._refusals.count("faults", type(instruction).__name__, error)

    # --- messages ---

    def _receive(self, identity: bytes, role: str, frame: bytes) -> None:
        """Nothing that comes in ends the service: what cannot be read or handled is answered, counted, and forgotten."""
        message = None
        try:
            message = m.decode(frame)
            if isinstance(message, m.FromJob) and (reason := self._beyond_its_share(message, len(frame))):
                self._refusals.count("beyond a job's share", reason)
                if isinstance(message, m.Register):
                    self._send(identity, m.Refused(about="register", reason=reason))
                return
            self._answer(identity, role, message)
        except m.Unreadable as error:
            self._refusals.count("frames refused", error)
            self._send(identity, m.Refused(about=error.about, reason=str(error)))
        except Exception as error:
            about = m.asks_about(message)
            self._refusals.count("faults", f"{about} of job {getattr(message, 'job', '')!r}", error)  # a client's name is secret
            reason, passes = "the coordinator failed at this message, and took it back", members.is_out_of_files(error)
            self._send(identity, m.Refused(about=about, reason=reason, retry=passes))

    def _answer(self, identity: bytes, role: str, message: m.AnyMessage) -> None:
        if refused := _refusal(identity, role, message):
            self._refusals.count(*refused)
            return self._send(identity, m.Refused(about=m.asks_about(message), reason=refused[1]))
        if isinstance(message, m.StatusRequest):
            return self._send(identity, m.Status(snapshot=self._describe()))
        if isinstance(message, m.JobOver):
            return self._send(identity, self._job_over(message))
        if isinstance(message, m.ByHand):
            return self._send(identity, self._by_hand(message))
        if isinstance(message, m.AgentReport):
            return self._send(identity, self._watch.report(message))
        if not isinstance(message, m.FromJob):
            return self._refusals.count("messages that are none for a coordinator", type(message).__name__)
        if isinstance(message, m.Register):
            self._watch.look_at_driver_before(message)
        try:
            self._take(message)
        except UnknownJob:
            self._send(identity, m.Unknown())
        except IllegalMove:
            self._send(identity, m.JobEnded(reason=self._machine.state.jobs[message.job].reason))

    def _beyond_its_share(self, message: m.FromJob, size: int) -> str | None:
        """Why a message of this many bytes is not taken, so that one job slows no other down by what it has kept; None: it is. A
        request that is not answered is sent again."""
        job, most = self._machine.state.jobs.get(message.job), m.RECORD_BYTES
        if isinstance(message, _SMALL):
            return None
        if job is not None and job.uid == message.uid and not self._allowances.take(job.name, size, self._clock.now()):
            return f"job {job.name!r} sends more than {m.BYTES_PER_S} bytes a second"
        if self._machine.size <= most or isinstance(message, m.LeaseRequest):
            return None
        if (held := len(msgspec.msgpack.encode(job)) + size) > most // max(len(self._machine.state.jobs), 1):
            all_jobs = f"the records of all jobs take {self._machine.size} bytes, of {most} at most"
            return f"{all_jobs}, and those of job {message.job!r}, {held}, are above its share"
        return None

    def _send(self, identity: bytes, message: m.Message) -> None:
        """Dropped if the client is not connected; it asks again."""
        self._router.send(identity, m.encode(message))

    def _by_hand(self, message: m.ByHand) -> m.Message:
        decided, answer = by_hand.decide(message, self._machine.state, self.config, self._watch.where_alive)
        for what in decided:
            log.warning("by hand: %s", what)
            self._take(what)
            self._watch.soon()
        return answer

    def _job_over(self, message: m.JobOver) -> m.JobEnded | m.Unknown:
        """The nodes of the job are granted again when no process of it is left."""
        job = self._machine.state.jobs.get(message.job)
        if job is not None and job.state is not JobState.ENDED and job.uid != message.uid:
            return m.Unknown()  # an earlier start's end, which does not concern this one
        self._take(JobExited(job=message.job))
        self._watch.soon()
        known = self._machine.state.jobs.get(message.job)
        return m.JobEnded(reason=known.reason if known is not None else NEVER_REGISTERED)

    # --- from other threads ---

    def _reload(self) -> str:
        if self._reread is None:
            raise UserError("this coordinator was not started from a file")
        after, state = self._reread(), self._machine.state
        refused = hosts.restart_needed(self.config, after) or hosts.change_refusal(state, self.config, after)
        if refused is not None:
            raise UserError(refused)
        self._take(PoolsChanged(pools=after.pools))
        return f"pools and their nodes: {after.describe_pools()}"

    def _describe(self) -> dict[str, Any]:
        now = self._clock.now()
        return {
            **{"address": self.address, "refused": dict(self._refusals.counts), "journal": self._journal.about()},
            **{"settling_s": self._machine.settles_for(now), "hosts": self._watch.sights.about(self._machine.state, now)},
            **describe(self._machine.state, self.config, now, self._watch.waits_for),
        }


class Planning:
    """Asks the placer: one question after the other, in a thread, while the loop goes on granting leases.

    `look` after every input. `take` gives the answer to the state machine, in the loop. `clock`: seconds, as of its inputs.
    """

    def __init__(self, machine: Machine, take: Callable[[Planned], None], clock: Callable[[], float], refusals: Refusals) -> None:
        self._machine, self._take, self._clock, self._refusals = machine, take, clock, refusals
        self._planner = Answerer()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="verl-mux-placer")
        self._asking: asyncio.Task | None = None

    def look(self) -> None:
        """Asks the next question, if there is one and none is being answered."""
        now = self._clock()
        if self._asking is None and (asked := placing.asked(self._machine.state, self._machine.config, now)) is not None:
            self._asking = asyncio.create_task(self._ask(asked, Standing(self._machine.state, now)))

    async def _ask(self, asked: Asked, standing: Standing) -> None:
        answering = asyncio.get_running_loop().run_in_executor(self._thread, self._planner.answer, asked, standing)
        await asyncio.wait([answering])
        self._asking = None
        try:
            self._take(answering.result())
        except Exception as error:  # of the planner, or of the machine, which has taken it back: the next question must not wait
            self._refusals.count("faults", f"placement: {type(asked.question).__name__}", error)
            self._planner = Answerer()  # the old one remembers an answer that had no effect
            self._take(nothing_follows(asked))

    def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)


class Allowances:
    """Bytes that each job may send now: BYTES_PER_S, and up to BYTES_AT_ONCE after a time without."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[float, float]] = {}  # by job: how many, as of when

    def take(self, job: str, size: int, now: float) -> bool:
        left, since = self._left.get(job, (m.BYTES_AT_ONCE, now))
        left = min(left + (now - since) * m.BYTES_PER_S, m.BYTES_AT_ONCE)
        if len(self._left) > m.JOBS:  # of jobs that are long gone
            self._left.clear()
        self._left[job] = left - size if size <= left else left, now
        return size <= left


class Refusals:
    """Counts what was refused and what went wrong, in `counts` by kind, and logs each kind at most once a minute.

    Kinds are the coordinator's words, never a sender's, so there are only a few.
    """

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self._logged: dict[str, float] = {}  # kind -> when

    def count(self, kind: str, detail: object, error: BaseException | None = None) -> None:
        """`error`: a fault of the coordinator, to be logged with its traceback; it is none where connections have taken all open
        files, which passes: those that show no key are closed first."""
        if members.is_out_of_files(error):
            kind, error = "all open files are taken", None
        self.counts[kind] += 1
        now = time.monotonic()
        if now - self._logged.get(kind, float("-inf")) >= _LOG_EVERY_S:
            self._logged[kind] = now
            log.warning("%s (%d of this kind by now): %.500s", kind, self.counts[kind], detail, exc_info=error)


def _refusal(identity: bytes, role: str, message: m.AnyMessage) -> tuple[str, str] | None:
    """Why the connection `identity`, made with the key of `role`, may not send the message: the kind that is counted, and the
    reason for the sender. None: it may.

    Every key may ask for the status, and a viewer's nothing else. A job's messages take the key of a job, an agent's that of an
    agent, all others that of an operator. Whether a client belongs to the job that it names, the state machine checks.
    """
    if isinstance(message, m.StatusRequest):
        return None
    name = str(type(message).__struct_config__.tag)
    if role == VIEWER or (isinstance(message, m.FromJob), isinstance(message, m.AgentReport)) != (role == JOB, role == AGENT):
        return f"not for a {role}", f"the key of a {role} was used, with which no client may send {name}"
    sender = getattr(message, "client", None) or getattr(message, "agent", None)
    if sender is not None and sender.encode() != identity:
        whose = "client" if isinstance(message, m.FromJob) else "agent"
        return "another's message", f"a {name} came by another connection than that of the {whose} it names"
    # A job whose driver is dead already would be ended at once, with all processes that it names.
    if isinstance(message, m.Register) and members.is_here(message.driver) and not members.is_alive(message.driver):
        where = f"pid {message.pid} of {message.host}"
        advice = "it has ended, or process ids are hidden there"
        return "no such process", f"job {message.job!r} registers as {where}, which does not run there; {advice}"
    return None
