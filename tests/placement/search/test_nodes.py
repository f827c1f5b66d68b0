"""Which nodes are taken: low numbers first, and those that may vanish by whom they are for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.placement.made_jobs import make_cluster
from verl_mux.placement.groups import Nodes

POOL = make_cluster(4, 4).rollout


def test_low_numbers_go_first():
    nodes = Nodes(POOL)
    assert [nodes.take(spot=spot) for spot in (True, False)] == ["rollout-0", "rollout-1"]
    nodes.release(["rollout-0"])
    assert nodes.take(spot=True) == "rollout-0"


def test_those_that_may_vanish_go_first_or_last():
    nodes = Nodes(POOL, spot=["rollout-0", "rollout-2"])
    assert [nodes.take(spot=False) for _ in range(3)] == ["rollout-1", "rollout-3", "rollout-0"]
    nodes.release(["rollout-1", "rollout-0"])
    assert [nodes.take(spot=True) for _ in range(3)] == ["rollout-0", "rollout-2", "rollout-1"]


def test_of_those_that_may_vanish_the_cheapest_go_first_and_what_they_save_is_known():
    nodes = Nodes(POOL, spot=["rollout-0", "rollout-1", "rollout-2"], spot_usd={"rollout-1": 10.8, "rollout-2": 4.8})
    assert [nodes.would_save_usd(count) for count in (0, 1, 2, 4)] == pytest.approx([0.0, 10.0, 14.0, 14.0])
    assert [nodes.take(spot=True) for _ in range(3)] == ["rollout-2", "rollout-1", "rollout-0"]
    assert nodes.saved_usd == pytest.approx(14.0) and nodes.would_save_usd(4) == 0.0
    nodes.release(["rollout-2", "rollout-0"])
    assert nodes.saved_usd == pytest.approx(4.0) and nodes.would_save_usd(1) == pytest.approx(10.0)


@given(
    takes=st.lists(st.booleans(), max_size=4),
    spot=st.sets(st.sampled_from(POOL.nodes)),
    closed=st.sets(st.sampled_from(POOL.nodes)),
)
def test_each_node_that_is_not_closed_is_taken_once(takes, spot, closed):
    nodes = Nodes(POOL, closed, spot)
    taken = [nodes.take(each) for each in takes[: int(nodes.free)]]
    assert len(set(taken)) == len(taken) and closed.isdisjoint(taken)
    assert nodes.free == 4 - len(closed) - len(taken)
