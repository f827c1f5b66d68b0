"""What more nodes would change: a placer that has them is asked who would start, and which moves would save something.
Read-only."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from verl_mux.scheduling.model import Cluster, Group, JobSpec, Pool
from verl_mux.scheduling.placer.placer import FIRST_AID, Placer
from verl_mux.scheduling.placer.record import Queued, Record, restore
from verl_mux.scheduling.search.decision import Move
from verl_mux.scheduling.search.rules import Rules
from verl_mux.scheduling.time.forecast import Progress

# No name of a node in a file begins like this.
_LENT = "\0more "
STARTS, KEEPS, CHEAPER = "starts", "keeps its SLO", "costs less"


class More(msgspec.Struct, frozen=True):
    """Nodes that a pool may get, and seconds until one is there."""

    nodes: int
    delay_s: float


class Want(msgspec.Struct, frozen=True):
    """What `job` lacks: so many nodes more than there are. why: it `starts` on them, `keeps its SLO`, or all together `costs
    less`, by so many USD per hour."""

    job: str
    why: str
    rollout: int
    train: int
    saves_usd_per_hour: float = 0.0


def wants(
    record: Record,
    cluster: Cluster,
    rules: Rules,
    more: tuple[More, More],
    progress: Mapping[str, Progress],
    now: float,
    held: frozenset[str] = frozenset(),
    moves: bool = True,
) -> list[Want]:
    """Of a rollout and a training pool. Whoever waits is looked at in the order in which he would start; of two that would share
    new nodes the first is said to lack them. moves: look at running jobs too, whose move then also takes until the nodes are
    there. held: jobs that may not move."""
    delay_s = max(side.delay_s for side in more)
    lent = msgspec.structs.replace(cluster, rollout=_lent(cluster.rollout, more[0]), train=_lent(cluster.train, more[1]))
    placer = restore(_slower(record, delay_s), lent, rules)
    placer.search.held = held
    seen: set[str] = set()
    found = [_want(move, STARTS, seen) for move in placer.start_waiting(progress)]
    if moves and rules.repack:
        before = _price(placer)
        rescued, moved = _rescues(placer, progress, now)
        moved += placer.repack(progress, now)
        found += [_want(move, KEEPS, seen) for move in rescued]
        found += [_all_of(moved, max(before - _price(placer), 0.0), seen)] if moved else []
    return [want for want in found if want.rollout or want.train]


def _rescues(placer: Placer, progress: Mapping[str, Progress], now: float) -> tuple[list[Move], list[Move]]:
    """Moves out of groups in which nobody could move, for want of nodes; and others that they make pay."""
    rescued: list[Move] = []
    others: list[Move] = []
    for group in [group for group in placer.groups.values() if group.order == FIRST_AID]:
        revision = placer.revise(group.jobs[0], progress, now)
        names = {action.job for action in revision.actions if action.kind == "move"}
        for move in revision.moves:
            (rescued if move.job in names else others).append(move)
    return rescued, others


def _price(placer: Placer) -> float:
    return sum(placer.search.price.of_group(group) for group in placer.groups.values())


def _want(move: Move, why: str, seen: set[str]) -> Want:
    return Want(move.job, why, _fresh(move.rollout, seen), _fresh(move.train, seen))


def _all_of(moved: list[Move], saves: float, seen: set[str]) -> Want:
    rollout = sum(_fresh(move.rollout, seen) for move in moved)
    return Want(moved[0].job, CHEAPER, rollout, sum(_fresh(move.train, seen) for move in moved), saves)


def _fresh(nodes: Collection[str], seen: set[str]) -> int:
    """How many of them are lent, and nobody's before."""
    lent = {node for node in nodes if node.startswith(_LENT)} - seen
    seen |= lent
    return len(lent)


def _lent(pool: Pool, more: More) -> Pool:
    names = pool.nodes or ()
    return msgspec.structs.replace(pool, nodes=(*names, *(f"{_LENT}{pool.name} {i}" for i in range(more.nodes))))


def _slower(record: Record, delay_s: float) -> Record:
    """The same, with moves that also wait for nodes."""
    return msgspec.structs.replace(
        record,
        groups=tuple(_with(group, [_delayed(job, delay_s) for job in group.jobs]) for group in record.groups),
        waiting=tuple(Queued(_delayed(entry.job, delay_s), entry.passed) for entry in record.waiting),
    )


def _delayed(job: JobSpec, delay_s: float) -> JobSpec:
    return msgspec.structs.replace(job, move_s=job.load_s + delay_s)


def _with(group: Group, jobs: list[JobSpec]) -> Group:
    pins = tuple(msgspec.structs.replace(pin, job=job) for pin, job in zip(group.pins, jobs, strict=True))
    return msgspec.structs.replace(group, pins=pins)
