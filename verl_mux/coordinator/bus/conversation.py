"""A job's half of the protocol, as a pure conversation: questions, arriving messages and time go in; messages come out.

Runs in the processes of a job, called by client.py, which has the thread, the socket and the clock; pure.

- A question (a registration, a request, a release...) stays open under its own key until it is answered, and is sent again when a
  beat that was sent after it comes back and the coordinator does not have it. The coordinator answers a repeated question as it
  answered the first, so neither a lost question nor a lost answer matters.
- While the coordinator does not know the client, each beat is a registration. After that each beat names the leases held, and its
  answer names those that the coordinator holds for the client too: the others are lost.
- A coordinator of another epoch was restarted: the client registers again and asserts what it holds. A grant that comes late from
  the coordinator before is void: its successor did not hear the client assert it.
- A grant that was not asked for, or is not wanted any more, is released at once.
- What is given back goes first: a request is sent when no release, shrink or cancel is open, so that it never competes with what
  the client held before.
- Leases are good until a lease timeout after the client *sent* the last message that the coordinator is known to have heard. Long
  before that, at FENCED_AFTER of it, the client is fenced: the nodes may not be used until the coordinator has answered again.
"""

from __future__ import annotations

import math
from typing import Any, TypedDict

import msgspec

from verl_mux.coordinator.bus import messages as m

BEAT_EVERY_S = 1.0
RECONNECTS_WITHIN_S = 1.0  # between two tries, and as much again at random
# The rest of the lease is for ending what runs, before the coordinator may give the nodes on.
FENCED_AFTER = 0.7
REGISTER, GOODBYE = "register", "goodbye"
_GIVING_BACK = (m.LeaseRelease, m.LeaseShrink, m.LeaseCancel)
_UNANSWERED_BEATS = 64  # of more than these, the oldest counts as lost


class Sender(TypedDict):  # the fields that every message of a job carries
    job: str
    uid: str
    client: str


class _Question(msgspec.Struct):
    """`asked_at`: the number of the last beat before it. `wanted` False: no caller waits for the answer itself."""

    message: m.FromJob
    asked_at: int
    wanted: bool


