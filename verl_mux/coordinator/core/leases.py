"""The leases and requests on record: given out, made smaller, given back; and the moments at which features are called.

Runs in the coordinator; state.py subclasses `Leases`, and features call it; pure. Which request may go is decided in queueing.py
and fillers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core import tokens
from verl_mux.coordinator.core.queueing import RunningTime
from verl_mux.coordinator.core.records import Instruction, Job, Lease, Log, Request, Send, State, What
from verl_mux.coordinator.core.settings import Config
from verl_mux.profiling.eventlog import events

Handler = Callable[[float, Any, Any], list[Instruction]]


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

    # --- a lease, from request to release ---

    def request_refusal(self, asked: m.LeaseRequest, job: Job) -> str | None:
        """Why the request can never be granted; None: no reason."""
        return None

    def requested(self, now: float, job: Job, request: Request) -> list[Instruction]:
        """The request stands in its queues."""
        return []

    def granted(self, now: float, lease: Lease) -> None:
        """A lease was given out."""

    def after_grants(self, now: float) -> list[Instruction]:
        """All jobs that may go have their leases."""
        return []

    def contended(self, now: float, job: Job) -> None:
        """`job.contended` has changed; the job's clients are informed."""

    def nodes_back(self, now: float, lease: Lease, nodes: list[str]) -> None:
        """These nodes of a lease come back, one by one or with the lease."""

    def about_lease(self, now: float, lease: Lease) -> dict[str, Any]:
        """What the event log says besides of a lease that is over."""
        return {}

    def released(self, now: float, job: Job, lease: Lease) -> list[Instruction]:
        """The job gave the lease back because its phase is over."""
        return []

    # --- time, heartbeats, nodes ---

    def resumed(self, now: float) -> None:
        """The coordinator has started."""

    def due(self, now: float, running: float) -> list[What]:
        """What the passing of time has brought about. `running`: now, in running time."""
        return []

    def is_pressing(self) -> bool:
        """Whether `due` should be asked more often than usual."""
        return False

    def on_heartbeat(self, now: float, job: Job) -> list[m.Message]:
        """Messages to the client whose heartbeat came, before its acknowledgement."""
        return []

    def move_of(self, job: Job) -> int:
        """The number of the move that the job is to make; 0: none."""
        return 0

    def nodes_opened(self) -> None:
        """Nodes came, or can be given again that could not."""

    def node_drained(self, node: str) -> None:
        """The node is given to no job any more."""


def about(lease: Lease) -> dict:
    """What the event log says of a lease."""
    return {"job": lease.job, "phase": lease.phase, "nodes": lease.nodes, "token": lease.token}


def asked_for(source: m.LeaseRequest | Request) -> dict:
    return {name: getattr(source, name) for name in ("key", "job", "client", "phase", "step", "nodes")}


class Leases:
    """The records, and what changes leases in them. `epoch` names this start of the coordinator."""

    def __init__(self, config: Config, epoch: str, state: State) -> None:
        self.config, self.epoch, self.state = config, epoch, state
        self.running = RunningTime()
        self.features: list[Feature] = []

    def lease_of(self, job: Job, token: int) -> Lease | None:
        lease = self.state.leases.get(token)
        return lease if lease is not None and lease.job == job.name else None

    def lease_by_key(self, job: Job, key: str) -> Lease | None:
        return next((lease for lease in self.state.leases_of(job.name) if lease.key == key), None)

    def grant(self, lease: Lease) -> m.LeaseGrant:
        """The message that brings the lease to its client."""
        fields = ("key", "token", "phase", "step", "nodes", "granted_at")
        return m.LeaseGrant(epoch=self.epoch, **{name: getattr(lease, name) for name in fields})

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
        for feature in self.features:
            feature.nodes_back(now, lease, gone)

    def free(self, lease: Lease, now: float) -> Log:
        """The lease is over."""
        del self.state.leases[lease.token]
        tokens.given_back(self.state.jobs[lease.job], lease.token)
        tokens.spent(self.state.jobs[lease.job], lease.key)
        extra = about(lease)
        for feature in self.features:
            feature.nodes_back(now, lease, lease.nodes)
            extra |= feature.about_lease(now, lease)
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
