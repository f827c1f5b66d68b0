"""Questions to placement, its answers, and the record between them: plain data that can be journaled.

Pure. Asked and read by the coordinator, `verl-mux plan` and research/; answered by planner.py.
"""

from __future__ import annotations

import functools

import msgspec

from verl_mux.placement.groups import STRATEGIES
from verl_mux.placement.model import Group, JobSpec

# --- questions ---


class Arrive(msgspec.Struct, frozen=True, tag=True):
    """Where is this job to go? pair, elsewhere: as of a waiting job (`Queued`)."""

    job: JobSpec
    pair: str = ""
    elsewhere: dict[str, JobSpec] = {}


class Leave(msgspec.Struct, frozen=True, tag=True):
    """What follows when this job is gone?"""

    name: str


class Open(msgspec.Struct, frozen=True, tag=True):
    """What follows when nodes are available again?"""


class Correct(msgspec.Struct, frozen=True, tag=True):
    """What follows when the job, where it is, turns out to be like this?"""

    job: JobSpec


class Vacate(msgspec.Struct, frozen=True, tag=True):
    """Where can the jobs go that are on this node, which is to be emptied?"""

    node: str


class Again(msgspec.Struct, frozen=True, tag=True):
    """Does any move pay by now?"""


Question = Arrive | Leave | Correct | Open | Vacate | Again


# --- answers ---


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """A place that was not taken. group None: nodes of its own, by the strategy `isolated` or `colocated`. usd_per_hour: what it
    would have added; work_usd_per_hour: the same for as much work, where places are compared by that (`Price` in layouts.py).
    why: the reason; empty: the job could go there."""

    group: str | None
    strategy: str
    usd_per_hour: float | None
    why: str
    work_usd_per_hour: float | None = None


# By whether both phases run on its training nodes.
OWN_NODES = {False: "isolated", True: "colocated"}


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """outcome: `placed`, or `queued` in a finite cluster that has no room now. rollout, train: nodes of its phases, the same ones
    if it is colocated. usd_per_hour: added by the job. wait: why it is queued."""

    job: str
    outcome: str
    strategy: str | None = None
    group: str | None = None
    rollout: tuple[str, ...] = ()
    train: tuple[str, ...] = ()
    order: str = "fifo"
    usd_per_hour: float = 0.0
    alternatives: tuple[Alternative, ...] = ()
    wait: str = ""

    @property
    def was(self) -> tuple[str | None, str | None]:
        """Group and strategy as in an Alternative."""
        return (None if self.strategy in OWN_NODES.values() else self.group), self.strategy


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """A job is to start on these nodes, out of the queue (kind `start`), or to go there from elsewhere (`move`), where
    it starts cold, in `load_s` seconds, with the iteration it is in."""

    job: str
    kind: str
    group: str
    rollout: tuple[str, ...]
    train: tuple[str, ...]
    load_s: float = 0.0


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """What was done for an SLO that was about to be missed. kind: `order` (of the group's phases), `move` (of `job`, to
    elsewhere), or `priority` (of `job`, since nothing keeps all SLOs)."""

    kind: str
    group: str
    job: str
    reason: str


class Queued(msgspec.Struct, frozen=True):
    """A job that waits for room. passed: younger jobs that started before it. pair: of pools, in which it is as `job` says, ""
    for the first; elsewhere: as it is in others that could hold it."""

    job: JobSpec
    passed: int = 0
    pair: str = ""
    elsewhere: dict[str, JobSpec] = {}


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """moves: jobs that start or move. actions: what was done for SLOs at risk. decision: about the job that arrived, with the
    alternatives; spec: that job as it was decided on; because: the reason, the end of a sentence.

    What becomes of the record: changed, gone: groups, the latter by name; waiting, named, moved_at: as in Record. pending: moves
    are in view that may pay later."""

    moves: tuple[Move, ...] = ()
    actions: tuple[Action, ...] = ()
    decision: Decision | None = None
    spec: JobSpec | None = None
    because: str = ""
    changed: tuple[Group, ...] = ()
    gone: tuple[str, ...] = ()
    waiting: tuple[Queued, ...] = ()
    named: int = 0
    moved_at: tuple[float, ...] = ()
    pending: bool = False


def decision_for(group: Group, usd_per_hour: float) -> Decision:
    """The decision that put the last job of `group` there, at `usd_per_hour` more for all groups."""
    *others, pin = group.pins
    new_rollout = not set(pin.rollout) <= {node for other in others for node in other.rollout}
    new_train = not set(pin.train) <= {node for other in others for node in other.train}
    return Decision(
        job=pin.job.name,
        outcome="placed",
        strategy=STRATEGIES[new_rollout, new_train] if others else OWN_NODES[pin.job.colocated],
        group=group.name,
        rollout=pin.runs_rollouts_on,
        train=pin.train,
        order=group.order,
        usd_per_hour=usd_per_hour,
    )


# --- the record ---


class Record(msgspec.Struct, frozen=True, kw_only=True, dict=True):  # dict: for the index
    """The whole memory of a planner. groups: as they are. waiting: in order of arrival. named: groups that were ever named, for
    the next one's name. moved_at: seconds, of the moves of the last hour that count against the limit. version: number of
    changes, so that a kept planner can be compared with it."""

    groups: tuple[Group, ...] = ()
    waiting: tuple[Queued, ...] = ()
    named: int = 0
    moved_at: tuple[float, ...] = ()
    version: int = 0

    @functools.cached_property
    def by_name(self) -> dict[str, Group]:
        return {group.name: group for group in self.groups}

    @functools.cached_property
    def _home(self) -> dict[str, Group]:
        return {job.name: group for group in self.groups for job in group.jobs}

    def job(self, name: str) -> JobSpec | None:
        """The last estimates of a job that is placed or waits."""
        if (group := self._home.get(name)) is not None:
            return group.pin_of(name).job
        return next((entry.job for entry in self.waiting if entry.job.name == name), None)

    def group_of(self, name: str) -> Group | None:
        return self._home.get(name)

    def after(self, answer: Answer) -> Record:
        """The record that the answer makes of this one."""
        groups = {name: group for name, group in self.by_name.items() if name not in answer.gone}
        groups.update((group.name, group) for group in answer.changed)
        version = self.version + 1
        return Record(
            groups=tuple(groups.values()), waiting=answer.waiting, named=answer.named, moved_at=answer.moved_at, version=version
        )
