"""The coordinator's own rules of who may go next (`coordinator/core/queueing.py`), over records of jobs that are run again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from verl_mux.coordinator.core import queueing
from verl_mux.coordinator.core.records import Job, Lease, Request, State
from verl_mux.coordinator.core.settings import Config, Mode, Segment


class LeaseQueue:
    """ask -> (granted -> give_back)*. nodes: of each job by side, in the order in which the jobs came. steps: of each."""

    def __init__(self, nodes: Mapping[str, Mapping[str, Sequence[str]]], steps: Mapping[str, int], mode: Mode) -> None:
        jobs = {
            name: Job(
                name=name, uid=name, order=order, since=0.0, nodes={side: list(its) for side, its in sides.items()},
                steps=steps[name], asked=1, has_asked=True,
            )
            for order, (name, sides) in enumerate(nodes.items())
        }  # fmt: skip
        self._state = State(jobs=jobs, started=True)
        self._config = Config(pools={}, schedule=[Segment(mode=mode)])

    def ask(self, job: str, phase: str, step: int) -> None:
        """For all nodes of the phase's side."""
        nodes = self._state.jobs[job].nodes[phase]
        self._state.jobs[job].asked = step
        key = f"{phase} {step}"
        self._state.requests.append(Request(key=key, job=job, client=job, phase=phase, step=step, nodes=nodes, asked_at=0.0))

    def granted(self) -> Iterator[str]:
        """Jobs whose requests are granted now; one after the other, since each may change what follows."""
        while found := queueing.grantable(self._state, self._config):
            request = found[0]
            self._state.requests.remove(request)
            self._state.token += 1
            self._state.leases[self._state.token] = Lease(
                token=self._state.token, key=request.key, job=request.job, client=request.client, phase=request.phase,
                step=request.step, nodes=list(request.nodes), granted_at=0.0,
            )  # fmt: skip
            yield request.job

    def give_back(self, job: str, nodes: Sequence[str] | None = None) -> None:
        """What the job holds, or only these nodes of it."""
        for lease in self._state.leases_of(job):
            left = [] if nodes is None else [node for node in lease.nodes if node not in nodes]
            if left:
                self._state.leases[lease.token] = msgspec.structs.replace(lease, nodes=left)
            else:
                del self._state.leases[lease.token]

    def ended(self, job: str, step: int) -> None:
        """A step is over."""
        self._state.jobs[job].reported = step

    def gangs(self, job: str) -> list[list[str]]:
        """Sets of nodes that it holds; if all of one came back, another job would begin."""
        return queueing.gangs(self._state.jobs[job], self._state, self._config)
