"""What moves between replicas: a tail onto few of them, or onto one that joins; and which replicas come and go together."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.exploring import examples
from verl_mux.errors import UserError
from verl_mux.rollout.control.replica_plan import (
    EngineSpeed,
    Migration,
    MigrationPolicy,
    Replica,
    Request,
    Room,
    Stay,
    Unit,
    plan,
    pull,
    seconds_until_idle,
    units,
)
from verl_mux.rollout.instructions import RunningSample

SPEED = EngineSpeed(prefill=10_000, step_s=0.01, step_per_request_s=0.0005)
POLICY = MigrationPolicy()
ALL = [[f"node-{name}"] for name in "abcde"]


def replica(name: str, *remaining: int, context: int = 500, max_requests: int = 64, max_tokens: int = 10**6) -> Replica:
    requests = tuple(Request(f"{name}{i}", context, r) for i, r in enumerate(remaining))
    return Replica(name, (f"node-{name}",), requests, max_requests, max_tokens)


@pytest.mark.parametrize(
    ("replicas", "done", "gangs", "step_per_request_s", "reason"),
    [
        ([replica("a", 9), replica("b", 9)], 99, (), 0.0005, "no other job could begin on the nodes"),
        ([replica("a", 900), replica("b")], 99, [["node-a", "node-b"]], 0.0005, "on all of the nodes"),  # it waits for both
        ([replica("a", 9), replica("b", 9)], 79, ALL, 0.0005, "below the threshold"),
        ([replica("a", 900)], 99, ALL, 0.0005, "one replica"),
        ([replica("a", 900), replica("b", 1000, max_requests=1)], 98, ALL, 0.0005, "cannot hold"),
        ([replica("a", 100, context=60_000), replica("b", 200)], 98, ALL, 0.0005, "moving 60000 tokens"),
        ([replica("a", *[1000] * 3), replica("b", *[1100] * 3)], 94, ALL, 0.01, "the tail would take"),
    ],
)
def test_nothing_moves(replicas, done, gangs, step_per_request_s, reason):
    got = plan(replicas, done, 100, gangs, EngineSpeed(10_000, 0.01, step_per_request_s), POLICY)
    assert isinstance(got, Stay) and reason in got.reason


def test_who_waits_for_two_nodes_gets_two_or_none():
    got = plan([replica("a", 900), replica("b"), replica("c", 800)], 99, 100, [["node-b", "node-c"]], SPEED, POLICY)
    assert set(got.freed) == {"b", "c"} and got.kept == ("a",)


def test_the_emptiest_replicas_give_their_tail_to_the_fullest():
    got = plan([replica("a", 2000), replica("b", 3000, 2500), replica("c", 1500)], 96, 100, ALL, SPEED, POLICY)
    assert isinstance(got, Migration)
    assert got.kept == ("b",)
    assert got.freed == ("c", "a")
    assert [move.source for move in got.moves] == ["c", "a"]
    assert {move.target for move in got.moves} == {"b"}
    assert got.reprefill_tokens == 1000
    assert got.gain_s > 25


def test_a_tail_of_thousands_is_planned_within_seconds():
    lengths = random.Random(0)
    replicas = [replica(f"r{at:02}", *(lengths.randrange(1, 30_000) for _ in range(50)), max_requests=4096) for at in range(48)]
    began = time.process_time()
    got = plan(replicas, 9600, 12_000, [r.nodes for r in replicas], SPEED, POLICY)
    assert isinstance(got, Migration) and len(got.moves) == 50 * len(got.freed)
    assert time.process_time() - began < 3.0


@given(st.lists(st.integers(0, 1000), max_size=8))
def test_the_time_until_idle_is_that_of_steps_that_get_cheaper(lengths):
    seconds = at = 0.0
    for index, end in enumerate(sorted(lengths)):
        seconds += (end - at) * (SPEED.step_s + SPEED.step_per_request_s * (len(lengths) - index))
        at = end
    assert seconds_until_idle(replica("a", *lengths).requests, SPEED) == pytest.approx(seconds)


def test_an_idle_replica_is_freed_without_moving_anything():
    got = plan([replica("a", 900), replica("b")], 99, 100, ALL, SPEED, POLICY)
    assert (got.moves, got.freed, got.kept) == ((), ("b",), ("a",))


def test_only_nodes_that_somebody_waits_for_are_freed():
    got = plan([replica("a", 2000), replica("b", 3000)], 98, 100, [["node-b"]], SPEED, POLICY)
    assert (got.freed, got.kept) == (("b",), ("a",))


@settings(max_examples=examples(100))
@given(st.lists(st.lists(st.integers(1, 5000), max_size=6), min_size=1, max_size=5), st.integers(100, 10_000))
def test_every_request_moves_at_most_once_and_none_is_lost(tails, capacity):
    replicas = [replica(chr(97 + i), *tail, max_tokens=capacity) for i, tail in enumerate(tails)]
    got = plan(replicas, 95, 100, ALL, SPEED, POLICY)
    if isinstance(got, Stay):
        return
    holders = {request.id: r.id for r in replicas for request in r.requests}
    after = holders | {move.request: move.target for move in got.moves}
    assert len({move.request for move in got.moves}) == len(got.moves)
    assert all(holders[move.request] == move.source for move in got.moves)
    assert set(after.values()) <= set(got.kept)
    assert not set(got.kept) & set(got.freed)
    for r in replicas:
        held = [q for other in replicas for q in other.requests if after[q.id] == r.id]
        arrived = {q.id for q in held} - {q.id for q in r.requests}
        assert not arrived or sum(q.context + q.remaining for q in held) <= capacity
    assert got.gain_s >= POLICY.min_gain_s
    assert got.tail_s <= 1.25 * got.tail_before_s


# ---------------------------------------------------------------- growth

SLOW = EngineSpeed(prefill=1000.0, step_s=0.01, step_per_request_s=0.01)
NEW = Replica("new", ("n",), (), 4, 10**6)


def busy(name: str, *remaining: float, context: int = 10) -> Replica:
    return Replica(name, (name,), tuple(Request(f"{name}{at}", context, it) for at, it in enumerate(remaining)), 64, 10**6)


def test_a_crowded_replica_gives_some_of_its_requests():
    moves = pull([busy("a", *[100.0] * 8)], NEW, SLOW)
    assert 2 <= len(moves) <= 4
    assert {move.target for move in moves} == {"new"}


def test_one_request_alone_stays_where_it_is():
    assert pull([busy("a", 100.0)], NEW, SLOW) == ()


def test_what_would_take_longer_to_read_again_than_it_wins_stays():
    assert pull([busy("a", 10.0, 10.0, context=10**6)], NEW, SLOW) == ()


@given(st.lists(st.lists(st.floats(1, 1000), max_size=8), min_size=1, max_size=3))
def test_growing_never_makes_the_rollout_longer(loads):
    replicas = [busy(f"r{at}", *its) for at, its in enumerate(loads)]
    moves = pull(replicas, NEW, SLOW)
    moved = {move.request for move in moves}
    assert len(moved) == len(moves) <= NEW.max_requests
    before = max(seconds_until_idle(r.requests, SLOW) for r in replicas)
    taken = [it for r in replicas for it in r.requests if it.id in moved]
    stall = sum(it.context / SLOW.prefill for it in taken)
    after = [seconds_until_idle([it for it in r.requests if it.id not in moved], SLOW) for r in replicas]
    assert max([*after, stall + seconds_until_idle(taken, SLOW) if taken else 0.0]) <= before + 1e-9


# ---------------------------------------------------------------- units

ASKED = "mux.rollout.growth.own=['r0']"
ROOM = Room(longest=100, max_requests=4, max_tokens=1000)


@pytest.mark.parametrize(
    ("runs_on", "expected"),
    [
        (["r0", "r1"], [Unit(("r0",), (0,), ("a",)), Unit(("r1",), (1,), ("b",))]),
        (["r0", "r1", "r1", "r0"], [Unit(("r0",), (0, 3), ("a", "d")), Unit(("r1",), (1, 2), ("b", "c"))]),
        (["r0 r1", "r2 r3"], [Unit(("r0", "r1"), (0,), ("a",)), Unit(("r2", "r3"), (1,), ("b",))]),
    ],
)
def test_what_is_given_back_are_nodes_and_the_replicas_that_run_there(runs_on, expected):
    assert units([nodes.split() for nodes in runs_on], "abcd"[: len(runs_on)], ASKED) == expected


@pytest.mark.parametrize("runs_on", [["r0", "r0", "r1"], ["r0", "r0 r1", "r1"], ["r0 r1", "r0 r1", "r0 r1"]])
def test_replicas_that_cannot_leave_a_node_together_are_refused(runs_on):
    with pytest.raises(UserError, match="3 replicas on 2 rollout nodes; allowed: whole replicas on each node") as error:
        units([nodes.split() for nodes in runs_on], ["a", "b", "c"], ASKED)
    assert str(error.value).startswith(f"{ASKED} is not possible with ")


def test_what_runs_is_expected_to_last_as_long_again_within_the_limit():
    samples = [
        RunningSample("g", 0, "a", 50, 30, 0.1),
        RunningSample("g", 1, "b", 20, 0, 0.9),
        RunningSample("g", 2, None, 10, 0, 0.0),
    ]
    first, second = ROOM.replicas(units([["r0"], ["r1"]], ["a", "b"], ASKED), samples, token_s=0.01)
    assert [(r.id, r.context, r.remaining) for r in first.requests] == [("g_0", 60, 40.0)]
    assert [(r.id, r.context, r.remaining) for r in second.requests] == [("g_1", 110, 10.0)]
