"""Leases on record: given out, made smaller, given back; their fencing tokens; and the moments at which features are called.

Runs in the coordinator; state.py subclasses `Leases`, and features call it; pure. queueing.py decides which request may go.

Numbers of tokens: (epoch << 32) + counter, so tokens rise from one start of the coordinator to the next, whatever was lost. The
epoch is the number of the start. Below 2 ** 52 a token is exact in JSON and in a double.

Closed tokens: a release says that nothing is done under its token any more, which is true whichever coordinator hears it. So a
token that is not on record counts as given back; only a token that was taken away, or is another job's, is answered with
LEASE_LOST. A request that comes once more after its lease was given back, late from an old connection, is not granted again.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core import queueing
from verl_mux.coordinator.core.records import Instruction, Job, Lease, Log, Request, Send, State, Usage, What
from verl_mux.coordinator.core.settings import Config
from verl_mux.profiling.eventlog import events

Handler = Callable[[float, Any, Any], list[Instruction]]
_COUNTER_BITS = 32
_COUNTED_FROM = 1_767_225_600  # the year 2026; 30 bits of seconds last for 34 years
_PER_SECOND_BITS = 22
# Closed tokens that are remembered of a job: more than it can have releases open.
_REMEMBERED = 64


def tokens_before(epoch: int) -> int:
    """Lower than every token of this epoch, and not lower than any of those before."""
    return epoch << _COUNTER_BITS


def token_at(wall: float) -> int:
    """For a start that knows of no earlier one: higher than the tokens of those before, by the wall clock (epoch seconds)."""
    return int(max(0.0, wall - _COUNTED_FROM)) << _PER_SECOND_BITS


def epoch_of(token: int) -> int:
    return token >> _COUNTER_BITS


LAST_EPOCH = (1 << 20) - 1
# The last token of the last epoch but one: a start must be able to come after it.
LAST_TOKEN = tokens_before(LAST_EPOCH) - 1
# More starts than a coordinator has in years, and few enough to leave room for as many again.
_MANY_STARTS = 1 << 16


def last_possible(wall: float) -> int:
    """The last token that predecessors may have given out, for a start that knows of none, by the wall clock (epoch seconds).
    Were a client believed that claims to have seen LAST_TOKEN, no start could come after this one."""
    return min(max(token_at(wall), tokens_before(_MANY_STARTS)), LAST_TOKEN)


class Feature:
    """Something that the core does besides leases. The core calls every feature at each moment below, in the order of
    `core.FEATURES`; a method that a feature does not override does nothing. `core`: the machine, whose records it may change."""

    def __init__(self, core: Leases) -> None:
        self.core = core

    def handlers(self) -> Mapping[type, Handler]:
        """Inputs that the feature handles: (now, the job that the input is about or None, input) -> instructions."""
        return {}

    # --- a job comes, and goes ---

    def refusal(self, asked: m.Register, nodes: dict[str, list[str]], is_known: bool) -> str | None:
        """Why the job is not let in; None: no reason. `nodes`: by side, pools spelt out. Raises UserError, which refuses too."""
        return None

    def registered(self, now: float, job: Job, asked: m.Register) -> list[Instruction]:
        """A start of the job is on record; it has had no answer yet."""
        return []

    def why_queued(self, job: Job) -> str | None:
        """Why the job has no nodes yet."""
        return None

    def answers_later(self, job: Job) -> bool:
        """Whether the feature will answer the job's registration itself."""
        return False

    def leaves(self, now: float, job: Job, what: m.Deregister) -> None:
        """The job says that it leaves."""

    def ended(self, now: float, job: Job) -> list[Instruction]:
        """The job is over; it holds nothing any more."""
        return []

    # --- a lease ---

    def requested(self, now: float, job: Job, request: Request) -> list[Instruction]:
        """The request stands in its queues."""
        return []

    def granted(self, now: float, lease: Lease) -> None:
        """A lease was given out."""

    def released(self, now: float, job: Job, lease: Lease) -> list[Instruction]:
        """The job gave the lease back because its phase is over."""
        return []

    # --- time, heartbeats, nodes ---

    def resumed(self, now: float) -> None:
        """The coordinator has started."""

    def due(self, now: float) -> list[What]:
        """What the passing of time has brought about."""
        return []

    def move_of(self, job: Job) -> int:
        """The number of the move that the job is to make; 0: none."""
        return 0

    def nodes_opened(self) -> None:
        """Nodes came, or can be given again that could not."""

    def node_drained(self, node: str) -> None:
        """The node is given to no job any more."""


def about(lease: Lease) -> dict[str, Any]:
    """What the event log says of a lease."""
    return {"job": lease.job, "phase": lease.phase, "nodes": lease.nodes, "token": lease.token}


def asked_for(source: m.LeaseRequest | Request) -> dict[str, Any]:
    """Each node once: a list of one node in thousands of copies would keep every later request waiting."""
    fields = {name: getattr(source, name) for name in ("key", "job", "client", "phase", "step")}
    return {**fields, "nodes": list(dict.fromkeys(source.nodes))}


