"""What more nodes would change. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from verl_mux.placement.feasibility import Progress
from verl_mux.placement.model import Cluster, Group, JobSpec, Pool
from verl_mux.placement.placer import FIRST_AID
from verl_mux.placement.pool_pairs import PoolPairs, Queued, Record
from verl_mux.placement.search import Move

# No name of a node in a file begins like this.
_LENT = "\0more "
STARTS, KEEPS, CHEAPER = "starts", "keeps its SLO", "costs less"


class More(msgspec.Struct, frozen=True):
    """Nodes that a pool may get, and seconds until one is there."""

    nodes: int
    delay_s: float


class Want(msgspec.Struct, frozen=True):
    """What `job` lacks: so many nodes more than there are, by pool. why: it `starts` on them, `keeps its SLO`, or all together
    `costs less`, by so many USD per hour."""

    job: str
    why: str
    nodes: dict[str, int] = {}
    saves_usd_per_hour: float = 0.0


def wants(
    pairs: PoolPairs, more: Mapping[str, More], progress: Mapping[str, Progress], now: float, moves: bool = True
) -> list[Want]:
    """more: by pool. Whoever waits is looked at in the order in which he would start; of two that would share new nodes the first
    is said to lack them. moves: look at running jobs too, whose move then also takes until the nodes are there."""
    delay_s = max(pool.delay_s for pool in more.values())
    clusters = {pair: _with_more(cluster, more) for pair, cluster in pairs.clusters.items()}
    lent = PoolPairs(clusters, pairs.rules, _slower(pairs.record, delay_s), pairs.closed)
    lent.held, lent.ranks, lent.shares = pairs.held, pairs.ranks, pairs.shares
    seen: set[str] = set()
    found = [_want([move], STARTS, seen) for move in lent.start_waiting(progress)]
    if moves and pairs.rules.repack:
        before = _price(lent)
        rescued, moved = _rescues(lent, progress, now)
        moved += lent.repack(progress, now)
        found += [_want([move], KEEPS, seen) for move in rescued]
        found += [_want(moved, CHEAPER, seen, max(before - _price(lent), 0.0))] if moved else []
    return [want for want in found if want.nodes]


def _rescues(pairs: PoolPairs, progress: Mapping[str, Progress], now: float) -> tuple[list[Move], list[Move]]:
    """Moves out of groups in which nobody could move, for want of nodes; and others that they make pay."""
    rescued: list[Move] = []
    others: list[Move] = []
    for group in [group for group in pairs.record.groups if group.order == FIRST_AID]:
        revision = pairs.revise(group.jobs[0], progress, now)
        names = {action.job for action in revision.actions if action.kind == "move"}
        for move in revision.moves:
            (rescued if move.job in names else others).append(move)
    return rescued, others


def _price(pairs: PoolPairs) -> float:
    usd = 0.0
    for pair in pairs.clusters:
        with pairs.of(pair) as placer:
            usd += sum(placer.search.price.of_group(group) for group in placer.groups.values())
    return usd


def _want(moves: list[Move], why: str, seen: set[str], saves: float = 0.0) -> Want:
    nodes = [node for move in moves for node in (*move.rollout, *move.train)]
    return Want(moves[0].job, why, _fresh(nodes, seen), saves)


def _fresh(nodes: Iterable[str], seen: set[str]) -> dict[str, int]:
    """How many of them are lent, and nobody's before, by pool."""
    lent = {node for node in nodes if node.startswith(_LENT)} - seen
    seen |= lent
    return dict(Counter(sorted(node.removeprefix(_LENT).rpartition(" ")[0] for node in lent)))


def _with_more(cluster: Cluster, more: Mapping[str, More]) -> Cluster:
    rollout, train = (_lent(pool, more[pool.name]) for pool in (cluster.rollout, cluster.train))
    return msgspec.structs.replace(cluster, rollout=rollout, train=train)


def _lent(pool: Pool, more: More) -> Pool:
    names = pool.nodes or ()
    return msgspec.structs.replace(pool, nodes=(*names, *(f"{_LENT}{pool.name} {i}" for i in range(more.nodes))))


def _slower(record: Record, delay_s: float) -> Record:
    """The same, with moves that also wait for nodes."""
    return msgspec.structs.replace(
        record,
        groups=tuple(_with(group, [_delayed(job, delay_s) for job in group.jobs]) for group in record.groups),
        waiting=tuple(_later(entry, delay_s) for entry in record.waiting),
    )


def _later(entry: Queued, delay_s: float) -> Queued:
    elsewhere = {pair: _delayed(job, delay_s) for pair, job in entry.elsewhere.items()}
    return msgspec.structs.replace(entry, job=_delayed(entry.job, delay_s), elsewhere=elsewhere)


def _delayed(job: JobSpec, delay_s: float) -> JobSpec:
    return msgspec.structs.replace(job, move_s=job.load_s + delay_s)


def _with(group: Group, jobs: list[JobSpec]) -> Group:
    pins = tuple(msgspec.structs.replace(pin, job=job) for pin, job in zip(group.pins, jobs, strict=True))
    return msgspec.structs.replace(group, pins=pins)
