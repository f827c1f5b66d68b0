"""A job's client: `connect(...)` registers the job, and `phase` holds a lease for the length of a block.

    mux = connect("tcp://127.0.0.1:5570", "math", {"rollout": ["r0"], "train": ["t0"]})
    with mux.phase("rollout", step=1) as lease:
        ...  # the nodes in lease.nodes are ours

Runs in the processes of a job; called by the trainer, by `verl-mux hold` and by users. With address None every lease
is granted at once, locally (LocalMux): no socket, no thread. A Mux opens a socket, with a thread (link.py); what it
says there is decided in conversation.py. All calls may come from any thread. The coordinator may be restarted at any moment:
calls that need an answer wait for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.bus.conversation import REGISTER, Conversation, Sender
from verl_mux.coordinator.bus.curve_keys import JOB, ClientKeys, for_address
from verl_mux.coordinator.bus.link import TICK_S, Link
from verl_mux.coordinator.bus.members import UID_VARIABLE, this_process
from verl_mux.errors import Failure, UserError
from verl_mux.places.place import Place

log = logging.getLogger(__name__)

ADDRESS_VARIABLE, JOB_VARIABLE = "VERL_MUX_COORDINATOR", "VERL_MUX_JOB"
_PROGRESS_INTERVAL_S = 0.05
_GOODBYE_S = 2.0
_RETRY_S = 0.2
_LOG_EVERY_S = 60.0


class LeaseLost(Failure):
    """The lease ended while it was in use, or the coordinator holds the whole job for dead."""


@dataclass(frozen=True)
class Lease:
    """Permission for one phase on `nodes`."""

    token: int  # rises with every lease ever granted
    nodes: list[str]
    phase: str
    step: int
    waited_s: float  # between asking and holding
    granted_at: float  # epoch seconds, by the coordinator's clock
    # Set as soon as another job waits for one of the nodes, or they may not be used any more: a filler gives the lease back then.
    wanted: threading.Event = dataclasses.field(default_factory=threading.Event, compare=False, repr=False)


def connect(
    address: str | None, job: str, nodes: dict[str, list[str]], *, timeout: float = 30.0, uid: str | None = None,
    keys: str | None = None, filler: bool = False, wait: bool = True, **about: Any,
) -> LocalMux:  # fmt: skip
    """Registers the job, or attaches one more client to it when the uid is the same.

    Args:
        nodes: nodes or whole pools per side, {"rollout": ["r0"], "train": ["t0"]}; the same on both when colocated; ["auto"] on
            both: the client's `nodes` then say where the job was placed.
        timeout: seconds to wait for the coordinator, here and for the answer to a release.
        uid: names this start of the job, and is its secret; default: VERL_MUX_JOB_UID, or a new one.
        keys: the folder of the coordinator's keys; default: VERL_MUX_KEYS, or on this machine its user's own.
        filler: the job ranks behind all others, see docs/hold.md. It may name one side only, asks for any number of its nodes,
            and gives a lease back as soon as its `wanted` is set.
        wait: block until a job that has to be placed has its nodes; if False, the client's `nodes` may be empty.
        about: further fields of messages.Register, None where unknown: gpus, host_memory, seed, steps, needs, slo, profiled,
            grace, movable, colocated.

    Raises:
        UserError: the registration is refused, or no coordinator answers within `timeout` seconds.
    """
    if address is None:
        return LocalMux(job, nodes, filler)
    known = {name: value for name, value in about.items() if value is not None}
    return Mux(
        address, job, nodes, uid=uid or _uid_for(job), timeout=timeout, wait=wait, keys=for_address(address, keys, JOB),
        filler=filler, **known,
    )  # fmt: skip


def _uid_for(job: str) -> str:
    """The uid from the environment unless it is another job's; a new one goes there, so that children carry it.

    Every process started with it in VERL_MUX_JOB_UID counts as one of the job, so each start of a job needs a new one.
    """
    new = f"{job}:{uuid.uuid4().hex}"
    uid = os.environ.setdefault(UID_VARIABLE, new)
    another_job = ":" in uid and uid.rpartition(":")[0] != job
    return new if another_job else uid


class LocalMux:
    """Grants every lease at once: no coordinator, no socket, no thread. Has the whole interface of Mux."""

    address: str | None = None
    filler_grace: float | None = None  # seconds that a filler has to leave; None without a coordinator
    lease_timeout: float | None = None  # seconds without a sign of life after which the job counts as silent
    move = 0  # number of the move that the job is to make: at the end of its step it saves, and leaves; 0: none

    def __init__(self, job: str, nodes: dict[str, list[str]], filler: bool = False):
        self.job, self.nodes, self.filler = job, nodes, filler
        self._places: dict[str, Place] = {}
        self._tokens = itertools.count(1)

    @contextlib.contextmanager
    def phase(self, name: str, step: int = 0, nodes: list[str] | None = None, num_nodes: int = 1) -> Iterator[Lease]:
        """Holds a lease for the block and gives it back on every way out."""
        lease = self.acquire(name, step=step, nodes=nodes, num_nodes=num_nodes)
        try:
            yield lease
        except BaseException:
            with contextlib.suppress(Failure):  # what went wrong in the block matters more
                self.release(lease)
            raise
        self.release(lease)

    def acquire(self, phase: str, step: int = 0, nodes: list[str] | None = None, num_nodes: int = 1) -> Lease:
        """Blocks until all nodes (default: the job's for this phase; init: all) are granted; to a filler, any `num_nodes` of
        them that no job uses or waits for.

        Raises UserError for what can never be granted, LeaseLost when the coordinator holds the job for dead.
        """
        granted = self._nodes_for(phase, nodes)
        granted = granted[:num_nodes] if self.filler else granted
        return Lease(next(self._tokens), granted, phase, step, 0.0, time.time())

    def _nodes_for(self, phase: str, nodes: list[str] | None) -> list[str]:
        if phase not in m.PHASES:
            raise UserError(f"phase {phase!r} is not known; allowed: {', '.join(m.PHASES)}")
        if nodes is not None:
            return list(nodes)
        sides = m.SIDES if phase == "init" else (phase,)
        return list(dict.fromkeys(node for side in sides for node in self.nodes.get(side, [])))

    def release(self, lease: Lease) -> None:
        """Gives the lease back; a second time does nothing. Raises LeaseLost if it was lost before."""

    def shrink(self, lease: Lease, nodes: list[str]) -> Lease:
        """Gives some of the lease's nodes back before the rest. Returns the lease as it is from then on."""
        left = [node for node in lease.nodes if node not in nodes]
        if not left:
            raise ValueError(f"{lease} would keep no node; release it")
        return dataclasses.replace(lease, nodes=left)

    def progress(self, done: int, total: int) -> None:
        """Reports samples completed in the running rollout. Raises LeaseLost if its lease was lost."""

    def report_step(self, step: int, metrics: dict[str, float], steps: int | None = None) -> None:
        """Reports a finished step; metrics such as the mean reward are shown and logged. `steps`: of the job in all."""

    def memory(self, node: str, tags: dict[str, int]) -> None:
        """Reports device bytes that the job holds on `node` now under these tags; reports of other tags stand."""

    def host_memory(self, node: str, kinds: dict[str, int]) -> None:
        """Reports bytes of host memory that the job's processes hold on `node` now, by kind."""

    def note(self, note: str) -> None:
        """Reports what the job does within its phase: sync, sleep, wake..."""

    def guard(self, fenced: Callable[[], None]) -> None:
        """Has `fenced` called, in a thread of its own, when the nodes held may not be used any more, and again while that is so:
        it stops what runs there, and may wait with `wait_until_usable`."""

    def wait_until_usable(self) -> None:
        """Blocks while the nodes held may not be used. Raises LeaseLost when they never will be."""

    def members(self, members: Iterable[m.Member]) -> None:
        """Names all device-holding processes, instead of those named before: the job's nodes are granted to others only when
        they are gone."""

    def gangs(self, phase: str) -> list[list[str]]:
        """Sets of this job's nodes of that phase: if all of one came back another job would begin."""
        return []

    def place(self, node: str) -> Place:
        """Where the node is, by the coordinator's configuration; bound to no host where that names none."""
        return self._places.get(node, Place())

    def leave_to_move(self, move: int, step: int, saving_s: float) -> None:
        """As `close`, of a job that comes back under its name, on nodes that are kept for it, and goes on after `step`. Saving
        took `saving_s` seconds of that step."""

    def fail(self, reason: str) -> None:
        """Ends the job while its memory may still be on its nodes: they come free when its processes are gone."""

    def close(self, reason: str = "") -> None:
        """Ends the job, or only this client if it is not the job's first, and gives back what it holds. `reason`: why, if the job
        has not simply finished."""


class Mux(LocalMux):
    """A job registered with the coordinator at `address`; for what the calls do see LocalMux.

    made -> registered (or queued, with `wait` False) -> calls from any thread -> `close` or `fail`, or the coordinator ends the
    job; then every call that needs an answer raises LeaseLost. `_changed` guards the conversation, which the link's thread and
    the callers share.
    """

    def __init__(
        self, address: str, job: str, nodes: dict[str, list[str]], *, uid: str, timeout: float, wait: bool,
        keys: ClientKeys | None, filler: bool = False, **about: Any,
    ):  # fmt: skip
        """As `connect`. A job that is queued to be placed waits without limit; with `wait` False it does not."""
        super().__init__(job, nodes, filler)
        self.address, self.uid = address, uid
        sender: Sender = {"job": job, "uid": uid, "client": f"{job}-{uuid.uuid4().hex}"}
        self._talk = Conversation(sender, {**msgspec.structs.asdict(this_process()), "nodes": nodes, "filler": filler, **about})
        self._timeout = timeout
        self._changed = threading.Condition()
        self._wanted: dict[int, threading.Event] = {}  # by token, of leases held
        self._heard_at = time.monotonic()
        self._progress_sent = 0.0
        self._link = Link(address, sender["client"], self._receive, keys, self._tick)
        self._link.start()
        try:
            self._register(timeout, wait)
        except BaseException:  # not registered, as far as it knows
            with self._talking() as talk:
                talk.leave()
                talk.end("never registered")
            self._link.close()
            raise
        welcome = self._talk.registered
        self.nodes, self._places = (welcome.nodes, welcome.places) if welcome is not None else ({}, {})

    def acquire(self, phase: str, step: int = 0, nodes: list[str] | None = None, num_nodes: int = 1) -> Lease:
        step, nodes = int(step), self._nodes_for(phase, nodes)
        of_a_filler = {"num_nodes": num_nodes} if self.filler else {}
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
                self._set_wanted()
            waited = time.perf_counter() - asked
            return Lease(answer.token, answer.nodes, answer.phase, answer.step, waited, answer.granted_at, wanted)
        except BaseException:  # the caller will never release it, though it may have been granted meanwhile
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
        with self._changed:
            self._raise_if_ended()
            if self._talk.lost:  # and no call has raised that yet
                raise LeaseLost(next(iter(self._talk.lost.values())))
            token = next((claim.token for claim in self._talk.held.values() if claim.phase == "rollout"), None)
        now = time.monotonic()
        # At most 20 a second travel, so that it may be called for every sample; the last one always does.
        if done >= total or now - self._progress_sent >= _PROGRESS_INTERVAL_S:
            self._progress_sent = now
            self._send(m.Progress, done=done, total=total, token=token)

    def report_step(self, step: int, metrics: dict[str, float], steps: int | None = None) -> None:
        values = {name: float(value) for name, value in metrics.items()}
        self._send(m.StepReport, step=int(step), metrics=values, steps=None if steps is None else int(steps))

    def memory(self, node: str, tags: dict[str, int]) -> None:
        self._send(m.MemoryReport, node=node, tags={tag: int(num_bytes) for tag, num_bytes in tags.items()})

    def host_memory(self, node: str, kinds: dict[str, int]) -> None:
        self._send(m.HostReport, node=node, bytes=kinds)

    def note(self, note: str) -> None:
        self._send(m.PhaseNote, note=note)

    def guard(self, fenced: Callable[[], None]) -> None:
        threading.Thread(target=self._watch_fence, args=(fenced,), name="verl-mux-fence", daemon=True).start()

    def _watch_fence(self, fenced: Callable[[], None]) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._talk.ended is not None or self._is_fenced())
            if self._talk.ended is not None:
                return
            log.warning("coordinator %s does not answer: job %r stops using its nodes until it does", self.address, self.job)
            is_usable = False
            while not is_usable:
                fenced()
                with self._changed:
                    is_usable = self._changed.wait_for(lambda: not self._is_fenced(), TICK_S)

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
            talk.send(m.MemberReport, members=talk.members)

    def gangs(self, phase: str) -> list[list[str]]:
        nodes = self.nodes.get(phase)
        return [gang for gang in self._talk.gangs if nodes is None or set(gang).issubset(nodes)]

    def leave_to_move(self, move: int, step: int, saving_s: float) -> None:
        reason, to_move = "it comes back: it was asked to leave its nodes", {"moving": move, "step": int(step)}
        self._leave(lambda talk: talk.leave(reason, **to_move, saving_s=float(saving_s)), "left to move")

    def fail(self, reason: str) -> None:
        self._leave(lambda talk: talk.fail(reason), "it failed")

    def close(self, reason: str = "") -> None:
        self._leave(lambda talk: talk.leave(reason), "closed")

    def _leave(self, say: Callable[[Conversation], None], reason: str) -> None:
        """Says goodbye, and waits a moment for the answer."""
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
            answer = self._ask_to_register("the coordinator", max(0.0, deadline - time.monotonic()))
            if isinstance(answer, m.Queued):
                log.info("%s", answer.reason)
                if not wait:
                    return
                answer = self._ask_to_register("nodes")
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
            time.sleep(_RETRY_S)  # the job that has the name is about to end

    def _ask_to_register(self, what: str, timeout: float | None = None) -> m.Message | None:
        with self._talking() as talk:
            talk.register(time.monotonic())
        return self._answer_to(REGISTER, what, timeout)

    def _answer_to(self, key: str, what: str, timeout: float | None = None) -> m.Message | None:
        """Waits for it; None after `timeout` seconds: the question stays open and is repeated. `what`: in words, which a wait
        without a timeout logs now and then, and that the coordinator is not heard."""
        since = time.monotonic()
        with self._changed:
            while not self._changed.wait_for(lambda: self._talk.is_over(key), _LOG_EVERY_S if timeout is None else timeout):
                if timeout is not None:
                    break
                now = time.monotonic()
                log.info("job %r has waited %.0f s for %s", self.job, now - since, what)
                if now - self._heard_at > _LOG_EVERY_S:
                    log.warning("coordinator %s has not been heard for %.0f s", self.address, now - self._heard_at)
            if (answer := self._talk.take_answer(key)) is None:
                self._raise_if_ended()
            return answer

    def _send(self, kind: type[m.FromJob], **fields: Any) -> None:
        """Sends what needs no answer."""
        with self._talking() as talk:
            talk.send(kind, **fields)

    def _raise_if_ended(self) -> None:
        if self._talk.ended is not None:
            raise LeaseLost(f"job {self.job!r} has no leases any more: {self._talk.ended}")

    def _raise_if_lost(self, token: int) -> None:
        """Once for each lost lease."""
        if token in self._talk.lost:
            raise LeaseLost(self._talk.lost.pop(token))

    def _set_wanted(self) -> None:
        """Of leases for whose nodes another job waits, or that may not be used any more. `_changed` is held."""
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
                self._set_wanted()
                self._changed.notify_all()

    def _receive(self, message: m.AnyMessage) -> None:
        with self._talking() as talk:
            self._heard_at = time.monotonic()
            lost = len(talk.lost)
            talk.receive(message, self._heard_at)
            for reason in list(talk.lost.values())[lost:]:
                log.error("lease lost: %s", reason)
            if talk.registered is not None:
                self.filler_grace, self.lease_timeout = talk.registered.filler_grace, talk.registered.lease_timeout
            self.move = talk.move
            self._set_wanted()
            self._changed.notify_all()
