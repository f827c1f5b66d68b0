"""What a replica that joins a rollout takes over."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from verl_mux.rollout.control.growth_plan import pull
from verl_mux.rollout.control.migration_plan import EngineSpeed, Replica, Request, seconds_until_idle

SPEED = EngineSpeed(prefill=1000.0, step_s=0.01, step_per_request_s=0.01)
NEW = Replica("new", ("n",), (), 4, 10**6)


def replica(name: str, *remaining: float, context: int = 10) -> Replica:
    return Replica(name, (name,), tuple(Request(f"{name}{at}", context, it) for at, it in enumerate(remaining)), 64, 10**6)


def test_a_crowded_replica_gives_some_of_its_requests():
    moves = pull([replica("a", *[100.0] * 8)], NEW, [], SPEED)
    assert 2 <= len(moves) <= 4
    assert {move.target for move in moves} == {"new"}


def test_one_request_alone_stays_where_it_is():
    assert pull([replica("a", 100.0)], NEW, [], SPEED) == ()


def test_what_would_take_longer_to_read_again_than_it_wins_stays():
    assert pull([replica("a", 10.0, 10.0, context=10**6)], NEW, [], SPEED) == ()


def test_what_waits_goes_before_what_runs_and_reads_nothing_again():
    busy = replica("a", 50.0, 50.0, 60.0, context=10**6)
    assert [move.request for move in pull([busy], NEW, ["a1"], SPEED)] == ["a1"]


@given(st.lists(st.lists(st.floats(1, 1000), max_size=8), min_size=1, max_size=3))
def test_growing_never_makes_the_rollout_longer(loads):
    replicas = [replica(f"r{at}", *its) for at, its in enumerate(loads)]
    moves = pull(replicas, NEW, [], SPEED)
    moved = {move.request for move in moves}
    assert len(moved) == len(moves) <= NEW.max_requests
    before = max(seconds_until_idle(r.requests, SPEED) for r in replicas)
    taken = [it for r in replicas for it in r.requests if it.id in moved]
    stall = sum(it.context / SPEED.prefill for it in taken)
    after = [seconds_until_idle([it for it in r.requests if it.id not in moved], SPEED) for r in replicas]
    assert max([*after, stall + seconds_until_idle(taken, SPEED) if taken else 0.0]) <= before + 1e-9
