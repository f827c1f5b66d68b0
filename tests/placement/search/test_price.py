"""What places are compared by where it counts that jobs stay longer on shared nodes."""

import msgspec
import pytest
from hypothesis import given, settings

from tests.exploring import examples
from tests.placement.made_jobs import ANY_MODES, EITHER, jobs, make_cluster, make_job
from verl_mux.placement.explain import alternatives, lost_to
from verl_mux.placement.feasibility import Feasibility
from verl_mux.placement.group_run import mean_seconds, rollout_bits
from verl_mux.placement.layouts import Price, cheapest_nodes, isolated_usd
from verl_mux.placement.model import COLOCATED, Cluster, NodeKind, Pool
from verl_mux.placement.planner import Planner
from verl_mux.placement.rules import LIVE, OURS, modes_of

COUNTED = msgspec.structs.replace(OURS, count_stays=True)
NODE_USD = 8 * 5.28


def twice(rules) -> Planner:
    """Two jobs that keep a node busy by themselves, and may take twice as long."""
    placer = Planner.of_one(make_cluster(), rules)
    for name in "ab":
        placer.admit(make_job(name, 100, 100, slo=2.0, modes=(COLOCATED,)))
    return placer


def test_two_on_a_node_that_one_keeps_busy_save_nothing_so_each_has_its_own():
    assert twice(OURS).groups.usd_per_hour == pytest.approx(NODE_USD)
    assert twice(COUNTED).groups.usd_per_hour == pytest.approx(2 * NODE_USD)
    assert LIVE.count_stays


def test_who_leaves_the_other_its_time_shares_all_the_same():
    placer = Planner.of_one(make_cluster(), COUNTED)
    for name, rollout, train in (("a", 100, 90), ("b", 90, 100)):
        placer.admit(make_job(name, rollout, train, slo=1.2))
    assert len(placer.groups) == 1 and placer.groups.usd_per_hour == pytest.approx(57.04)


def test_the_price_is_of_the_same_work():
    shared = twice(OURS)
    assert Price(shared.placer.cluster, OURS).of_group(shared.groups["g1"]) == pytest.approx(NODE_USD)
    assert Price(shared.placer.cluster, COUNTED).of_group(shared.groups["g1"]) == pytest.approx(2 * NODE_USD)


def test_nodes_that_cost_nothing_are_shared_where_there_are_no_others():
    free = NodeKind(name="own", host_memory_gb=1000)
    cluster = Cluster(
        rollout=Pool(name="rollout", kind=free, nodes=("r0",)),
        train=Pool(name="train", kind=free, nodes=("t0",)),
    )
    placer = Planner.of_one(cluster, LIVE)
    placer.admit(make_job("a", 100, 60, slo=2.0))
    job = make_job("b", 60, 100, slo=2.0)
    (found, _) = alternatives(placer.placer, job)
    assert (found.strategy, found.usd_per_hour, found.why) == ("direct packing", 0.0, "")
    assert placer.admit(job).strategy == "direct packing"


def test_a_place_that_is_cheaper_by_the_hour_and_not_taken_says_why():
    placer = Planner.of_one(make_cluster(), COUNTED)
    placer.admit(make_job("a", 100, 100, slo=2.0, modes=(COLOCATED,)))
    job = make_job("b", 100, 100, slo=2.0, modes=(COLOCATED,))
    found = alternatives(placer.placer, job)
    said = lost_to(placer.admit(job), found)[0]
    assert (said.usd_per_hour, said.work_usd_per_hour) == (0.0, pytest.approx(NODE_USD))
    assert said.why == "its jobs would take longer, so that an hour of this one's work alone would cost 42.24 USD there"


@settings(max_examples=examples(25))
@given(found=jobs(most=3, modes=ANY_MODES))
def test_a_way_to_share_is_priced_as_the_group_that_it_becomes_and_no_less_than_by_the_hour(found):
    cluster, feasibility = make_cluster(), Feasibility()
    price = Price(cluster, COUNTED)
    placed = [modes_of(job, cluster, COUNTED)[0] for job in found]
    by_hour = cheapest_nodes(placed, cluster, feasibility)
    by_work = cheapest_nodes(placed, cluster, feasibility, price=price.of_shared)
    assert (by_hour is None) == (by_work is None)
    if by_hour and by_work:
        assert by_hour.usd_per_hour <= by_work.usd_per_hour <= by_work.price + 1e-6
        assert by_work.price <= price.of_shared(by_hour, run(by_hour)) + 1e-6
        assert by_work.price == pytest.approx(price.of_shared(by_work, run(by_work)))


def run(shared):
    """The mean iteration of each job on just these nodes."""
    train = [bits << shared.rollout_nodes for bits in shared.train]
    return mean_seconds(shared.jobs, rollout_bits(shared.jobs, shared.rollout, train), train, shared.order)


@settings(max_examples=examples(25))
@given(found=jobs(most=5, modes=(*ANY_MODES, EITHER)))
def test_nobody_adds_more_than_its_own_nodes_would_cost_for_the_same_work(found):
    placer = Planner.of_one(make_cluster(), COUNTED)
    for job in found:
        before = dict(placer.groups)
        placer.admit(job)
        own = min(isolated_usd(placed, placer.placer.cluster) for placed in modes_of(job, placer.placer.cluster, COUNTED))
        priced = [sum(map(placer.placer.search.price.of_group, groups.values())) for groups in (before, placer.groups)]
        assert priced[1] - priced[0] <= own + 1e-6
