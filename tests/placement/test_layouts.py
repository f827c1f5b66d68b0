"""The cheapest nodes for a set of jobs, and the price by which ways to share are compared."""

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.exploring import examples
from tests.placement.made_jobs import ANY_MODES, EITHER, Planner, jobs, make_cluster, make_job
from verl_mux.placement.divisions import Partitioner, _least_nodes, cheapest_nodes
from verl_mux.placement.explain import lost_to
from verl_mux.placement.feasibility import Feasibility, pairs_of_nodes
from verl_mux.placement.group_run import periods, rollout_bits
from verl_mux.placement.groups import Price, isolated_usd
from verl_mux.placement.model import COLOCATED, LIVE, OURS, Cluster, Estimate, NodeKind, Pool, modes_of
from verl_mux.placement.planner import alternatives


def divisions(items: list) -> list[list[list]]:
    """Every way to divide a list."""
    if not items:
        return [[]]
    first, *rest = items
    found = [[[first], *division] for division in divisions(rest)]
    for division in divisions(rest):
        found += [[*division[:i], [first, *part], *division[i + 1 :]] for i, part in enumerate(division)]
    return found


@settings(max_examples=examples(25))
@given(found=jobs(most=4, modes=ANY_MODES))
def test_the_dynamic_programme_finds_what_trying_everything_finds(found):
    cluster, feasibility = make_cluster(), Feasibility()

    def usd(part: list) -> float:
        """In the modes in which it costs the least."""
        return min(placed_usd(placed) for placed in itertools.product(*[modes_of(job, cluster, OURS) for job in part]))

    def placed_usd(part: tuple) -> float:
        if len(part) == 1:
            return isolated_usd(part[0], cluster)
        shared = cheapest_nodes(part, cluster, feasibility)
        return shared.usd_per_hour if shared else float("inf")

    best = min(sum(usd(part) for part in division) for division in divisions(found))
    solved, parts = Partitioner(cluster, feasibility, OURS).solve(found)
    assert abs(solved - best) < 1e-4
    assert sorted(job.name for members, _ in parts for job in members) == [job.name for job in found]


@settings(max_examples=examples(25))
@given(found=jobs(most=4), cv=st.sampled_from([0.05, 0.2]), rules=st.sampled_from([OURS, LIVE]))
def test_asking_only_the_chosen_groups_for_probabilities_finds_what_asking_all_finds(found, cv, rules):
    def vary(phase: Estimate) -> Estimate:
        return msgspec.structs.replace(phase, cv=cv)

    found = [msgspec.structs.replace(job, rollout=vary(job.rollout), train=vary(job.train)) for job in found]
    cluster, sure = make_cluster(), Feasibility(keep=0.95)
    price = Price(cluster, rules).of_shared if rules.count_stays else None
    asking_all = Partitioner(cluster, sure, rules, lambda jobs, below: cheapest_nodes(jobs, cluster, sure, below, price))
    usd, parts = Partitioner(cluster, Feasibility(keep=0.95), rules).solve(found)
    assert abs(usd - asking_all.solve(found)[0]) < 1e-5
    for shared in [shared for _, shared in parts if shared is not None]:
        assert sure.allows(shared.jobs, pairs_of_nodes(shared.rollout), pairs_of_nodes(shared.train))


@given(found=jobs(most=4, modes=ANY_MODES))
def test_shared_nodes_cost_at_least_the_bound_and_gives_everybody_its_nodes(found):
    cluster, found = make_cluster(), [job.in_modes[-1] for job in found]
    shared = cheapest_nodes(found, cluster, Feasibility())
    if shared:
        assert shared.usd_per_hour >= cluster.usd(*_least_nodes(found)) - 1e-9
        assert [on.bit_count() for on in shared.rollout] == [job.nodes[0] for job in found]
        assert [on.bit_count() for on in shared.train] == [job.nodes[1] for job in found]


def test_a_group_that_one_departure_would_spoil_is_refused_as_a_whole():
    feasibility = Feasibility()
    three = [make_job("a", 100, 10, slo=1.0), make_job("b", 10, 100, slo=2.0), make_job("c", 10, 10, slo=2.0)]
    for rollout in range(8):
        for train in range(8):
            if feasibility.allows(three, rollout, train):
                assert feasibility.allows(three[:2], rollout & 1, train & 1)


def test_forgetting_a_job_forgets_every_verdict_it_is_in():
    partitioner = Partitioner(make_cluster(), Feasibility(), OURS)
    pair = [make_job("a", 100, 100, slo=1.2), make_job("b", 100, 100, slo=1.2)]
    shared, _ = partitioner.solve(pair)
    for owner in (partitioner, partitioner.feasibility):
        owner.forget("b")
    apart, _ = partitioner.solve([pair[0], make_job("b", 300, 300, slo=1.0)])
    assert apart > shared


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
        assert by_work.price <= price.of_shared(by_hour.usd_per_hour, by_hour.jobs, run(by_hour)) + 1e-6
        assert by_work.price == pytest.approx(price.of_shared(by_work.usd_per_hour, by_work.jobs, run(by_work)))


def run(shared):
    """The mean iteration of each job on just these nodes."""
    train = [bits << shared.rollout_nodes for bits in shared.train]
    on = rollout_bits(shared.jobs, shared.rollout, train), train
    return periods(shared.jobs, *on)


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
