"""Jobs, nodes and groups: what is refused, and what is derived."""

import pytest

from tests.placement.made_jobs import EITHER, make_cluster, make_job, overfull_nodes
from verl_mux.errors import UserError
from verl_mux.placement.model import Estimate, Group, NodeKind, Pin, Pool, Rules, cycle_time, load_time


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
        (lambda: Estimate(seconds=5, bound_s=4), "above its own bound"),
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
    assert (cycle_time(group), load_time(group)) == (150, 182)
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
    assert (load_time(group), group.fullness) == (160, 1.5), "there is no rollout node with room"
