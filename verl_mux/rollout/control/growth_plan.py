"""What a replica that joins a rollout takes over: what waits first, then what runs, while all end sooner for it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from verl_mux.rollout.control.migration_plan import EngineSpeed, Move, Replica, Request, seconds_until_idle


class GrowthPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of `mux.rollout.growth`. own: those of the job's rollout nodes that every rollout of it waits for; the others are
    used while no other job wants them. None: off, all are its own.

    min_gain_s: seconds by which the rollout must be expected to end sooner for a node that comes while it runs.
    """

    own: list[str] | None = None
    min_gain_s: float = 1.0


def seconds_won(replicas: Sequence[Replica], joining: Replica, moves: Sequence[Move], speed: EngineSpeed) -> float:
    """How much sooner the rollout ends with these moves, all of them read again."""
    moved = {move.request for move in moves}
    taken = [it for replica in replicas for it in replica.requests if it.id in moved]
    left = [[it for it in replica.requests if it.id not in moved] for replica in replicas]
    stall = sum(it.context for it in taken) / speed.prefill
    after = max(
        [stall + seconds_until_idle([*joining.requests, *taken], speed), *(seconds_until_idle(its, speed) for its in left)]
    )
    return max(seconds_until_idle(replica.requests, speed) for replica in replicas) - after


def pull(replicas: Sequence[Replica], joining: Replica, waiting: Sequence[str], speed: EngineSpeed) -> tuple[Move, ...]:
    """Moves to `joining`, which has no requests yet. waiting: requests that run nowhere; taking one reads nothing again.

    The longest of the replica that would end last is taken while the rollout then ends sooner than without.
    """
    load = {replica.id: list(replica.requests) for replica in replicas}
    taken: list[Request] = []
    stall = 0.0
    moves: list[Move] = []
    while len(taken) < joining.max_requests:
        source, ends = _last(load, speed)
        candidates = [it for it in load[source] if it.id in waiting] or load[source]
        if not candidates:
            break
        it = max(candidates, key=lambda request: request.remaining)
        cost = 0.0 if it.id in waiting else it.context / speed.prefill
        left = [other for other in load[source] if other is not it]
        after = max(seconds_until_idle(left, speed), stall + cost + seconds_until_idle([*taken, it], speed))
        if after >= ends:
            break
        load[source], stall = left, stall + cost
        taken.append(it)
        moves.append(Move(it.id, source, joining.id))
    return tuple(moves)


def _last(load: dict[str, list[Request]], speed: EngineSpeed) -> tuple[str, float]:
    """The replica that ends last, and when."""
    ends = {name: seconds_until_idle(requests, speed) for name, requests in load.items()}
    name = max(ends, key=lambda at: ends[at])
    return name, ends[name]
