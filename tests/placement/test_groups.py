"""Jobs, nodes and groups: what is refused, what is derived, and which groups are looked at first."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.placement.made_jobs import EITHER, make_cluster, make_job, overfull_nodes
from verl_mux.errors import UserError
from verl_mux.placement.groups import Groups, Nodes, isolated
from verl_mux.placement.model import Group, NodeKind, Pin, Pool, Rules


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: make_job("a", 10, 10, slo=0.9), "slo is 0.9; it must be at least 1"),
        (lambda: make_job("a", 10, 10, sync_s=-1), "sync_s is -1"),
        (lambda: make_job("a", 10, 10, tail_s=11), "longer than its rollout"),
        (lambda: make_job("a", 0, 0), "time of an iteration is 0"),
        (lambda: make_job("a", float("nan"), 1), "phase time is nan"),
        (lambda: NodeKind(name="k", gpus=10**400), "at least 1 and finite"),
        (lambda: make_job("a", 1, 1, rollout_nodes=10**9), "rollout_nodes is 1000000000; it must be at most 10000"),
        (lambda: NodeKind(name="k", gpus=0), "gpus is 0"),
        (lambda: Pool(name="p", kind=NodeKind(name="k"), nodes=("n", "n")), "names a node twice"),
        (lambda: make_job("a", 10, 10, modes=("both",)), "modes are both; allowed: separate, colocated, or both of them"),
        (lambda: make_job("a", 10, 10, modes=EITHER, rollout_nodes=2), "it needs 2 rollout and 1 training nodes; colocated"),
        (lambda: make_job("a", 10, 10, colocated=True), "it is colocated, which is not among its modes: separate"),
        (lambda: Rules(cap=0), "cap is 0"),
    ],
)
def test_a_value_out_of_range_is_refused_with_what_is_allowed(make, words):
    with pytest.raises(UserError, match=words):
        make()


def test_what_a_group_takes_and_costs():
    jobs = make_job("a", 100, 50, rollout_memory_gb=600), make_job("b", 80, 40, rollout_memory_gb=600, rollout_switch_s=2)
    group = Group(
        name="g",
        pins=tuple(Pin(job=job, rollout=("r0",), train=("t0",)) for job in jobs),
        rollout_nodes=("r0",),
        train_nodes=("t0",),
    )
    cluster = make_cluster()
    assert group.usd_per_hour(cluster) == pytest.approx(8 * 1.85 + 8 * 5.28)
    assert overfull_nodes(group, cluster) == ["r0"]


def test_a_colocated_job_holds_its_training_nodes_for_both_phases():
    alone = make_job("a", 100, 50, sync_s=10, slo=2.0, rollout_memory_gb=300, train_memory_gb=400, modes=EITHER)
    separate, colocated = alone.in_modes
    assert separate == alone and (separate.nodes, separate.memory_gb) == ((1, 1), (300, 400))
    assert (colocated.nodes, colocated.memory_gb) == ((0, 1), (0, 700))
    assert (colocated.rollout_share, colocated.train_share) == (0, 0.5) and colocated.limit_s == separate.limit_s
    assert colocated.in_modes == (separate, colocated)
    pin = Pin(job=colocated, rollout=(), train=("t0",))
    group = Group(name="g", pins=(pin,), rollout_nodes=(), train_nodes=("t0",))
    assert group.usd_per_hour(make_cluster()) == pytest.approx(42.24)
    assert group.fullness == 1.5, "there is no rollout node with room"


@pytest.mark.parametrize("closed", [frozenset(), frozenset(["rollout-0"])])
def test_a_group_that_was_taken_back_holds_its_nodes(closed):
    cluster = make_cluster(2, 2)
    before = Groups(cluster)
    (group,) = before.replace([], [isolated(make_job("a", 9, 9))])
    groups = Groups(msgspec.structs.replace(cluster, closed=closed))
    groups.adopt([group])
    free = groups.free
    groups.replace([group], [])
    (again,) = groups.replace([], [group])
    assert groups.free == free
    (other,) = groups.replace([], [isolated(make_job("b", 9, 9))])
    assert set(other.rollout_nodes).isdisjoint(again.rollout_nodes)
    groups.replace([again], [])


POOL = make_cluster(4, 4).rollout


@given(
    takes=st.integers(0, 4),
    closed=st.sets(st.sampled_from(POOL.nodes)),
)
def test_each_node_that_is_not_closed_is_taken_once(takes, closed):
    nodes = Nodes(POOL, closed)
    taken = [nodes.take() for _ in range(min(takes, int(nodes.free)))]
    assert len(set(taken)) == len(taken) and closed.isdisjoint(taken)
    assert nodes.free == 4 - len(closed) - len(taken)
