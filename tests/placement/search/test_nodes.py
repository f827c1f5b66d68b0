"""Which nodes are taken: low numbers first."""

from hypothesis import given
from hypothesis import strategies as st

from tests.placement.made_jobs import make_cluster
from verl_mux.placement.groups import Nodes

POOL = make_cluster(4, 4).rollout


def test_low_numbers_go_first():
    nodes = Nodes(POOL)
    assert [nodes.take() for _ in range(2)] == ["rollout-0", "rollout-1"]
    nodes.release(["rollout-0"])
    assert nodes.take() == "rollout-0"


@given(
    takes=st.integers(0, 4),
    closed=st.sets(st.sampled_from(POOL.nodes)),
)
def test_each_node_that_is_not_closed_is_taken_once(takes, closed):
    nodes = Nodes(POOL, closed)
    taken = [nodes.take() for _ in range(min(takes, int(nodes.free)))]
    assert len(set(taken)) == len(taken) and closed.isdisjoint(taken)
    assert nodes.free == 4 - len(closed) - len(taken)
