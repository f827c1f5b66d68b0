"""Placement as a feature of the core: jobs that leave their nodes to the coordinator, and moves of running jobs.

Runs in the coordinator, called by state.py at the moments of `Feature`; pure.
"""

from __future__ import annotations

from collections.abc import Mapping

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core import hosts, registration
from verl_mux.coordinator.core.inputs_and_instructions import (
    HostMeasured,
    Instruction,
    MoveGivenUp,
    MovesDue,
    Planned,
    Send,
    What,
)
from verl_mux.coordinator.core.leases import Feature, Handler
from verl_mux.coordinator.core.placement import moving, observing, placing, prediction
from verl_mux.coordinator.core.records import Job, Lease, Request
from verl_mux.placement.estimator import corrected


class Placement(Feature):
    _resumed_at = 0.0

    def handlers(self) -> Mapping[type, Handler]:
        return {
            Planned: lambda now, job, what: self._start(*placing.carry_out(self.core.state, self.core.config, what, now)),
            MoveGivenUp: lambda now, job, what: placing.give_up(self.core.state, what.job, "it did not come back in time"),
            MovesDue: self._ask_again,
            **dict.fromkeys((HostMeasured, m.HostReport), self._measured),
        }

    def refusal(self, asked: m.Register, nodes: dict[str, list[str]], is_known: bool) -> str | None:
        if asked.wants_placement:
            placing.check(asked, self.core.state, self.core.config)
        elif not asked.filler:
            placing.named_by_hand(asked, nodes, self.core.state)
        return None

    def registered(self, now: float, job: Job, asked: m.Register) -> list[Instruction]:
        return placing.arrive(self.core.state, self.core.config, job, asked) if asked.wants_placement else []

    def why_queued(self, job: Job) -> str | None:
        if job.nodes:
            return None
        queue = [entry.job.name for entry in self.core.state.placed.waiting]
        if before := placing.waits_for(self.core.state, job):
            return f"job {job.name!r} waits until {', '.join(before)} has left for other nodes"
        if job.name in queue:
            return f"job {job.name!r} waits for nodes: no room within everybody's SLO, {queue.index(job.name)} jobs before it"
        return f"job {job.name!r} waits to be placed"

    def answers_later(self, job: Job) -> bool:
        return placing.is_open(self.core.state, job.name)

    def leaves(self, now: float, job: Job, what: m.Deregister) -> None:
        moving.leaves(self.core.state, job, what, now)

    def ended(self, now: float, job: Job) -> list[Instruction]:
        given_up = placing.leave(self.core.state, job)
        return self._start(placing.told_late(self.core.state), given_up)

    def requested(self, now: float, job: Job, request: Request) -> list[Instruction]:
        moved = moving.begins(self.core.state, self.core.config, job, request, now)
        observing.asked(job, request)
        if moved:
            self._correct(job)
        return moved

    def granted(self, now: float, lease: Lease) -> None:
        if (watched := self.core.state.jobs[lease.job].watched) is not None:
            observing.granted(watched, lease.phase, now)

    def released(self, now: float, job: Job, lease: Lease) -> list[Instruction]:
        """What the phase took, and what that changes."""
        state, spec = self.core.state, self.core.state.placed.job(job.name)
        if job.watched is None or spec is None:
            return []
        observing.counted(job.watched, lease, now)
        if job.name in state.moves:  # a phase that ends with a checkpoint for it says nothing of others
            job.watched.free_since = now
            return []
        out = observing.released(job.watched, lease, spec, now)
        self._correct(job, anyway=observing.is_known(job.watched, lease))
        group = state.placed.group_of(job.name)
        if group is not None and lease.phase == "train" and prediction.is_due(group, job, state, self.core.config):
            out.append(prediction.predicted(group, state, self.core.config))
        return out

    def resumed(self, now: float) -> None:
        self._resumed_at = now

    def due(self, now: float, running: float) -> list[What]:
        return moving.due(self.core.state, now, self._resumed_at)

    def move_of(self, job: Job) -> int:
        return moving.asked_of(self.core.state, job)

    def nodes_opened(self) -> None:
        placing.open_again(self.core.state)

    def node_drained(self, node: str) -> None:
        placing.vacate(self.core.state, node)

    def _ask_again(self, now: float, job: None, what: MovesDue) -> list[Instruction]:
        placing.ask_again(self.core.state)
        return []

    def _measured(self, now: float, job: Job, what: HostMeasured | m.HostReport) -> list[Instruction]:
        self._correct(job)
        return []

    def _start(self, started: list[Job], out: list[Instruction]) -> list[Instruction]:
        """Sends their nodes to jobs that asked for nodes, or that they wait."""
        return [*out, *(Send(c, registration.welcome(self.core, job, c)) for job in started for c in job.clients)]

    def _correct(self, job: Job, anyway: bool = False) -> None:
        """The placer learns of a job that turns out other than it was placed by; `anyway`: also of one that does not."""
        spec = self.core.state.placed.job(job.name)
        if job.watched is not None and spec is not None:
            revised = hosts.revised(job, corrected(spec, job.watched.observed) or spec)
            revised = observing.with_move_cost(job.watched, revised)
            if revised is not spec or anyway:
                placing.correct(self.core.state, revised)
