"""A job's side of the control bus: the calls of LocalMux through a coordinator.

A Mux speaks with a coordinator that may be restarted at any moment; what is said then is decided in `conversation.py`.
Whoever waits for an answer notices nothing of it but the time.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.bus.access.keys import ClientKeys
from verl_mux.coordinator.bus.conversation import REGISTER, Conversation, Who
from verl_mux.coordinator.bus.link import Link
from verl_mux.coordinator.bus.local import Lease, LeaseLost, LocalMux
from verl_mux.coordinator.bus.members import this_process
from verl_mux.errors import UserError

log = logging.getLogger(__name__)

_PROGRESS_INTERVAL_S = 0.05
_GOODBYE_S = 2.0
_RETRY_S = 0.2
_SAY_EVERY_S = 60.0
_TICK_S = 0.25


class Mux(LocalMux):
    """A job registered with the coordinator at `address`. What the calls mean is said in LocalMux.

    made -> registered (or queued, with `wait` False) -> calls from any thread -> `close` or `fail`; or the coordinator ends
    the job (JOB_ENDED). After each of these every call that needs an answer raises LeaseLost. `_changed` guards the
    conversation, which the link's thread and the callers share.
    """

    def __init__(
        self, address: str, job: str, nodes: dict[str, list[str]], *, uid: str, timeout: float, wait: bool,
        keys: ClientKeys | None, filler: bool = False, **about: Any,
    ):  # fmt: skip
        """`about`: the other fields of Register.

        Raises UserError: refused, or nobody answers within `timeout` seconds. A job that is queued to be placed waits however
        long that takes; with `wait` False it does not, and `nodes` is empty.
        """
        super().__init__(job, nodes, filler)
        self.address, self.uid = address, uid
        who: Who = {"job": job, "uid": uid, "client": f"{job}-{uuid.uuid4().hex}"}
        self._talk = Conversation(who, {**msgspec.structs.asdict(this_process()), "nodes": nodes, "filler": filler, **about})
        self._timeout = timeout
        self._changed = threading.Condition()
        self._wanted: dict[int, threading.Event] = {}  # by token, of what is held
        self._heard_at = time.monotonic()
        self._progress_sent = 0.0
        self._link = Link(address, who["client"], self._receive, self._tick, _TICK_S, keys)
        self._link.start()
        try:
            self._register(timeout, wait)
        except BaseException:  # not let in, as far as it knows
            with self._talking() as talk:
                talk.leave()
                talk.end("never registered")
            self._link.close()
            raise
        welcome = self._talk.registered
        self.nodes, self._places = (welcome.nodes, welcome.places) if welcome is not None else ({}, {})

    def acquire(self, phase: str, step: int = 0, nodes: list[str] | None = None, num_nodes: int = 1, least: float = 0.0) -> Lease:
        step, nodes = int(step), self._nodes_for(phase, step, nodes)
        of_a_filler = {"num_nodes": num_nodes, "least": float(least)} if self.filler else {}
        key, asked = uuid.uuid4().hex, time.perf_counter()
        try:
            with self._talking() as talk:
                self._raise_if_ended()
                talk.request(key, phase, step, nodes, **of_a_filler)
            answer = self._answer_to(key, f"{phase} (step {step}) on {', '.join(nodes)}")
            if isinstance(answer, m.Refused):
                raise UserError(answer.reason)
            assert isinstance(answer, m.LeaseGrant)
            self.wait_until_usable()  # a grant may have been long on its way
            with self._changed:
                wanted = self._wanted.setdefault(answer.token, threading.Event())
                self._tell_wanted()
            waited = time.perf_counter() - asked
            return Lease(answer.token, answer.nodes, answer.phase, answer.step, waited, answer.granted_at, wanted)
        except BaseException:  # nobody will ever release it: also when it has been granted meanwhile
            with self._talking() as talk:
                talk.cancel(key)
            raise

    def release(self, lease: Lease) -> None:
        with self._talking() as talk:
            self._raise_if_lost(lease.token)
            if lease.token not in talk.held:
                return
            self._raise_if_ended()
            self._wanted.pop(lease.token, None)
            key = talk.release(lease.token)
        answer = self._answer_to(key, "an answer to a release", self._timeout)
        if isinstance(answer, m.LeaseLost):
            raise LeaseLost(answer.reason)
        if answer is None:
            log.warning("coordinator %s does not answer; the release of %s will be repeated", self.address, lease)

    def shrink(self, lease: Lease, nodes: list[str]) -> Lease:
        smaller = super().shrink(lease, nodes)
        with self._talking() as talk:
            self._raise_if_lost(lease.token)
            talk.shrink(lease.token, list(nodes))
        return smaller

    def progress(self, done: int, total: int) -> None:
        done, total = int(done), int(total)  # often numpy's, which do not travel
        token = self._rollout_token()
        now = time.monotonic()
        # At most 20 a second travel, so that it may be called for every sample; the last one always does.
        if done >= total or now - self._progress_sent >= _PROGRESS_INTERVAL_S:
            self._progress_sent = now
            self._tell(m.Progress, done=done, total=total, token=token)

    def report_step(self, step: int, metrics: dict[str, float], steps: int | None = None) -> None:
        values = {name: float(value) for name, value in metrics.items()}
        self._tell(m.StepReport, step=int(step), metrics=values, steps=None if steps is None else int(steps))

    def memory(self, node: str, tags: dict[str, int]) -> None:
        self._tell(m.MemoryReport, node=node, tags={tag: int(num_bytes) for tag, num_bytes in tags.items()})

    def host_memory(self, node: str, kinds: dict[str, int]) -> None:
        self._tell(m.HostReport, node=node, bytes=kinds)

    def note(self, note: str) -> None:
        self._tell(m.PhaseNote, note=note)

    def guard(self, fenced: Callable[[], None]) -> None:
        threading.Thread(target=self._watch_fence, args=(fenced,), name="verl-mux-fence", daemon=True).start()

    def _watch_fence(self, fenced: Callable[[], None]) -> None:
        told = False
        while True:
            with self._changed:
                if not self._is_fenced():
                    told = False
                self._changed.wait_for(lambda: self._talk.ended is not None or self._is_fenced())
                if self._talk.ended is not None:
                    return
            if not told:
                log.warning("coordinator %s does not answer: job %r stops using its nodes until it does", self.address, self.job)
            told = True
            fenced()
            with self._changed:
                self._changed.wait_for(lambda: self._talk.ended is not None or not self._is_fenced(), _TICK_S)

    def _is_fenced(self) -> bool:
        talk = self._talk
        return talk.ended is None and bool(talk.held) and not talk.may_use(time.monotonic())

    def wait_until_usable(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_fenced())
            self._raise_if_ended()
            for token in list(self._talk.lost):
                self._raise_if_lost(token)

    def members(self, members: Iterable[m.Member]) -> None:
        with self._talking() as talk:
            talk.members = list(members)
            talk.tell(m.MemberReport, members=talk.members)

    def contended(self, phase: str) -> list[str]:
        contended = self._talk.contended
        return [node for node in contended if node in self.nodes.get(phase, contended)]

    def gangs(self, phase: str) -> list[list[str]]:
        mine = self.nodes.get(phase)
        return [gang for gang in self._talk.gangs if mine is None or set(gang).issubset(mine)]

    @property
    def filler_grace(self) -> float | None:
        registered = self._talk.registered
        return registered.filler_grace if registered is not None else None

    @property
    def lease_timeout(self) -> float | None:
        registered = self._talk.registered
        return registered.lease_timeout if registered is not None else None

    @property
    def move(self) -> int:
        return self._talk.move

    def leave_to_move(self, move: int, step: int, saving_s: float) -> None:
        to_move = {"moving": move, "step": int(step), "saving_s": float(saving_s)}
        self._leave(lambda talk: talk.leave("it comes back: it was asked to leave its nodes", **to_move), "left to move")

    def fail(self, reason: str) -> None:
        self._leave(lambda talk: talk.fail(reason), "it failed")

    def close(self, reason: str = "") -> None:
        self._leave(lambda talk: talk.leave(reason), "closed")

    def _leave(self, say: Callable[[Conversation], None], reason: str) -> None:
        """Says goodbye, and waits a moment to hear that it was understood."""
        with self._changed:
            if self._talk.ended is None:
                with self._talking() as talk:
                    say(talk)
                self._changed.wait_for(lambda: self._talk.ended is not None, _GOODBYE_S)
                self._talk.end(reason)
                self._changed.notify_all()
        self._link.close()

    # --- questions ---

    @contextlib.contextmanager
    def _talking(self) -> Iterator[Conversation]:
        """The conversation, for one caller at a time; what it has to say then is sent."""
        with self._changed:
            yield self._talk
            for message in self._talk.outgoing():
                self._link.send(message)

    def _register(self, timeout: float, wait: bool) -> None:
        deadline, refused = time.monotonic() + timeout, None
        while True:
            with self._talking() as talk:
                talk.register(time.monotonic())
            answer = self._answer_to(REGISTER, "the coordinator", max(0.0, deadline - time.monotonic()))
            if isinstance(answer, m.Queued):
                log.info("%s", answer.reason)
                if not wait:
                    return
                with self._talking() as talk:
                    talk.register(time.monotonic())
                answer = self._answer_to(REGISTER, "nodes")
            if isinstance(answer, m.Registered):
                return
            if answer is None and refused is not None:  # it was there, and perhaps had no time for an answer to the last try
                raise UserError(refused.reason)
            if answer is None:
                advice = "start one with `verl-mux coordinator`, or give no address to run alone"
                raise UserError(f"no coordinator answers at {self.address} (waited {timeout:g} s): {advice}")
            assert isinstance(answer, m.Refused)
            if not answer.retry or time.monotonic() > deadline:
                raise UserError(answer.reason)
            refused = answer
            time.sleep(_RETRY_S)  # what holds the name is about to end

    def _answer_to(self, key: str, what: str, timeout: float | None = None) -> m.Message | None:
        """Waits for it; None after `timeout` seconds: the question stays open and is repeated. `what`: in words."""
        with self._changed:
            self._wait_until_over(key, what, timeout)
            if (answer := self._talk.take_answer(key)) is None:
                self._raise_if_ended()
            return answer

    def _wait_until_over(self, key: str, what: str, timeout: float | None) -> None:
        """A wait without end says now and then what it waits for, or that nobody is there."""

        def over() -> bool:
            return self._talk.is_over(key)

        if timeout is not None:
            self._changed.wait_for(over, timeout)
            return
        since = time.monotonic()
        while not self._changed.wait_for(over, _SAY_EVERY_S):
            now = time.monotonic()
            log.info("job %r has waited %.0f s for %s", self.job, now - since, what)
            if now - self._heard_at > _SAY_EVERY_S:
                log.warning("coordinator %s has not been heard for %.0f s", self.address, now - self._heard_at)

    def _tell(self, kind: type[m.FromJob], **fields: Any) -> None:
        """Sends what needs no answer."""
        with self._talking() as talk:
            talk.tell(kind, **fields)

    def _raise_if_ended(self) -> None:
        if self._talk.ended is not None:
            raise LeaseLost(f"job {self.job!r} has no leases any more: {self._talk.ended}")

    def _raise_if_lost(self, token: int) -> None:
        """Once for each lost lease."""
        if token in self._talk.lost:
            raise LeaseLost(self._talk.lost.pop(token))

    def _rollout_token(self) -> int | None:
        """Of the rollout lease held. Raises LeaseLost if any lease was lost and nobody has been told."""
        with self._changed:
            self._raise_if_ended()
            if self._talk.lost:
                raise LeaseLost(next(iter(self._talk.lost.values())))
            return next((claim.token for claim in self._talk.held.values() if claim.phase == "rollout"), None)

    def _tell_wanted(self) -> None:
        """Those who hold what another job waits for, or what may not be used any more. `_changed` is held."""
        fenced = self._is_fenced()
        for token, wanted in list(self._wanted.items()):
            if fenced or token in self._talk.wanted or token not in self._talk.held:
                wanted.set()
            if token not in self._talk.held:
                del self._wanted[token]

    # --- called in the link's thread ---

    def _tick(self) -> None:
        with self._talking() as talk:
            talk.tick(time.monotonic())
            if self._is_fenced():
                self._tell_wanted()
                self._changed.notify_all()

    def _receive(self, message: m.AnyMessage) -> None:
        with self._talking() as talk:
            self._heard_at = time.monotonic()
            lost = len(talk.lost)
            talk.receive(message, self._heard_at)
            for reason in list(talk.lost.values())[lost:]:
                log.error("lease lost: %s", reason)
            self._tell_wanted()
            self._changed.notify_all()
