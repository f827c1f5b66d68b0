"""Fillers (`verl-mux hold`): work that takes nodes which no job uses or waits for, and leaves when a job wants one.

Runs in the coordinator as a feature of the core; pure. A filler gets any `num_nodes` of the nodes that it names when that many
are open: no lease names them, no job that is heard from has asked for them, and they are neither fenced nor draining. Requests of
fillers stand in no queue, so no job waits behind one. With `least` a node must be expected to stay open for that many seconds: a
job that uses other nodes comes back when its phase there is over, by its last of that kind; else it counts as coming at once.
"""

from __future__ import annotations

import math
from typing import Any

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core.leases import Feature
from verl_mux.coordinator.core.queueing import is_shut
from verl_mux.coordinator.core.records import Instruction, Job, JobEvicted, JobState, Lease, State, Usage, What
from verl_mux.coordinator.core.settings import FILLER_GRACE_S
from verl_mux.errors import UserError


class Hold(Feature):
    """`_called`: by token, the running time at which a filler was asked to leave. It is not on record: after a restart the time
    to leave begins when the filler speaks again (`_unheard`: those that have not)."""

    _called: dict[int, float] = {}
    _unheard: frozenset[str] = frozenset()

    def resumed(self, now: float) -> None:
        self._called, self._unheard = {}, frozenset(self.core.state.jobs)

    def refusal(self, asked: m.Register, nodes: dict[str, list[str]], is_known: bool) -> str | None:
        if asked.filler and asked.wants_placement:
            raise UserError(f"filler {asked.job!r} leaves its nodes to the coordinator; it must name pools or nodes")
        return None

    def request_refusal(self, asked: m.LeaseRequest, job: Job) -> str | None:
        if not job.filler:
            extra = asked.num_nodes or asked.least
            return f"job {job.name!r} asks for any {asked.num_nodes} nodes: only a filler may" if extra else None
        if asked.phase == "init" or asked.step:
            return f"filler {job.name!r} asks for {asked.phase}, step {asked.step}; fillers have neither init nor steps"
        if not 1 <= asked.num_nodes <= len(set(asked.nodes)):
            return f"filler {job.name!r} asks for any {asked.num_nodes} of {len(set(asked.nodes))} nodes"
        return None

    def after_grants(self, now: float) -> list[Instruction]:
        state, out = self.core.state, list[Instruction]()
        for request in [r for r in state.requests if r.is_fillers and state.settle_until is None]:
            if state.jobs[request.job].state is JobState.LIVE:
                nodes = [node for node in dict.fromkeys(request.nodes) if self._is_open(node, request.least, now)]
                if len(nodes) >= request.num_nodes:
                    out += self.core.give(request, nodes[: request.num_nodes], now)
        return out

    def _is_open(self, node: str, least: float, now: float) -> bool:
        state = self.core.state
        asked = any(node in r.nodes and not r.is_fillers and state.jobs[r.job].state is JobState.LIVE for r in state.requests)
        if asked or any(node in lease.nodes for lease in state.leases.values()) or is_shut([node], state, self.core.config):
            return False
        return not least or open_for(node, state, now) >= least

    def contended(self, now: float, job: Job) -> None:
        for lease in self.core.state.leases_of(job.name) if job.filler and job.name not in self._unheard else ():
            if set(lease.nodes).isdisjoint(job.contended):
                self._called.pop(lease.token, None)
            else:
                self._called = {lease.token: self.core.running.at(now), **self._called}

    def on_heartbeat(self, now: float, job: Job) -> list[m.Message]:
        self._unheard -= {job.name}
        self.contended(now, job)  # what was pushed before may have gone astray
        return [m.Contended(nodes=job.contended, gangs=job.gangs)] if job.filler and job.contended else []

    def due(self, now: float, running: float) -> list[What]:
        self._called = {token: since for token, since in self._called.items() if token in self.core.state.leases}
        late: dict[str, What] = {}
        for token, since in self._called.items():
            job = self.core.state.jobs[self.core.state.leases[token].job]
            grace = max(FILLER_GRACE_S, min(job.grace, self.core.config.lease_timeout))
            reason = f"a job waited for what it held, and it had not left after {grace:g} s"
            if running - since > grace and job.state in (JobState.LIVE, JobState.SILENT):
                late[job.name] = JobEvicted(job=job.name, uid=job.uid, reason=reason)
        return list(late.values())

    def is_pressing(self) -> bool:
        return bool(self._called)

    def nodes_back(self, now: float, lease: Lease, nodes: list[str]) -> None:
        for node in nodes:
            count(self.core.state.usage.setdefault(node, Usage(since=lease.granted_at)), lease, self.core.state, now)

    def about_lease(self, now: float, lease: Lease) -> dict[str, Any]:
        since, running = self._called.pop(lease.token, None), self.core.running.at(now)
        of_filler = {"filler": True, "leaving_s": None if since is None else running - since}
        return of_filler if self.core.state.jobs[lease.job].filler else {}


def open_for(node: str, state: State, now: float) -> float:
    """Seconds until a job is expected to ask for the node, on which none runs now; infinite where none will."""
    coming = [job for job in state.jobs.values() if job.running and node in job.all_nodes]
    held = {job.name: [le.granted_at + job.last.get(le.phase, 0.0) - now for le in state.leases_of(job.name)] for job in coming}
    asked = {job.name: [job.last.get(r.phase, 0.0) for r in state.requests if r.job == job.name] for job in coming}
    return min((max([*held[job.name], *asked[job.name], 0.0]) for job in coming), default=math.inf)


def count(usage: Usage, lease: Lease, state: State, now: float) -> None:
    kind = "fillers" if state.jobs[lease.job].filler else "jobs"
    setattr(usage, kind, getattr(usage, kind) + now - lease.granted_at)
