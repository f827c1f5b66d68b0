"""A job's conversation with a coordinator that may be restarted at any moment.

Questions (a registration, a lease request, a release) stay open until they are answered and are repeated when the
coordinator shows that it does not know them; it answers a repeated one as it answered the first. When it has a new
epoch, it was restarted: the client registers again and asserts the leases it holds. Whoever waits for an answer
notices nothing of this but the time.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable

import msgspec

from verl_mux.coordinator import messages as m
from verl_mux.coordinator.link import Link
from verl_mux.coordinator.local import LeaseLost
from verl_mux.coordinator.members import this_process
from verl_mux.coordinator.messages import Member
from verl_mux.errors import UserError

log = logging.getLogger(__name__)

_GOODBYE_S = 2.0
_RETRY_S = 0.2
_SAY_EVERY_S = 60.0


class Conversation:
    """made -> `introduce` -> `ask`/`tell`... -> `close`; or JOB_ENDED, after which every call raises LeaseLost.

    `who`: the job, uid and client that every message carries. `registered`: the coordinator's answer, with the job's
    nodes spelt out; `queued` in its place as long as the job waits for nodes. `contended`: the job's nodes that another
    job waits for.
    """

    def __init__(self, address: str, job: str, uid: str):
        self.address = address
        self.who = {"job": job, "uid": uid, "client": f"{job}-{uuid.uuid4().hex[:12]}"}
        self.registered: m.Registered | None = None
        self.queued: m.Queued | None = None
        self.contended: list[str] = []
        self.members: list[Member] = []
        self._registration: dict = {}
        self._changed = threading.Condition()
        self._open: dict[str, m.FromJob] = {}  # key -> the question
        self._asked_at: dict[str, int] = {}  # key -> number of the last beat before it was asked
        self._answers: dict[str, m.Message] = {}
        self._held: dict[int, m.Claim] = {}
        self._lost: dict[int, str] = {}
        self._ended: str | None = None
        self._beats = 0
        self._heard_at = time.monotonic()
        self._link = Link(address, self.who["client"], self._receive, self._beat)
        self._link.start()

    def introduce(self, timeout: float, wait: bool = True, **registration) -> None:
        """Registers the job, with this process as its driver, and waits, however long it takes, for a job that is queued
        to be placed (`wait` False: does not). Raises UserError if refused, or unanswered in time.
        """
        driver = this_process()
        self._registration = {"host": driver.host, "pid": driver.pid, "started": driver.started, **registration}
        deadline = time.monotonic() + timeout
        while True:
            answer = self.ask("register", self._register_message(again=False), max(0.0, deadline - time.monotonic()))
            if isinstance(answer, m.Queued):
                log.info("%s", answer.reason)
                answer = self.ask("register", self._register_message(again=False)) if wait else None
                if not wait or isinstance(answer, m.Registered):
                    return
            if answer is None:
                advice = "start one with `verl-mux coordinator`, or give no address to run alone"
                raise UserError(f"no coordinator answers at {self.address} (waited {timeout:g} s): {advice}")
            if isinstance(answer, m.Registered):
                return
            if not answer.retry or time.monotonic() > deadline:
                raise UserError(answer.reason)
            time.sleep(_RETRY_S)  # what holds the name is about to end

    def ask(self, key: str, question: m.FromJob, timeout: float | None = None) -> m.Message | None:
        """Waits for the answer to `key`; None after `timeout` seconds: the question stays open and is repeated."""
        with self._changed:
            self.check()
            self._open[key], self._asked_at[key] = question, self._beats
            self._link.send(question)
            self._wait_for_answer(key, question, timeout)
            if key not in self._answers:
                self.check()
            return self._answers.pop(key, None)

    def _wait_for_answer(self, key: str, question: m.FromJob, timeout: float | None) -> None:
        """A wait without end says now and then what it waits for, or that nobody is there."""

        def over() -> bool:
            return key in self._answers or self._ended is not None

        if timeout is not None:
            self._changed.wait_for(over, timeout)
            return
        since = time.monotonic()
        while not self._changed.wait_for(over, _SAY_EVERY_S):
            now = time.monotonic()
            log.info("job %r has waited %.0f s for %s", self.who["job"], now - since, _in_words(question))
            if now - self._heard_at > _SAY_EVERY_S:
                log.warning("coordinator %s has not been heard for %.0f s", self.address, now - self._heard_at)

    def cancel(self, key: str) -> None:
        """Nobody waits for this lease any more, even if it was granted in this moment."""
        with self._changed:
            self._forget(key)
            grant = self._answers.pop(key, None)
            if isinstance(grant, m.LeaseGrant):
                self._held.pop(grant.token, None)
            self.tell(m.LeaseCancel(**self.who, key=key))

    def tell(self, message: m.FromJob) -> None:
        self._link.send(message)

    def check(self) -> None:
        """Raises LeaseLost once the coordinator has ended the job, or `close` was called."""
        if self._ended is not None:
            raise LeaseLost(f"job {self.who['job']!r} has no leases any more: {self._ended}")

    def token_of(self, phase: str) -> int | None:
        """The lease held for this phase. Raises LeaseLost if one was lost and nobody has been told."""
        with self._changed:
            self.check()
            if self._lost:
                raise LeaseLost(next(iter(self._lost.values())))
            return next((claim.token for claim in list(self._held.values()) if claim.phase == phase), None)

    def let_go(self, token: int) -> bool:
        """False if the lease was let go before. Raises LeaseLost, once, if it was lost."""
        with self._changed:
            if token in self._lost:
                raise LeaseLost(self._lost.pop(token))
            return self._held.pop(token, None) is not None

    def shrink(self, token: int, nodes: list[str]) -> None:
        """From now on the lease is asserted for these nodes only. Raises LeaseLost if it was lost."""
        with self._changed:
            if token in self._lost:
                raise LeaseLost(self._lost.pop(token))
            self._held[token] = msgspec.structs.replace(self._held[token], nodes=nodes)

    def close(self) -> None:
        with self._changed:
            if self._ended is None:
                first = self.registered is not None and self.registered.first
                self._held.clear()
                self.tell(m.Deregister(**self.who) if first else m.Detach(**self.who))
                if first:
                    self._changed.wait_for(lambda: self._ended is not None, _GOODBYE_S)
                self._ended = self._ended or "closed"
                self._changed.notify_all()
        self._link.close()

    def fail(self, reason: str) -> None:
        """Leaves without giving anything back: the memory of what failed may still be on the nodes."""
        with self._changed:
            if self._ended is None:
                self.tell(m.Failing(**self.who, reason=reason))
                self._ended = "it failed"
                self._changed.notify_all()
        self._link.close()

    def abandon(self) -> None:
        """For a job that was not let in, as far as it knows."""
        self._ended = "never registered"
        self.tell(m.Detach(**self.who))
        self._link.close()

    def _register_message(self, again: bool) -> m.Register:
        held = list(self._held.values())
        # Where the coordinator had placed it, in case that is forgotten there.
        placed = self.registered.nodes if again and self.registered is not None else {}
        return m.Register(**self.who, **self._registration, members=self.members, held=held, again=again, placed=placed)

    # --- called in the link's thread ---

    def _beat(self) -> m.Message | None:
        with self._changed:
            if self.registered is None and self.queued is None:
                return None
            self._beats += 1
            return m.Heartbeat(**self.who, beat=self._beats, tokens=list(self._held))

    def _receive(self, message: m.Message) -> None:
        with self._changed:
            self._heard_at = time.monotonic()
            if receiver := _RECEIVERS.get(type(message)):
                receiver(self, message)
            self._changed.notify_all()

    def _answer(self, key: str, message: m.Message) -> bool:
        """False if nobody waits for it."""
        if key in self._open:
            self._forget(key)
            self._answers[key] = message
            return True
        return False

    def _forget(self, key: str) -> None:
        self._open.pop(key, None)
        self._asked_at.pop(key, None)

    def _on_registered(self, message: m.Registered) -> None:
        again = self.registered is not None
        self.registered, self.queued = message, None
        self._answer("register", message)
        if again:
            for question in self._open.values():
                self.tell(question)

    def _on_queued(self, message: m.Queued) -> None:
        """The first such answer is one to the registration; from then on, `Registered` is."""
        if self.queued is None:
            self._answer("register", message)
        self.queued = message

    def _on_refused(self, message: m.Refused) -> None:
        if message.about != "register" or self.registered is None:
            self._answer(message.about, message)
        elif not message.retry:
            self._on_ended(m.JobEnded(reason=message.reason))

    def _on_grant(self, message: m.LeaseGrant) -> None:
        if message.token in self._held:
            return
        if self._answer(message.key, message):
            self._held[message.token] = m.Claim(**{name: getattr(message, name) for name in m.Claim.__struct_fields__})
        else:
            self.tell(m.LeaseRelease(**self.who, token=message.token))

    def _on_released(self, message: m.LeaseReleased) -> None:
        self._answer(release_key(message.token), message)

    def _on_lost(self, message: m.LeaseLost) -> None:
        if not self._answer(release_key(message.token), message) and self._held.pop(message.token, None):
            self._lost[message.token] = message.reason
            log.error("lease lost: %s", message.reason)

    def _on_ack(self, message: m.HeartbeatAck) -> None:
        if message.epoch != (self.registered or self.queued).epoch:
            self.tell(self._register_message(again=True))
            return
        for key, question in self._open.items():
            # Asked before that beat and yet not known there: lost on the way.
            known = key in message.queued or (key == "register" and self.queued is not None)
            if not known and self._asked_at[key] < message.beat:
                self.tell(question)

    def _on_contended(self, message: m.Contended) -> None:
        self.contended = message.nodes

    def _on_unknown(self, message: m.Unknown) -> None:
        self.tell(self._register_message(again=True))

    def _on_ended(self, message: m.JobEnded) -> None:
        self._lost |= dict.fromkeys(self._held, f"job {self.who['job']!r} has no leases any more: {message.reason}")
        self._held.clear()
        self._ended = self._ended or message.reason


_RECEIVERS: dict[type, Callable[[Conversation, m.Message], None]] = {
    m.Registered: Conversation._on_registered,
    m.Queued: Conversation._on_queued,
    m.Refused: Conversation._on_refused,
    m.LeaseGrant: Conversation._on_grant,
    m.LeaseReleased: Conversation._on_released,
    m.LeaseLost: Conversation._on_lost,
    m.HeartbeatAck: Conversation._on_ack,
    m.Contended: Conversation._on_contended,
    m.Unknown: Conversation._on_unknown,
    m.JobEnded: Conversation._on_ended,
}


def _in_words(question: m.FromJob) -> str:
    if isinstance(question, m.LeaseRequest):
        return f"{question.phase} (step {question.step}) on {', '.join(question.nodes)}"
    return f"an answer to {type(question).__name__}"


def release_key(token: int) -> str:
    return f"release {token}"
