"""What whoever started a job, or an operator, says to the coordinator. All may be repeated."""

from __future__ import annotations

from verl_mux.coordinator.bus import limits
from verl_mux.coordinator.bus.families.base import Message


class JobOver(Message, kw_only=True, frozen=True, tag="JOB_OVER"):
    """The driver of this start of the job (its `uid`) ended. Answered with JobEnded, or Unknown while another start runs; may be
    repeated. One that never registered is not waited for any more, where jobs are expected (`expect_jobs`)."""

    job: limits.ShownName
    uid: limits.Name


class Evict(Message, kw_only=True, frozen=True, tag="EVICT"):
    """End this job as if it had failed. Answered with Done or Refused; may be repeated."""

    job: limits.Name


class Free(Message, kw_only=True, frozen=True, tag="FREE"):
    """Nothing is left of jobs that ended where nobody can look: of the job `name`, or on that node or host. As Evict."""

    name: limits.Name
