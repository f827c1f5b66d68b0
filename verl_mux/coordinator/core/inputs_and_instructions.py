"""What goes into the state machine, and what comes out.

In: a message of a job, or something that the server saw by itself, each with the time `now` at which it
came, in seconds of a clock that only grows. Out: messages to send and lines for the event log.
"""

from __future__ import annotations

from typing import Any

import msgspec

from verl_mux.coordinator.bus import messages as m


class Seen(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Something the server saw by itself about `job`; `uid` None: whichever start of the job is on record."""

    job: str
    uid: str | None = None


class JobSilent(Seen, frozen=True, kw_only=True, tag="JOB_SILENT"):
    """No message within the lease timeout."""


class JobRevoked(Seen, frozen=True, kw_only=True, tag="JOB_REVOKED"):
    """Silent beyond its lease, and another job waits for what it holds up. `since`: when it had to keep off its nodes."""

    since: float


class PhaseOverdue(Seen, frozen=True, kw_only=True, tag="PHASE_OVERDUE"):
    """The phase under `token` takes far longer than such phases of the job did."""

    token: int


class JobEvicted(Seen, frozen=True, kw_only=True, tag="JOB_EVICTED"):
    """Somebody who may wants the job ended, as if it had failed."""

    reason: str


class DriverDied(Seen, frozen=True, kw_only=True, tag="DRIVER_DIED"):
    """The process that registered the job is no more."""


class JobExited(Seen, frozen=True, kw_only=True, tag="JOB_EXITED"):
    """Whoever started the job says that it is over. One that never registered counts as arrived, where jobs are expected."""


class ProcessesGone(Seen, frozen=True, kw_only=True, tag="PROCESSES_GONE"):
    """No process of a dying job is left."""


class NodeReleased(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="NODE_RELEASED"):
    """Somebody who may says that nothing of a dying job is left on this node, where nobody else can look."""

    node: str


class Settled(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="SETTLED"):
    """The time for asserting leases after a loss of memory is over."""


class SomebodyWasBefore(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="SOMEBODY_WAS_BEFORE"):
    """Somebody spoke who has met an earlier coordinator at this address, of which nothing was known."""


AboutJob = m.AnyFromJob | JobSilent | JobRevoked | PhaseOverdue | JobEvicted | DriverDied | JobExited | ProcessesGone
What = AboutJob | NodeReleased | Settled | SomebodyWasBefore


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
