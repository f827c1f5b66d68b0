"""What a replica that joins a rollout takes over: what waits first, then what runs, while all end sooner for it."""

from __future__ import annotations

from collections.abc import Sequence

from verl_mux.rollout.control.migration_plan import EngineSpeed, Move, Replica, Request, seconds_until_idle


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
