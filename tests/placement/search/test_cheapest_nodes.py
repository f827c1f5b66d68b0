"""The cheapest nodes for a set of jobs, and the cheapest division of jobs into sets."""

import itertools

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.exploring import examples
from tests.placement.made_jobs import ANY_MODES, jobs, make_cluster, make_job
from verl_mux.placement.feasibility import Feasibility, pairs_of_nodes
from verl_mux.placement.layouts import Price, _least_usd, cheapest_nodes, isolated_usd
from verl_mux.placement.model import Estimate
from verl_mux.placement.repack import Partitioner
from verl_mux.placement.rules import LIVE, OURS, modes_of


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
        assert sure.order(shared.jobs, pairs_of_nodes(shared.rollout), pairs_of_nodes(shared.train)) == shared.order


@given(found=jobs(most=4, modes=ANY_MODES))
def test_shared_nodes_cost_at_least_the_bound_and_gives_everybody_its_nodes(found):
    cluster, found = make_cluster(), [job.in_modes[-1] for job in found]
    shared = cheapest_nodes(found, cluster, Feasibility())
    if shared:
        assert shared.usd_per_hour >= _least_usd(found, cluster) - 1e-9
        assert [on.bit_count() for on in shared.rollout] == [job.nodes[0] for job in found]
        assert [on.bit_count() for on in shared.train] == [job.nodes[1] for job in found]


def test_a_group_that_one_departure_would_spoil_is_refused_as_a_whole():
    feasibility = Feasibility()
    three = [make_job("a", 100, 10, slo=1.0), make_job("b", 10, 100, slo=2.0), make_job("c", 10, 10, slo=2.0)]
    for rollout in range(8):
        for train in range(8):
            if feasibility.order(three, rollout, train):
                assert feasibility.order(three[:2], rollout & 1, train & 1)


def test_forgetting_a_job_forgets_every_verdict_it_is_in():
    partitioner = Partitioner(make_cluster(), Feasibility(), OURS)
    pair = [make_job("a", 100, 100, slo=1.2), make_job("b", 100, 100, slo=1.2)]
    shared, _ = partitioner.solve(pair)
    for owner in (partitioner, partitioner.feasibility):
        owner.forget("b")
    apart, _ = partitioner.solve([pair[0], make_job("b", 300, 300, slo=1.0)])
    assert apart > shared
