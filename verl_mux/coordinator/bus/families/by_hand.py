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


class SetBudget(Message, kw_only=True, frozen=True, tag="SET_BUDGET"):
    """The job may cost so many USD in all. As Evict."""

    job: limits.Name
    usd: limits.Price


class Free(Message, kw_only=True, frozen=True, tag="FREE"):
    """Nothing is left of jobs that ended where nobody can look: of the job `name`, or on that node or host. As Evict."""

    name: limits.Name


class Drain(Message, kw_only=True, frozen=True, tag="DRAIN"):
    """Nobody gets this node any more; who holds it keeps it. `undo`: from now on again. As Evict."""

    node: limits.Name
    undo: bool = False


class NodeAdd(Message, kw_only=True, frozen=True, tag="NODE_ADD"):
    """A node comes to a pool: as the pool's first one, but for its place, whether it may vanish (`spot`), and its price, if that
    is another. As Evict."""

    pool: limits.Name
    node: limits.ShownName
    host: limits.ShownName | None = None
    gpu_ids: limits.GpuIds | None = None
    spot: bool = False
    usd_per_hour: limits.Price | None = None


class NodeRemove(Message, kw_only=True, frozen=True, tag="NODE_REMOVE"):
    """Nobody new gets the node; it is no more when nobody needs it. `if_idle`: only if that is so now. `gone`: its host is no
    more, so jobs on it are over. As Evict."""

    node: limits.Name
    if_idle: bool = False
    gone: bool = False


class Reload(Message, kw_only=True, frozen=True, tag="RELOAD"):
    """Read the configuration file again. As Evict."""
