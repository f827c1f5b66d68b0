"""What goes into the state machine, and what comes out. Data alone, made by server.py, the journal and the core.

In: a message of a job, or something that the server saw by itself, each with the time `now` at which it
came, in seconds of a clock that only grows. Out: messages to send and lines for the event log.
"""

from __future__ import annotations

from typing import Any

import msgspec

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core.settings import Pool
from verl_mux.placement.model import Group
from verl_mux.placement.planner import Queued
from verl_mux.placement.search import Move


class Seen(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Something the server saw by itself about `job`; `uid` None: whichever start of the job is on record."""

    job: str
    uid: str | None = None


class JobSilent(Seen, frozen=True, kw_only=True, tag="JOB_SILENT"):
    """No message within the lease timeout."""


class JobRevoked(Seen, frozen=True, kw_only=True, tag="JOB_REVOKED"):
    """Silent beyond its lease, and another job waits for what it holds up, or silent for far longer. `since`: when it had to keep
    off its nodes. `waited`: whether another job waits."""

    since: float
    waited: bool = True


class PhaseOverdue(Seen, frozen=True, kw_only=True, tag="PHASE_OVERDUE"):
    """The phase under `token` takes far longer than such phases of the job did."""

    token: int


class JobEvicted(Seen, frozen=True, kw_only=True, tag="JOB_EVICTED"):
    """An operator, or the coordinator itself, wants the job ended, as if it had failed."""

    reason: str


class DriverDied(Seen, frozen=True, kw_only=True, tag="DRIVER_DIED"):
    """The process that registered the job is no more."""


class JobExited(Seen, frozen=True, kw_only=True, tag="JOB_EXITED"):
    """The job's launcher says that the job is over. A job that never registered then counts as arrived, where jobs are
    expected."""


class ProcessesGone(Seen, frozen=True, kw_only=True, tag="PROCESSES_GONE"):
    """No process of a dying job is left."""


class NodeEmpty(Seen, frozen=True, kw_only=True, tag="NODE_EMPTY"):
    """All that look at the node's host saw no process of the dying job there."""

    node: str


class NodesOwed(Seen, frozen=True, kw_only=True, tag="NODES_OWED"):
    """Nothing looks at `host` (its name and PID namespace, or the name alone): these nodes of the dying job are fenced from now
    on, and what may be left of the job there keeps it on record no longer."""

    host: str
    nodes: list[str]


class HostMeasured(Seen, frozen=True, kw_only=True, tag="HOST_MEASURED"):
    """Host memory of the job's processes on the node, in bytes by kind, as the agent of the node's host saw it."""

    node: str
    bytes: dict[str, int]


class HostSeen(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="HOST_SEEN"):
    """An agent speaks from there: the first, or again, or after a boot."""

    host: m.HostName


class HostGone(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="HOST_GONE"):
    """Its agent was not heard for as long as a lease is good."""

    host: str


class OwedPaid(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="OWED_PAID"):
    """Nothing is left on the host of the job with this uid."""

    host: str
    uid: str


class HostReleased(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="HOST_RELEASED"):
    """An operator says that nothing of dying jobs is left on this host."""

    host: str


class PoolsChanged(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="POOLS_CHANGED"):
    """The configuration file was read again, and the change is allowed (hosts.py)."""

    pools: dict[str, Pool]


class NodeReleased(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="NODE_RELEASED"):
    """An operator says that nothing of a dying job is left on this node, where nothing looks."""

    node: str


class Settled(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="SETTLED"):
    """The time for asserting leases after a loss of memory is over."""


class MoveGivenUp(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="MOVE_GIVEN_UP"):
    """The job left for other nodes, and has not come back for too long."""

    job: str


class MovesDue(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="MOVES_DUE"):
    """Moves that did not pay when they were last thought of may pay by now."""


class SomebodyWasBefore(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="SOMEBODY_WAS_BEFORE"):
    """A client spoke that has met an earlier coordinator at this address, of which nothing was known."""


class Said(msgspec.Struct, frozen=True):
    """A line for the event log."""

    event: str
    about: dict[str, Any]


class Planned(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="PLANNED"):
    """What the placer answers to the first of its questions: groups that changed or are no more, who waits, and who is to start
    or to move. `moved_at`: as in Record. `pending`: moves may come to pay. `version`: of the record it was asked about; an answer
    to another one is void.
    `because`: why the job that came is where it is (placement/explain.py)."""

    version: int
    changed: list[Group]
    gone: list[str]
    waiting: list[Queued]
    named: int
    moves: list[Move] = []
    said: list[Said] = []
    moved_at: list[float] = []
    pending: bool = False
    because: str = ""


_Seen = JobSilent | JobRevoked | PhaseOverdue | JobEvicted | DriverDied | JobExited | ProcessesGone | NodeEmpty | NodesOwed
AboutJob = m.AnyFromJob | _Seen | HostMeasured
AboutHosts = HostSeen | HostGone | OwedPaid | HostReleased | NodeReleased | PoolsChanged
AboutMoves = Planned | MoveGivenUp | MovesDue
What = AboutJob | AboutHosts | AboutMoves | Settled | SomebodyWasBefore


class Input(msgspec.Struct, frozen=True):
    now: float
    what: What


class Send(msgspec.Struct, frozen=True):
    client: str
    message: m.Message


class Log(msgspec.Struct, frozen=True):
    """One line for the event log; `duration` in seconds."""

    event: str
    extra: dict[str, Any]
    duration: float | None = None
    step: int | None = None


Instruction = Send | Log