class Leases:
    """The records, and what changes leases in them. `epoch` names this start of the coordinator. `called_back`: by token, the
    running time at which a filler was asked to leave. `secret`: of the coordinator's keys, by which it knows the leases that were
    granted under these keys; empty: every claim passes for one."""

    def __init__(self, config: Config, epoch: str, state: State) -> None:
        self.config, self.epoch, self.state = config, epoch, state
        self.running = queueing.RunningTime()
        self.features: list[Feature] = []
        self.called_back: dict[int, float] = {}
        self.secret = b""

    def lease_of(self, job: Job, token: int) -> Lease | None:
        lease = self.state.leases.get(token)
        return lease if lease is not None and lease.job == job.name else None

    def lease_by_key(self, job: Job, key: str) -> Lease | None:
        return next((lease for lease in self.state.leases_of(job.name) if lease.key == key), None)

    def grant(self, lease: Lease) -> m.LeaseGrant:
        """The message that brings the lease to its client."""
        fields = ("key", "token", "phase", "step", "nodes", "granted_at")
        said = {name: getattr(lease, name) for name in fields}
        if self.secret:
            said |= {"granted": lease.nodes, "proof": self._proof(self.state.jobs[lease.job], lease, lease.nodes)}
        return m.LeaseGrant(epoch=self.epoch, **said)

    def is_proven(self, job: Job, claim: m.Claim) -> bool:
        """Whether a coordinator with these keys granted the claimed lease to this start of the job."""
        if not self.secret:
            return True
        return set(claim.nodes) <= set(claim.granted) and hmac.compare_digest(claim.proof, self._proof(job, claim, claim.granted))

    def _proof(self, job: Job, lease: Lease | m.Claim, nodes: list[str]) -> bytes:
        """It needs no record: a journal may be lost."""
        about = msgspec.msgpack.encode([job.name, job.uid, lease.token, lease.key, lease.phase, lease.step, nodes])
        return hashlib.blake2b(about, digest_size=16, key=self.secret, person=b"verl-mux lease").digest()

    def give(self, request: Request, nodes: list[str], now: float) -> list[Instruction]:
        """Gives out the lease that was asked for, on these nodes."""
        self.state.token += 1
        self.state.stepping = self.state.stepping or request.step > 0
        lease = Lease(token=self.state.token, granted_at=now, **{**asked_for(request), "nodes": nodes})
        self.state.leases[lease.token] = lease
        self.drop([request])
        for feature in self.features:
            feature.granted(now, lease)
        waited = Log(events.LEASE_WAIT, about(lease), duration=now - request.asked_at, step=lease.step)
        return [Send(lease.client, self.grant(lease)), waited]

    def shrink(self, lease: Lease, gone: list[str], now: float) -> None:
        """The lease goes on without these nodes, which are not all."""
        left = [node for node in lease.nodes if node not in gone]
        self.state.leases[lease.token] = msgspec.structs.replace(lease, nodes=left)
        self._count_usage(lease, gone, now)

    def free(self, lease: Lease, now: float) -> Log:
        """The lease is over."""
        del self.state.leases[lease.token]
        job = self.state.jobs[lease.job]
        close(job, lease.token)
        spent(job, lease.key)
        self._count_usage(lease, lease.nodes, now)
        called_at = self.called_back.pop(lease.token, None)
        leaving_s = None if called_at is None else self.running.at(now) - called_at
        extra = {**about(lease), **({"filler": True, "leaving_s": leaving_s} if job.filler else {})}
        return Log(events.LEASE_HELD, extra, duration=now - lease.granted_at, step=lease.step)

    def take_from(self, jobs: Collection[str], node: str, now: float) -> list[Instruction]:
        """Takes the node from these jobs, which are dying, and with its last node the lease."""
        out: list[Instruction] = []
        for lease in [lease for lease in self.state.leases.values() if lease.job in jobs and node in lease.nodes]:
            out.append(Log(events.LEASE_RECLAIMED, {**about(lease), "nodes": [node]}, duration=None, step=lease.step))
            if lease.nodes == [node]:
                out.append(self.free(lease, now))
            else:
                self.shrink(lease, [node], now)
        return out

    def drop(self, unwanted: list[Request]) -> None:
        """Takes these requests out of their queues."""
        ids = {id(request) for request in unwanted}
        self.state.requests = [request for request in self.state.requests if id(request) not in ids]

    def _count_usage(self, lease: Lease, nodes: list[str], now: float) -> None:
        for node in nodes:
            count_usage(self.state.usage.setdefault(node, Usage(since=lease.granted_at)), lease, self.state, now)

    # --- after a loss of memory (registration.py takes the claims) ---

    def settle(self, unknown_up_to: int) -> None:
        """At each start anew: its running time begins at 0."""
        self.state.settle_until = self.config.lease_timeout
        self.state.unknown_up_to = max(self.state.unknown_up_to, unknown_up_to)


def count_usage(usage: Usage, lease: Lease, state: State, now: float) -> None:
    kind = "fillers" if state.jobs[lease.job].filler else "jobs"
    setattr(usage, kind, getattr(usage, kind) + now - lease.granted_at)


# --- closed tokens ---


def close(job: Job, token: int, taken_away: bool = False) -> None:
    """The job's lease under this token was given back, or taken away."""
    job.closed[token] = taken_away
    while len(job.closed) > _REMEMBERED:
        del job.closed[next(iter(job.closed))]


def spent(job: Job, key: str) -> None:
    """What was asked for under this key was given back or cancelled."""
    job.spent.append(key)
    del job.spent[:-_REMEMBERED]


def answer_to_release(job: Job, token: int, is_anothers: bool) -> m.LeaseReleased | m.LeaseLost:
    """To the release of a token that the job does not hold."""
    if is_anothers or job.closed.get(token):
        return m.LeaseLost(token=token, reason=f"token {token} is stale: the lease was taken away before its release")
    close(job, token)  # a claim that comes later, from before the release, must not bring it back
    return m.LeaseReleased(token=token)
