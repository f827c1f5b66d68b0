"""Which requests of a rollout move between replicas: its tail onto few of them (migration), or onto one that joins (growth).

Runs in the trainer's driver; called by trainer/replica_moves.py, and by verl_mux/what_if for recorded runs. Pure.

Migration gathers the last responses so that another job gets the freed nodes. Moving costs: a moved request's tokens are
prefilled again on its new replica, which stalls decoding there, and the replicas that keep the tail decode bigger batches, so the
tail ends later. It pays when the node-seconds freed for the waiting job exceed the node-seconds the kept replicas run longer.
Growth is the reverse: a replica that joins takes over requests while all of them end sooner for it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from verl_mux.errors import UserError
from verl_mux.rollout.instructions import RunningSample

# Not measured: a prefill computes this many tokens in the time in which decoding the present batch computes as many steps.
_PREFILL_PER_DECODE = 8.0
# Seconds by which a rollout under way must be expected to end sooner before it takes a node that became free.
GROWTH_MIN_GAIN_S = 1.0


class Unit(NamedTuple):
    """What comes and goes together: nodes, and the replicas that run on them alone. servers: the load balancer's names."""

    nodes: tuple[str, ...]
    replicas: tuple[int, ...]
    servers: tuple[str, ...]


def units(runs_on: Sequence[Sequence[str]], servers: Sequence[str], asked: str) -> list[Unit]:
    """Replicas that share a node form a unit. runs_on: the nodes of each replica, by rank. asked: the `key=value` that needs it.

    Raises:
        UserError: neither as many whole replicas on each node nor whole nodes under each replica.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank, nodes in enumerate(runs_on):
        groups.setdefault(tuple(dict.fromkeys(nodes)), []).append(rank)
    every = [node for nodes in groups for node in nodes]
    shared = len(set(every)) < len(every) or any(len(nodes) > 1 and len(ranks) > 1 for nodes, ranks in groups.items())
    if shared or len({len(ranks) for ranks in groups.values()}) > 1:
        raise UserError(
            f"{asked} is not possible with {len(servers)} replicas on {len(set(every))} rollout nodes; "
            "allowed: whole replicas on each node, or whole nodes under each replica"
        )
    return [Unit(nodes, tuple(ranks), tuple(servers[rank] for rank in ranks)) for nodes, ranks in groups.items()]


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

    @property
    def work(self) -> float:
        """Tokens still expected, of all requests."""
        return sum(request.remaining for request in self.requests)


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """prefill: tokens a second. step_s: seconds for one token of each request, plus step_per_request_s for each request."""

    prefill: float
    step_s: float
    step_per_request_s: float


class Room(NamedTuple):
    """longest: most tokens of a response. max_requests, max_tokens: what one replica holds at once."""

    longest: int
    max_requests: int
    max_tokens: int

    def replicas(self, units: Sequence[Unit], samples: Sequence[RunningSample], token_s: float) -> list[Replica]:
        """Each unit, with the samples that run there, as one replica of a plan. token_s: seconds a token takes."""
        out = []
        for unit in units:
            requests = tuple(self._request(it, token_s) for it in samples if it.server in unit.servers)
            count = len(unit.replicas)
            out.append(Replica(unit.nodes[0], unit.nodes, requests, count * self.max_requests, count * self.max_tokens))
        return out

    def _request(self, it: RunningSample, token_s: float) -> Request:
        remaining = expected_remaining(it.tokens + it.seconds / token_s, self.longest)
        return Request(it.name, round(it.context + it.seconds / token_s), remaining)


def expected_remaining(tokens: float, longest: float) -> float:
    """Tokens still expected of a response with this many: as many again, up to the limit; lengths are heavy-tailed."""
    return min(max(longest - tokens, 1.0), max(tokens, 1.0))


def estimated_speed(token_s: float, replicas: Sequence[Replica]) -> EngineSpeed:
    """From the seconds a token took lately: half of a step is the engine's own, half its requests'."""
    batch = max(1.0, sum(len(replica.requests) for replica in replicas) / max(1, len(replicas)))
    return EngineSpeed(_PREFILL_PER_DECODE * batch / token_s, token_s / 2, token_s / 2 / batch)


def seconds_until_idle(requests: Sequence[Request], speed: EngineSpeed) -> float:
    """Seconds until the last request ends: steps get cheaper as requests end."""
    left = [request.remaining for request in requests]
    return _seconds(max(left, default=0.0), sum(left), speed)


def _seconds(longest: float, remaining: float, speed: EngineSpeed) -> float:
    """There is a step for each token of the longest request, and in each of its own steps a request costs its part."""
    return speed.step_s * longest + speed.step_per_request_s * remaining


# ---------------------------------------------------------------- migration


@dataclass(frozen=True, slots=True)
class MigrationPolicy:
    """threshold: share of the responses done before anything moves. min_gain_s: node-seconds a move must win. max_slowdown: how
    much later than without moving the tail may end, as a share of its remaining time."""

    threshold: float = 0.8
    min_gain_s: float = 1.0
    max_slowdown: float = 0.25


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
    for gang in sorted(asked, key=lambda gang: sum(r.work for r in gang)):
        freed |= {r.id: r for r in gang}
        out.append(sorted(freed.values(), key=lambda r: r.work))
    return out


def _judge(best: Migration, policy: MigrationPolicy) -> Migration | Stay:
    if best.gain_s < policy.min_gain_s:
        return Stay(f"moving {best.reprefill_tokens} tokens wins {best.gain_s:.1f} node-seconds, below {policy.min_gain_s:g}")
    if best.tail_s > (1 + policy.max_slowdown) * best.tail_before_s:
        return Stay(f"the tail would take {best.tail_s:.1f} s and not {best.tail_before_s:.1f} s")
    return best


def _gathered(freed: Sequence[Replica], kept: Sequence[Replica], speed: EngineSpeed) -> Migration | None:
    """All requests of `freed` on `kept`, the longest first, each where it then ends first; None where they do not fit."""
    loads = [_Load.on(replica) for replica in kept]
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
    """What a kept replica has to do, in sums. tokens: context and remaining. longest: most that remain of one request. stall_s:
    seconds of prefilling what moved here."""

    replica: Replica
    requests: int
    tokens: float
    remaining: float
    longest: float
    stall_s: float = 0.0

    @classmethod
    def on(cls, replica: Replica) -> _Load:
        left = [request.remaining for request in replica.requests]
        tokens = sum(request.context for request in replica.requests) + sum(left)
        return cls(replica, len(left), tokens, sum(left), max(left, default=0.0))

    def has_room_for(self, it: Request) -> bool:
        tokens = self.tokens + it.context + it.remaining
        return self.requests < self.replica.max_requests and tokens <= self.replica.max_tokens

    def seconds_with(self, it: Request, speed: EngineSpeed) -> float:
        """Until it is idle, with this request too but for its prefill."""
        return self.stall_s + _seconds(max(self.longest, it.remaining), self.remaining + it.remaining, speed)

    def take(self, it: Request, speed: EngineSpeed) -> None:
        self.requests += 1
        self.tokens += it.context + it.remaining
        self.remaining += it.remaining
        self.longest = max(self.longest, it.remaining)
        self.stall_s += it.context / speed.prefill


# ---------------------------------------------------------------- growth


def pull(replicas: Sequence[Replica], joining: Replica, speed: EngineSpeed) -> tuple[Move, ...]:
    """Moves to `joining`, which has no requests yet: the longest of the replica that would end last, as long as the rollout then
    ends sooner than without. None where all of them win less than GROWTH_MIN_GAIN_S."""
    load = {replica.id: list(replica.requests) for replica in replicas}
    ends = {name: seconds_until_idle(requests, speed) for name, requests in load.items()}
    before, joined, stall = max(ends.values()), 0.0, 0.0
    taken: list[Request] = []
    moves: list[Move] = []
    while len(taken) < joining.max_requests:
        source = max(ends, key=lambda name: ends[name])
        if not load[source]:
            break
        longest = max(load[source], key=lambda request: request.remaining)
        left = [other for other in load[source] if other is not longest]
        stall += longest.context / speed.prefill  # it is read again
        then, there = seconds_until_idle(left, speed), stall + seconds_until_idle([*taken, longest], speed)
        if max(then, there) >= ends[source]:
            break
        load[source], ends[source], joined = left, then, there
        taken.append(longest)
        moves.append(Move(longest.id, source, joining.id))
    return tuple(moves) if before - max(joined, *ends.values()) >= GROWTH_MIN_GAIN_S else ()
