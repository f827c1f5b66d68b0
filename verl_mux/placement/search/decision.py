"""What a placer answers: where a job goes and why not elsewhere, and which jobs are to start or to move."""

from __future__ import annotations

import msgspec

from verl_mux.placement.model import Group
from verl_mux.placement.search.extension import STRATEGIES
from verl_mux.placement.time.periods import Period, periods_by_job


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """A place that was not taken. group None: nodes of its own, by the strategy `isolated` or `colocated`. usd_per_hour: what it
    would have added; work_usd_per_hour: the same for as much work, where that is what places are compared by (price.py)."""

    group: str | None
    strategy: str
    usd_per_hour: float | None
    why: str
    work_usd_per_hour: float | None = None


# By whether both phases run on its training nodes.
OWN_NODES = {False: "isolated", True: "colocated"}


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """outcome: `placed`, or `queued` in a finite cluster that has no room now. rollout, train: nodes of its phases, the same ones
    if it is colocated. usd_per_hour: added by the job. periods: of every job of its group, settled. wait: why it is queued."""

    job: str
    outcome: str
    strategy: str | None = None
    group: str | None = None
    rollout: tuple[str, ...] = ()
    train: tuple[str, ...] = ()
    order: str = "fifo"
    usd_per_hour: float = 0.0
    periods: dict[str, Period] = {}
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
    """What was done for promises that were about to break. kind: `order` (of the group's phases), `move` (of `job`, to
    elsewhere), or `priority` (of `job`, since nothing keeps all of them)."""

    kind: str
    group: str
    job: str
    reason: str


class Revision(msgspec.Struct, frozen=True):
    """What follows from new estimates: who is to move or to start, and what was done for whose sake."""

    moves: tuple[Move, ...] = ()
    actions: tuple[Action, ...] = ()


def decision_for(group: Group, usd_per_hour: float) -> Decision:
    """The decision that put the last job of `group` there, at `usd_per_hour` more for all groups."""
    pin = group.pins[-1]
    return Decision(
        job=pin.job.name,
        outcome="placed",
        strategy=strategy(group),
        group=group.name,
        rollout=pin.runs_rollouts_on,
        train=pin.train,
        order=group.order,
        usd_per_hour=usd_per_hour,
        periods=periods_by_job(group),
    )


def strategy(group: Group) -> str:
    """How the last job of the group joined it."""
    *others, pin = group.pins
    if not others:
        return OWN_NODES[pin.job.colocated]
    new_rollout = not set(pin.rollout) <= {node for other in others for node in other.rollout}
    new_train = not set(pin.train) <= {node for other in others for node in other.train}
    return STRATEGIES[new_rollout, new_train]
