"""The calls that a trainer makes for its leases, alone: no coordinator. `client.py` has the same through one."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from verl_mux.coordinator.bus import messages as m
from verl_mux.errors import Failure, UserError
from verl_mux.places.place import Place


class LeaseLost(Failure):
    """The lease ended under the job's hands, or the coordinator holds the whole job for dead."""


@dataclass(frozen=True)
class Lease:
    """Permission for one phase on `nodes`.

    `token` rises with every lease ever granted; `waited_s`: seconds between asking and holding; `granted_at`: epoch
    seconds, by the clock of whoever granted. `wanted` is set as soon as another job waits for one of the nodes, or they may not
    be used any more; who fills what jobs leave gives the lease back then.
    """

    token: int
    nodes: list[str]
    phase: str
    step: int
    waited_s: float
    granted_at: float
    wanted: threading.Event = dataclasses.field(default_factory=threading.Event, compare=False, repr=False)


class LocalMux:
    """No coordinator, no socket, no thread. Has the whole interface of Mux."""

    address: str | None = None

    def __init__(self, job: str, nodes: dict[str, list[str]], filler: bool = False):
        self.job, self.nodes, self.filler = job, nodes, filler
        self._places: dict[str, Place] = {}
        self._tokens = itertools.count(1)
        self._steps: dict[str, int] = {}

    @contextlib.contextmanager
    def phase(
        self, name: str, step: int | None = None, nodes: list[str] | None = None, num_nodes: int = 1, least: float = 0.0
    ) -> Iterator[Lease]:
        """Holds a lease for the block and gives it back on every way out. `step` None counts on from the last one; fillers have
        none."""
        if step is None:
            step = 0 if name == "init" or self.filler else self._steps.get(name, 0) + 1
        lease = self.acquire(name, step=step, nodes=nodes, num_nodes=num_nodes, least=least)
        try:
            yield lease
        except BaseException:
            with contextlib.suppress(Failure):  # what went wrong in the block matters more
                self.release(lease)
            raise
        self.release(lease)

    def acquire(self, phase: str, step: int = 0, nodes: list[str] | None = None, num_nodes: int = 1, least: float = 0.0) -> Lease:
        """Blocks until all nodes (default: the job's for this phase; init: all) are granted; to a filler, any `num_nodes` of them
        that no job uses or waits for, nor is expected to for `least` seconds.

        Raises UserError for what can never be granted, LeaseLost when the coordinator holds the job for dead.
        """
        granted = self._nodes_for(phase, step, nodes)
        granted = granted[:num_nodes] if self.filler else granted
        return Lease(next(self._tokens), granted, phase, step, 0.0, time.time())

    def _nodes_for(self, phase: str, step: int, nodes: list[str] | None) -> list[str]:
        if phase not in m.PHASES:
            raise UserError(f"phase {phase!r} is not known; allowed: {', '.join(m.PHASES)}")
        self._steps[phase] = step
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
        """Samples completed in the running rollout. Raises LeaseLost if its lease was lost."""

    def report_step(self, step: int, metrics: dict[str, float], steps: int | None = None) -> None:
        """Step `step` is finished; metrics such as the mean reward are shown and logged. steps: how many the job runs in all."""

    def memory(self, node: str, tags: dict[str, int]) -> None:
        """Device bytes that the job holds on `node` now under these tags; what was said of other tags stands."""

    def host_memory(self, node: str, kinds: dict[str, int]) -> None:
        """Bytes of host memory that the job's processes hold on `node` now, by kind."""

    def note(self, note: str) -> None:
        """What the job does within its phase: sync, sleep, wake..."""

    def guard(self, fenced: Callable[[], None]) -> None:
        """Has `fenced` called, in a thread of its own, when the nodes held may not be used any more, and again while that is so.

        It is to stop what runs there, and may wait with `wait_until_usable`.
        """

    def wait_until_usable(self) -> None:
        """Blocks while the nodes held may not be used. Raises LeaseLost when they never will be."""

    def members(self, members: Iterable[m.Member]) -> None:
        """All device-holding processes; replaces what was said before.

        The job's nodes are given on only when they are gone.
        """

    def contended(self, phase: str) -> list[str]:
        """This job's nodes of that phase for which another job waits."""
        return []

    def gangs(self, phase: str) -> list[list[str]]:
        """Sets of this job's nodes of that phase: if all of one came back another job would begin."""
        return []

    def has_waiters(self, phase: str) -> bool:
        """Whether another job waits for one of this job's nodes of that phase."""
        return bool(self.contended(phase))

    def place(self, node: str) -> Place:
        """Where the node is, by the coordinator's configuration; bound to no host where that does not say."""
        return self._places.get(node, Place())

    @property
    def filler_grace(self) -> float | None:
        """Seconds that a filler has to leave; None where there is nobody to leave for."""
        return None

    @property
    def lease_timeout(self) -> float | None:
        """Seconds without a sign of life after which the job counts as silent; None where nobody waits for one."""
        return None

    @property
    def move(self) -> int:
        """The number of the move that the job is to make, or of its eviction to disk: at the end of its step it saves, and
        leaves. 0: none."""
        return 0

    def leave_to_move(self, move: int, step: int, saving_s: float) -> None:
        """As `close`, of a job that comes back under its name, on nodes that are kept for it or where there is room again, and
        goes on after `step`.
        Saving took so many seconds of that step."""

    def fail(self, reason: str) -> None:
        """Ends the job while its memory may still be on its nodes: they come free when its processes are gone."""

    def close(self, reason: str = "") -> None:
        """Ends the job, or only this client if it is not the job's first, and gives back what it holds.

        `reason`: why, if it is not that the job has finished.
        """
