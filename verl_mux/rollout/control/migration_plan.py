"""Whether to gather a rollout's tail on few replicas, and what moves where, so that another job gets the freed nodes.

Moving costs: a moved request's tokens are prefilled again on its new replica, which stalls that one's decoding, and the
replicas that keep the tail decode bigger batches, so the tail ends later. It pays when the node-seconds freed for the
waiting job exceed the node-seconds the kept replicas run longer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec

# Not measured: a prefill computes so many tokens in the time in which decoding the present batch computes as many steps.
_PREFILL_PER_DECODE = 8.0


@dataclass(frozen=True, slots=True)
class Request:
    """A running request. context: prompt and response tokens so far. remaining: tokens still expected."""

    id: str
    context: int
    remaining: float


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine on `nodes`. max_requests, max_tokens: what it can run at once, tokens being context plus remaining."""

    id: str
    nodes: tuple[str, ...]
    requests: tuple[Request, ...]
    max_requests: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """prefill: tokens a second. step_s: seconds for one token of each request, plus step_per_request_s for each request."""

    prefill: float
    step_s: float
    step_per_request_s: float


class MigrationPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of `mux.rollout.migration`. threshold: share of the responses done before anything moves.

    min_gain_s: node-seconds a move must win. max_slowdown: how much later than without moving the tail may end, as a share of
    its remaining time.
    """

    threshold: float = 0.8
    min_gain_s: float = 1.0
    max_slowdown: float = 0.25
    enable: bool = False


@dataclass(frozen=True, slots=True)
class Move:
    """Abort `request` on `source`, keep its tokens, and go on with it on `target`."""

    request: str
    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Migration:
    """moves, and the replicas they empty, in the order to free them: the next is started when one is done.

    gain_s: node-seconds won. tail_s: seconds until the last response; tail_before_s: without moving.
    reprefill_tokens: what is prefilled again.
    """

    moves: tuple[Move, ...]
    freed: tuple[str, ...]
    kept: tuple[str, ...]
    gain_s: float
    tail_s: float
    tail_before_s: float
    reprefill_tokens: int


@dataclass(frozen=True, slots=True)
class Stay:
    """Move nothing. reason: one clause for the log."""

    reason: str


def plan(
    replicas: Sequence[Replica], done: int, total: int, gangs: Sequence[Collection[str]], speed: EngineSpeed,
    policy: MigrationPolicy,
) -> Migration | Stay:  # fmt: skip
    """The best migration at this moment. done, total: responses of this step. gangs: sets of nodes; if all of one come back,
    another job begins. Nothing else is worth freeing."""
    asked = [freed for gang in gangs if (freed := [r for r in replicas if not set(gang).isdisjoint(r.nodes)])]
    if not asked:
        return Stay("no other job could begin on the nodes")
    if done < policy.threshold * total:
        return Stay(f"{done} of {total} responses are done, below the threshold of {policy.threshold:g}")
    if not any(r.requests for r in replicas):
        return Stay("nothing runs any more")
    if len(replicas) < 2:
        return Stay("the tail is on one replica already")
    chosen = [freed for freed in _growing(asked) if len(freed) < len(replicas)]
    if not chosen:
        return Stay("another job could begin on all of the nodes alone")
    options = [_gathered(freed, [r for r in replicas if r not in freed], speed) for freed in chosen]
    fitting = [option for option in options if option is not None]
    if not fitting:
        return Stay("the kept replicas cannot hold the moved requests")
    return _judge(max(fitting, key=lambda option: option.gain_s), policy)


def _growing(asked: Sequence[Sequence[Replica]]) -> list[list[Replica]]:
    """Those of one gang, then of two, and so on; the gangs with the least work on them first."""
    freed: dict[str, Replica] = {}
    out = []
    for its in sorted(asked, key=lambda its: sum(_work(r.requests) for r in its)):
        freed |= {r.id: r for r in its}
        out.append(sorted(freed.values(), key=lambda r: _work(r.requests)))
    return out


def _judge(best: Migration, policy: MigrationPolicy) -> Migration | Stay:
    if best.gain_s < policy.min_gain_s:
        return Stay(f"moving {best.reprefill_tokens} tokens wins {best.gain_s:.1f} node-seconds, below {policy.min_gain_s:g}")
    if best.tail_s > (1 + policy.max_slowdown) * best.tail_before_s:
        return Stay(f"the tail would take {best.tail_s:.1f} s and not {best.tail_before_s:.1f} s")
    return best


def _gathered(freed: Sequence[Replica], kept: Sequence[Replica], speed: EngineSpeed) -> Migration | None:
    """Everything of `freed` on `kept`, the longest first to whoever then ends first; None where it does not fit."""
    loads = [_Load.of(replica) for replica in kept]
    moves: list[Move] = []
    moving = [(request, source) for source in freed for request in source.requests]
    for request, source in sorted(moving, key=lambda pair: -pair[0].remaining):
        fitting = [load for load in loads if load.has_room_for(request)]
        if not fitting:
            return None
        target = min(fitting, key=lambda load: load.seconds_with(request, speed))
        target.take(request, speed)
        moves.append(Move(request.id, source.id, target.replica.id))
    before = {r.id: seconds_until_idle(r.requests, speed) for r in (*freed, *kept)}
    after = [load.stall_s + _seconds(load.longest, load.remaining, speed) for load in loads]
    # Unmoved, all nodes are held until the last response of all; moved, the freed ones are not.
    nodes = sum(len(r.nodes) for r in kept)
    tail, tail_before = max(after), max(before.values())
    won = (nodes + sum(len(r.nodes) for r in freed)) * tail_before - nodes * tail
    turn = {replica.id: at for at, replica in enumerate(freed)}
    return Migration(
        # Replica by replica, so that the first node is free before the last request has moved.
        moves=tuple(sorted(moves, key=lambda move: turn[move.source])),
        freed=tuple(r.id for r in freed),
        kept=tuple(r.id for r in kept),
        gain_s=won,
        tail_s=tail,
        tail_before_s=tail_before,
        reprefill_tokens=sum(request.context for request, _ in moving),
    )


@dataclass(slots=True)
class _Load:
    """What a kept replica has to do, in sums: a plan for 64 replicas weighs a million places for a request.

    tokens: context and remaining. longest: most that remain of one request. stall_s: seconds of prefilling what moved here.
    """

    replica: Replica
    requests: int
    tokens: float
    remaining: float
    longest: float
    stall_s: float = 0.0

    @classmethod
    def of(cls, replica: Replica) -> _Load:
        its, left = replica.requests, [request.remaining for request in replica.requests]
        return cls(replica, len(its), sum(request.context for request in its) + sum(left), sum(left), max(left, default=0.0))

    def has_room_for(self, it: Request) -> bool:
        tokens = self.tokens + it.context + it.remaining
        return self.requests < self.replica.max_requests and tokens <= self.replica.max_tokens

    def seconds_with(self, it: Request, speed: EngineSpeed) -> float:
        """Until it is idle, with this one too but for its prefill."""
        return self.stall_s + _seconds(max(self.longest, it.remaining), self.remaining + it.remaining, speed)

    def take(self, it: Request, speed: EngineSpeed) -> None:
        self.requests += 1
        self.tokens += it.context + it.remaining
        self.remaining += it.remaining
        self.longest = max(self.longest, it.remaining)
        self.stall_s += it.context / speed.prefill


def estimated_speed(token_s: float, replicas: Sequence[Replica]) -> EngineSpeed:
    """From the seconds a token took lately: half of a step is the engine's own, half its requests'."""
    batch = max(1.0, sum(len(replica.requests) for replica in replicas) / max(1, len(replicas)))
    return EngineSpeed(_PREFILL_PER_DECODE * batch / token_s, token_s / 2, token_s / 2 / batch)


def expected_remaining(so_far: float, longest: float) -> float:
    """Tokens that a response of so many is expected to get: as many again, up to the limit; lengths are heavy-tailed."""
    return min(max(longest - so_far, 1.0), max(so_far, 1.0))


def _work(requests: Sequence[Request]) -> float:
    return sum(request.remaining for request in requests)


def seconds_until_idle(requests: Sequence[Request], speed: EngineSpeed) -> float:
    """Seconds until the last request ends: steps get cheaper as requests end."""
    left = [request.remaining for request in requests]
    return _seconds(max(left, default=0.0), sum(left), speed)


def _seconds(longest: float, remaining: float, speed: EngineSpeed) -> float:
    """There is a step for each token of the longest request, and in each of its own steps a request costs its part."""
    return speed.step_s * longest + speed.step_per_request_s * remaining
