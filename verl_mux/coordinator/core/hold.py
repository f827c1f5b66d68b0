"""Fillers (`verl-mux hold`): work that takes nodes which no job uses or waits for, and leaves when a job wants one.

Runs in the coordinator as a feature of the core; pure. A filler asks for any `num_nodes` of the nodes that it names. It gets them
as soon as that many are *open*: no lease names them, no job that is heard from has asked for them, whatever holds that job's
request back, and they are neither fenced nor draining. So no filler starts where a job is about to begin, and since the requests
of fillers stand in no queue, no job ever waits behind one.

With `least` a node must be expected to stay open for that many seconds, by how long the last phases of the jobs on it were: a job
that uses other nodes comes back when its phase there is over. Where a job has not shown how long that takes, or is between two
phases, it counts as coming at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core.inputs_and_instructions import Instruction, JobEvicted, What
from verl_mux.coordinator.core.leases import Feature
from verl_mux.coordinator.core.queueing import is_shut
from verl_mux.coordinator.core.records import Job, JobState, Lease, State, Usage
from verl_mux.coordinator.core.settings import FILLER_GRACE_S
from verl_mux.errors import UserError


class Hold(Feature):
    """`_called`: by token, the running time at which a filler was told to leave. It is not on record: after a restart the time to
    leave begins when the filler speaks again."""

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
        state, config = self.core.state, self.core.config
        out: list[Instruction] = []
        for request in [request for request in state.requests if request.is_fillers]:
            if state.settle_until is not None or state.jobs[request.job].state is not JobState.LIVE:
                continue
            nodes = [n for n in dict.fromkeys(request.nodes) if is_open(n, state) and not is_shut([n], state, config)]
            if request.least:
                nodes = [node for node in nodes if open_for(node, state, now) >= request.least]
            if len(nodes) >= request.num_nodes:
                out += self.core.give(request, nodes[: request.num_nodes], now)
        return out

    def contended(self, now: float, job: Job) -> None:
        for lease in self.core.state.leases_of(job.name) if job.filler and job.name not in self._unheard else ():
            if set(lease.nodes).isdisjoint(job.contended):
                self._called.pop(lease.token, None)
            else:
                self._called = {lease.token: self.core.running.at(now), **self._called}

    def on_heartbeat(self, now: float, job: Job) -> list[m.Message]:
        self._unheard -= {job.name}
        if not (job.filler and job.contended):
            return []
        self.contended(now, job)
        return [m.Contended(nodes=job.contended, gangs=job.gangs)]  # what was pushed before may have gone astray

    def due(self, now: float, running: float) -> list[What]:
        self._called = {token: since for token, since in self._called.items() if token in self.core.state.leases}
        late = {}
        for token, since in self._called.items():
            job = self.core.state.jobs[self.core.state.leases[token].job]
            grace = max(FILLER_GRACE_S, min(job.grace, self.core.config.lease_timeout))
            if running - since > grace and job.state in (JobState.LIVE, JobState.SILENT):
                reason = f"a job waited for what it held, and it had not left after {grace:g} s"
                late[job.name] = JobEvicted(job=job.name, uid=job.uid, reason=reason)
        return [*late.values()]

    def is_pressing(self) -> bool:
        return bool(self._called)

    def nodes_back(self, now: float, lease: Lease, nodes: list[str]) -> None:
        for node in nodes:
            usage = self.core.state.usage.setdefault(node, Usage(since=lease.granted_at))
            _count(usage, lease, self.core.state, now)

    def about_lease(self, now: float, lease: Lease) -> dict[str, Any]:
        since = self._called.pop(lease.token, None)
        leaving_s = None if since is None else self.core.running.at(now) - since
        return {"filler": True, "leaving_s": leaving_s} if self.core.state.jobs[lease.job].filler else {}


def is_open(node: str, state: State) -> bool:
    held = any(node in lease.nodes for lease in state.leases.values())
    asked = (r for r in state.requests if not r.is_fillers and state.jobs[r.job].state is JobState.LIVE)
    return not held and not any(node in request.nodes for request in asked)


def open_for(node: str, state: State, now: float) -> float:
    """Seconds until a job is expected to ask for the node, on which none runs now; infinite where none will."""
    return min(
        (_comes_back(job, state, now) for job in state.jobs.values() if job.running and node in job.all_nodes), default=math.inf
    )


def _comes_back(job: Job, state: State, now: float) -> float:
    """Seconds until the last of the phases that the job runs or waits for is over, if each takes as long as the last of its
    kind."""
    held = [lease.granted_at + job.last.get(lease.phase, 0.0) - now for lease in state.leases_of(job.name)]
    asked = [job.last.get(request.phase, 0.0) for request in state.requests if request.job == job.name]
    return max(*held, *asked, 0.0, 0.0)


def describe(state: State, node: str, leases: Iterable[Lease], now: float) -> dict[str, Any]:
    """Seconds since the first lease on the node, and for how many jobs and fillers used it; `bubble_filled`: the share that
    fillers used of the time that jobs left, None where they left none. `leases`: those on the node now."""
    leases, known = list(leases), state.usage.get(node)
    since = known.since if known else min((lease.granted_at for lease in leases), default=now)
    total = Usage(since=since, jobs=known.jobs if known else 0.0, fillers=known.fillers if known else 0.0)
    for lease in leases:
        _count(total, lease, state, now)
    bubble = now - total.since - total.jobs
    filled = min(total.fillers / bubble, 1.0) if bubble > 0 else None
    return {"seconds": now - total.since, "jobs_s": total.jobs, "fillers_s": total.fillers, "bubble_filled": filled}


def _count(usage: Usage, lease: Lease, state: State, now: float) -> None:
    if state.jobs[lease.job].filler:
        usage.fillers += now - lease.granted_at
    else:
        usage.jobs += now - lease.granted_at
