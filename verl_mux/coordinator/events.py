"""What goes into the state machine, and what comes out.

In: a message of a job, or something that the server saw by itself, each with the time `now` (epoch seconds) at which
it came. Out: messages to send and lines for the event log.
"""

from __future__ import annotations

from typing import Any, Union

import msgspec

from verl_mux.coordinator import messages as m


class Seen(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Something the server saw by itself about `job`; `uid` None: whichever start of the job is on record."""

    job: str
    uid: str | None = None


class JobSilent(Seen, frozen=True, kw_only=True, tag="JOB_SILENT"):
    """No message within the lease timeout."""


class DriverDied(Seen, frozen=True, kw_only=True, tag="DRIVER_DIED"):
    """The process that registered the job is no more."""


class JobExited(Seen, frozen=True, kw_only=True, tag="JOB_EXITED"):
    """Whoever started the job says that it is over. A job that never registered counts as ended from here on."""


class ProcessesGone(Seen, frozen=True, kw_only=True, tag="PROCESSES_GONE"):
    """No process of a dying job is left."""


class Settled(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="SETTLED"):
    """The time for asserting leases after a loss of memory is over."""


FROM_JOB = (
    *(m.Register, m.LeaseRequest, m.LeaseCancel, m.LeaseRelease, m.LeaseShrink, m.Heartbeat, m.Progress),
    *(m.StepReport, m.MemoryReport, m.PhaseNote, m.MemberReport, m.Detach, m.Deregister, m.Failing),
)
What = Union[(*FROM_JOB, JobSilent, DriverDied, JobExited, ProcessesGone, Settled)]


class Event(msgspec.Struct, frozen=True):
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


Instruction = Union[Send, Log]  # noqa: UP007
