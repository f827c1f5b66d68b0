"""A job on its own: every lease is granted at once, and the vocabulary that it shares with a coordinated one."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from verl_mux.coordinator.messages import PHASES, SIDES
from verl_mux.errors import Failure, UserError


class LeaseLost(Failure):
    """The lease ended under the job's hands, or the coordinator holds the whole job for dead."""


@dataclass(frozen=True)
class Lease:
    """Permission for one phase on `nodes`.

    `token` rises with every lease ever granted; `waited_s`: seconds between asking and holding; `granted_at`: epoch
    seconds, by the clock of whoever granted.
    """

    token: int
    nodes: list[str]
    phase: str
    step: int
    waited_s: float
    granted_at: float


class LocalMux:
    """No coordinator, no socket, no thread. Has the whole interface of Mux."""

    address: str | None = None

    def __init__(self, job: str, nodes: dict[str, list[str]]):
        self.job, self.nodes = job, nodes
        self._tokens = itertools.count(1)
        self._steps: dict[str, int] = {}

    @contextlib.contextmanager
    def phase(self, name: str, step: int | None = None, nodes: list[str] | None = None) -> Iterator[Lease]:
        """Holds a lease for the block and gives it back on every way out. `step` None counts on from the last one."""
        if step is None:
            step = 0 if name == "init" else self._steps.get(name, 0) + 1
        lease = self.acquire(name, step=step, nodes=nodes)
        try:
            yield lease
        except BaseException:
            with contextlib.suppress(Failure):  # what went wrong in the block matters more
                self.release(lease)
            raise
        self.release(lease)

    def acquire(self, phase: str, step: int = 0, nodes: list[str] | None = None) -> Lease:
        """Blocks until all nodes (default: the job's for this phase; init: all) are granted.

        Raises UserError for what can never be granted, LeaseLost when the coordinator holds the job for dead.
        """
        return Lease(next(self._tokens), self._nodes_for(phase, step, nodes), phase, step, 0.0, time.time())

    def _nodes_for(self, phase: str, step: int, nodes: list[str] | None) -> list[str]:
        if phase not in PHASES:
            raise UserError(f"phase {phase!r} is not known; allowed: {', '.join(PHASES)}")
        self._steps[phase] = step
        if nodes is not None:
            return list(nodes)
        sides = SIDES if phase == "init" else (phase,)
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
        """Samples completed in the running rollout. Raises LeaseLost if its lease was lost."""

    def report_step(self, step: int, metrics: dict[str, float]) -> None:
        """Step `step` is finished; metrics such as the mean reward are shown and logged."""

    def memory(self, node: str, tags: dict[str, int]) -> None:
        """Device bytes that the job holds on `node` now under these tags; what was said of other tags stands."""

    def note(self, note: str) -> None:
        """What the job does within its phase: sync, sleep, wake..."""

    def members(self, members: Iterable[tuple[str, int, float]]) -> None:
        """All device-holding processes as (host, pid, creation time); replaces what was said before.

        The job's nodes are given on only when they are gone.
        """

    def contended(self, phase: str) -> list[str]:
        """This job's nodes of that phase for which another job waits."""
        return []

    def has_waiters(self, phase: str) -> bool:
        """Whether another job waits for one of this job's nodes of that phase."""
        return bool(self.contended(phase))

    def cpus(self, node: str) -> list[int] | None:
        """The CPUs that the coordinator's configuration names for the node."""
        return None

    def fail(self, reason: str) -> None:
        """Ends the job while its memory may still be on its nodes: they come free when its processes are gone."""

    def close(self) -> None:
        """Ends the job, or only this client if it is not the job's first, and gives back what it holds."""