class Conversation:
    """`ask` and `send` -> `outgoing` -> `receive`... -> `take_answer`. `tick` often: it beats when a beat is due. Every call may
    leave messages in `outgoing`. Times are the caller's, in seconds, of a clock that only goes forward."""

    def __init__(self, sender: Sender, registration: dict[str, Any]):
        """`registration`: the fields of Register that stay as they are."""
        self.sender = sender
        self._registration = registration
        self.members: list[m.Member] = []
        self.registered: m.Registered | None = None
        self.queued: m.Queued | None = None  # stands in its place as long as the job waits for nodes
        self.gangs: list[list[str]] = []
        self.move = 0  # the number of the move that the job is to make
        self.held: dict[int, m.Claim] = {}
        self._seen = 0  # the highest token of all
        self.wanted: set[int] = set()  # tokens held for whose nodes another job waits, or waited
        self.lost: dict[int, str] = {}  # token -> why
        self.ended: str | None = None
        self._open: dict[str, _Question] = {}
        self._answers: dict[str, m.Message] = {}
        self._unknown = False  # to the coordinator, or to this start of it
        self._beats = 0
        self._last_heard = -math.inf  # when the last message was sent that the coordinator is known to have heard
        self._number = 1  # of the registration
        self._registering_since: float | None = None
        self._unanswered: dict[int, tuple[float, list[int]]] = {}  # beat -> when it was sent, and its tokens
        self._next_beat = 0.0
        self._out: list[m.FromJob] = []

    # --- what the job says ---

    def ask(self, key: str, question: m.FromJob, wanted: bool = True) -> None:
        self._open[key] = _Question(question, self._beats, wanted)
        if not self._is_held_back(question):
            self._out.append(question)

    def _is_held_back(self, question: m.FromJob) -> bool:
        return isinstance(question, m.LeaseRequest) and any(isinstance(q.message, _GIVING_BACK) for q in self._open.values())

    def _open_messages(self, kind: type[m.FromJob]) -> list[m.FromJob]:
        """Of open questions that are to be sent now."""
        messages = [question.message for question in self._open.values() if isinstance(question.message, kind)]
        return [message for message in messages if not self._is_held_back(message)]

    def register(self, now: float) -> None:
        self._registering_since = now
        self.ask(REGISTER, self._registration_message())

    def request(self, key: str, phase: str, step: int, nodes: list[str], **of_a_filler: Any) -> None:
        self.ask(key, m.LeaseRequest(**self.sender, key=key, phase=phase, step=step, nodes=nodes, **of_a_filler))

    def cancel(self, key: str) -> None:
        """The lease is not wanted any more, even if it was granted in this moment, or its answer taken."""
        self._open.pop(key, None)
        self._answers.pop(key, None)
        for token in [token for token, claim in self.held.items() if claim.key == key]:
            del self.held[token]
        self.ask(f"cancel {key}", m.LeaseCancel(**self.sender, key=key), wanted=False)

    def release(self, token: int, wanted: bool = True) -> str:
        """Returns the key of its answer."""
        self.held.pop(token, None)
        self.ask(key := _release_key(token), m.LeaseRelease(**self.sender, token=token), wanted)
        return key

    def shrink(self, token: int, nodes: list[str]) -> None:
        """From now on the lease is asserted for its other nodes only."""
        left = [node for node in self.held[token].nodes if node not in nodes]
        self.held[token] = msgspec.structs.replace(self.held[token], nodes=left)
        key = f"shrink {token} to {len(left)}"  # not their names: a key has no room for those of many nodes
        self.ask(key, m.LeaseShrink(**self.sender, key=key, token=token, nodes=nodes), wanted=False)

    def leave(self, reason: str = "", **to_move: Any) -> None:
        """The whole job goes with its first client; another client goes alone. `reason`, `to_move`: see Deregister."""
        self.held.clear()
        self._say_goodbye(m.Deregister(**self.sender, reason=reason, **to_move) if self._is_first() else m.Detach(**self.sender))

    def _is_first(self) -> bool:
        return self.registered is not None and self.registered.first

    def fail(self, reason: str) -> None:
        """What is held stays asserted until the coordinator knows that the job has failed."""
        self._say_goodbye(m.Failing(**self.sender, reason=reason))

    def send(self, kind: type[m.FromJob], **fields: Any) -> None:
        """Sends what needs no answer."""
        self._out.append(kind(**self.sender, **fields))

    def end(self, reason: str) -> None:
        self.ended = self.ended or reason

    # --- what is to be sent, and what was answered ---

    def outgoing(self) -> list[m.FromJob]:
        """Takes the messages to send, in this order."""
        out, self._out = self._out, []
        return [
            msgspec.structs.replace(message, number=self._number) if isinstance(message, m.LeaseRequest) else message
            for message in out
        ]

    def is_over(self, key: str) -> bool:
        """Nothing more will come for this question."""
        return key in self._answers or self.ended is not None

    def take_answer(self, key: str) -> m.Message | None:
        """None if it has not come; the question stays open then, but its answer will be dropped."""
        if key in self._open:
            self._open[key].wanted = False
        return self._answers.pop(key, None)

    def may_use(self, now: float) -> bool:
        """Whether what is held may be used: no other job can have it yet."""
        timeout = self.registered.lease_timeout if self.registered is not None else 0.0
        return self.ended is None and now < self._last_heard + FENCED_AFTER * timeout

    # --- time passes ---

    def tick(self, now: float) -> None:
        if now < self._next_beat or self.ended is not None:
            return
        self._next_beat = now + BEAT_EVERY_S
        goodbye = self._goodbye()
        if goodbye is not None and not (self._is_unknown() and isinstance(goodbye, m.Failing)):
            self._out.append(goodbye)
        elif not self._is_unknown():
            self._beat(now)
        elif REGISTER in self._open or self._unknown:
            self._out.append(self._registration_message())

    def _is_unknown(self) -> bool:
        return self._unknown or self._epoch() is None

    def _beat(self, now: float) -> None:
        self._beats += 1
        self._unanswered[self._beats] = now, list(self.held)
        for beat in list(self._unanswered)[:-_UNANSWERED_BEATS]:
            del self._unanswered[beat]
        self._out.append(m.Heartbeat(**self.sender, beat=self._beats, tokens=list(self.held)))

    # --- what arrives ---

    def receive(self, message: m.Message, now: float) -> None:
        match message:
            case m.Registered() | m.Queued():
                if self._epoch() in (None, message.epoch) or (self._unknown and message.answers == self._number):
                    self._welcomed(message, now)
                else:  # a restarted coordinator must answer the registration that asserts what is held, not an earlier one
                    self._register_again()
            case m.Refused():
                if message.about != REGISTER or self.registered is None:
                    self._answer(message.about, message)
                elif not message.retry and self._unknown:  # a registration given up; not an answer to a message that went astray
                    self._ended_by(message.reason)
            case m.LeaseGrant():
                self._granted(message)
            case m.LeaseReleased() | m.LeaseLost():
                self._answer(_release_key(message.token), message)
            case m.LeaseCancelled():
                self._answer(f"cancel {message.key}", message)
            case m.LeaseShrunk():
                self._answer(message.key, message)
            case m.HeartbeatAck():
                self._acknowledged(message)
            case m.Contended():
                self.gangs = message.gangs
                held = {token for token, claim in self.held.items() if not set(claim.nodes).isdisjoint(message.nodes)}
                self.wanted = self.wanted & self.held.keys() | held
            case m.Unknown():
                goodbye = self._goodbye()
                if isinstance(goodbye, (m.Deregister, m.Detach)):
                    self.end("closed")
                elif goodbye is not None or not self._is_unknown():
                    self._register_again()
            case m.JobEnded():
                self._ended_by(message.reason)

    def _epoch(self) -> str | None:
        """Of the coordinator that has answered a registration last."""
        welcome = self.registered or self.queued
        return welcome.epoch if welcome is not None else None

    def _welcomed(self, message: m.Registered | m.Queued, now: float) -> None:
        """Of several `Queued`, the first is the answer to the registration; from then on, `Registered` is."""
        again, was_queued, self._unknown = self.registered is not None, self.queued is not None, False
        if isinstance(message, m.Queued):
            self.queued = message
            if not was_queued:
                self._answer(REGISTER, message)
            return
        self.registered, self.queued = message, None
        self._answer(REGISTER, message)
        if again:
            self._out += self._open_messages(m.FromJob)
            self._beat(now)  # whose answer names the leases that it took over
        elif self._registering_since is not None:
            self._last_heard = max(self._last_heard, self._registering_since)

    def _granted(self, message: m.LeaseGrant) -> None:
        self._seen = max(self._seen, message.token)
        if message.epoch != self._epoch() or self._unknown:
            return  # if it holds, it comes again after the registration
        if message.token in self.held or _release_key(message.token) in self._open:
            return
        if self._answer(message.key, message):
            self.held[message.token] = m.Claim(**{name: getattr(message, name) for name in m.Claim.__struct_fields__})
        else:
            self.release(message.token, wanted=False)

    def _acknowledged(self, message: m.HeartbeatAck) -> None:
        beat = self._unanswered.pop(message.beat, None)
        if self._epoch() is None or beat is None:
            return None
        if message.epoch != self._epoch():
            return self._register_again()
        self.move = message.move
        sent_at, tokens = beat
        self._last_heard = max(self._last_heard, sent_at)
        for token in set(tokens) - set(message.tokens):
            if self.held.pop(token, None) is not None:
                job = self.sender["job"]
                self.lost[token] = f"token {token} is stale: the coordinator does not hold it for job {job!r} any more"
        for key, question in self._open.items():  # asked before that beat, and yet not known to the coordinator: lost on the way
            if key not in message.queued and question.asked_at < message.beat and not self._is_held_back(question.message):
                self._out.append(question.message)

    def _register_again(self) -> None:
        """Once; from then on each beat repeats it until it is answered."""
        if not self._unknown:
            self._unknown, self._number = True, self._number + 1
            self._out.append(self._registration_message())

    def _ended_by(self, reason: str) -> None:
        self.lost |= dict.fromkeys(self.held, f"job {self.sender['job']!r} has no leases any more: {reason}")
        self.held.clear()
        self.end(reason)

    # --- questions ---

    def _registration_message(self) -> m.Register:
        """A repeated registration names the nodes where the job was placed, in case the coordinator has lost that."""
        return m.Register(
            **self.sender, **self._registration, members=self.members, held=list(self.held.values()), seen=self._seen,
            number=self._number, again=self._epoch() is not None, first=self._is_first(),
            placed=self.registered.nodes if self.registered is not None else {},
        )  # fmt: skip

    def _goodbye(self) -> m.FromJob | None:
        return self._open[GOODBYE].message if GOODBYE in self._open else None

    def _say_goodbye(self, message: m.FromJob) -> None:
        self._open.clear()
        self.ask(GOODBYE, message, wanted=False)

    def _answer(self, key: str, message: m.Message) -> bool:
        """False if the question is not open."""
        question = self._open.pop(key, None)
        if question is None:
            return False
        if isinstance(question.message, _GIVING_BACK):
            self._out += self._open_messages(m.LeaseRequest)
        if question.wanted:
            self._answers[key] = message
        return True


def _release_key(token: int) -> str:
    return f"release {token}"
