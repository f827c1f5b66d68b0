"""Which inputs a job may meet in which of its states, and the state it is in then. Pure."""

from __future__ import annotations

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core.inputs_and_instructions import (
    AboutJob,
    DriverDied,
    HostMeasured,
    JobEvicted,
    JobExited,
    JobRevoked,
    JobSilent,
    NodeEmpty,
    NodesOwed,
    PhaseOverdue,
    ProcessesGone,
)
from verl_mux.coordinator.core.records import Job, JobState


class IllegalMove(ValueError):
    """The input is not allowed in the job's state."""


class UnknownJob(LookupError):
    """No record of this start of the job."""


ABSENT = None
LIVE, SILENT, DYING, ENDED = JobState.LIVE, JobState.SILENT, JobState.DYING, JobState.ENDED

_TALK: tuple[type[m.FromJob], ...] = (
    *(m.Register, m.LeaseRequest, m.LeaseCancel, m.LeaseRelease, m.LeaseShrink, m.Heartbeat, m.Detach),
    *(m.Progress, m.StepReport, m.MemoryReport, m.HostReport, m.PhaseNote, m.MemberReport),
)
_DEATHS: dict[type, JobState] = dict.fromkeys((m.Failing, DriverDied, JobExited, JobEvicted), DYING)
_HEARD: dict[type, JobState] = dict.fromkeys(_TALK, LIVE)
MOVES: dict[JobState | None, dict[type, JobState]] = {
    ABSENT: {m.Register: LIVE, JobExited: ENDED},
    LIVE: {**_HEARD, m.Deregister: ENDED, PhaseOverdue: LIVE, HostMeasured: LIVE, JobSilent: SILENT, **_DEATHS},
    SILENT: {**_HEARD, m.Deregister: ENDED, HostMeasured: SILENT, JobRevoked: DYING, **_DEATHS},
    DYING: {JobExited: DYING, HostMeasured: DYING, NodeEmpty: DYING, NodesOwed: DYING, ProcessesGone: ENDED},
    ENDED: {m.Register: LIVE, JobExited: ENDED},
}


def next_state(job: Job | None, what: AboutJob) -> JobState:
    """`job` None: there is no record of it. Raises IllegalMove."""
    state = job.state if job else ABSENT
    if (after := MOVES[state].get(type(what))) is None:
        known_as = state.value if state else "absent"
        raise IllegalMove(f"job {what.job!r} is {known_as}: {type(what).__name__} is not allowed")
    return after
