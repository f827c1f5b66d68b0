"""The leases and requests on record: given out, made smaller, given back. Who may have which is decided elsewhere. Pure.

Records, the index over them, what is known of fillers and what the event log is told change together here.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core.fillers import usage
from verl_mux.coordinator.core.fillers.calls import Calls
from verl_mux.coordinator.core.inputs_and_instructions import Instruction, Log, Send
from verl_mux.coordinator.core.records import Job, Lease, Request, State
from verl_mux.coordinator.core.running_time import RunningTime
from verl_mux.coordinator.core.tokens import closing
from verl_mux.coordinator.core.waiting import Waiting
from verl_mux.profiling.eventlog import events


def about(lease: Lease) -> dict:
    """What the event log tells of a lease."""
    return {"job": lease.job, "phase": lease.phase, "nodes": lease.nodes, "token": lease.token}


def asked_for(source: m.LeaseRequest | Request) -> dict:
    return {name: getattr(source, name) for name in ("key", "job", "client", "phase", "step", "nodes")}


class Leases:
    def __init__(self, waiting: Waiting, calls: Calls, running: RunningTime, epoch: str) -> None:
        self._waiting, self._calls, self._running, self._epoch = waiting, calls, running, epoch

    @property
    def _state(self) -> State:
        return self._waiting.state

    def of(self, job: Job, token: int) -> Lease | None:
        lease = self._state.leases.get(token)
        return lease if lease is not None and lease.job == job.name else None

    def by_key(self, job: Job, key: str) -> Lease | None:
        return next((lease for lease in self._waiting.leases_of(job.name) if lease.key == key), None)

    def grant(self, lease: Lease) -> m.LeaseGrant:
        told = ("key", "token", "phase", "step", "nodes", "granted_at")
        return m.LeaseGrant(epoch=self._epoch, **{name: getattr(lease, name) for name in told})

    def give(self, request: Request, nodes: list[str], now: float) -> list[Instruction]:
        """The lease that was asked for, on these nodes."""
        self._state.token += 1
        self._state.stepping = self._state.stepping or request.step > 0
        lease = Lease(token=self._state.token, granted_at=now, **{**asked_for(request), "nodes": nodes})
        self.hold(lease)
        self.drop([request])
        waited = Log(events.LEASE_WAIT, about(lease), duration=now - request.asked_at, step=lease.step)
        return [Send(lease.client, self.grant(lease)), waited]

    def hold(self, lease: Lease) -> None:
        self._state.leases[lease.token] = lease
        self._waiting.granted(lease)

    def shrink(self, lease: Lease, gone: list[str], now: float) -> None:
        """It goes on without these nodes, which are not all."""
        self.hold(msgspec.structs.replace(lease, nodes=[node for node in lease.nodes if node not in gone]))
        self._count(lease, gone, now)

    def free(self, lease: Lease, now: float) -> Log:
        del self._state.leases[lease.token]
        self._waiting.freed(lease.token)
        job = self._state.jobs[lease.job]
        closing.given_back(job, lease.token)
        closing.spent(job, lease.key)
        self._count(lease, lease.nodes, now)
        leaving_s = self._calls.left(lease.token, self._running.at(now))
        of_a_filler = {"filler": True, "leaving_s": leaving_s} if job.filler else {}
        return Log(events.LEASE_HELD, {**about(lease), **of_a_filler}, duration=now - lease.granted_at, step=lease.step)

    def _count(self, lease: Lease, nodes: list[str], now: float) -> None:
        usage.count(self._state, lease, nodes, now)

    def take_from(self, jobs: Collection[str], node: str, now: float) -> list[Instruction]:
        """Takes the node from these jobs, which are dying, and with its last node the lease."""
        out: list[Instruction] = []
        for lease in [lease for job in jobs for lease in self._waiting.leases_of(job) if node in lease.nodes]:
            out.append(Log(events.LEASE_RECLAIMED, {**about(lease), "nodes": [node]}, duration=None, step=lease.step))
            if lease.nodes == [node]:
                out.append(self.free(lease, now))
            else:
                self.shrink(lease, [node], now)
        return out

    def drop(self, unwanted: list[Request]) -> None:
        """Takes these requests out of their queues."""
        for request in unwanted:
            self._waiting.gone(request)
        if unwanted:
            ids = {id(request) for request in unwanted}
            self._state.requests = [request for request in self._state.requests if id(request) not in ids]
