"""The optimum is what counting out all divisions finds."""

import os
import random

import pytest
import scipy.optimize
from hypothesis import given, settings
from hypothesis import strategies as st

from research import optimum as division
from research.optimum import Division, Optimum, Sharing
from research.workload.varying import Moments, Varying, with_varying_phases
from research.workload.workload import Arrival
from tests.exploring import examples
from tests.placement.made_jobs import ANY_MODES, EITHER, Planner, make_cluster, make_job
from tests.placement.made_jobs import jobs as made_jobs
from tests.research.counted_out import cheapest_usd
from verl_mux.placement.feasibility import Feasibility, Progress
from verl_mux.placement.layouts import cheapest_nodes
from verl_mux.placement.model import LIVE, OURS, SEPARATE, Rules

USD = (14.8, 42.24)
# Two jobs that cannot share either side alone, as they fall out of step there, and can share both.
BOTH_OR_NONE = [make_job("a", 163, 42, slo=1.98), make_job("b", 82, 279, slo=1.22)]


def drawn(seed: int, modes=((SEPARATE,),)):
    """Three to five jobs; of three some need two nodes a side, where all of them are separate."""
    rng = random.Random(seed)
    count = rng.randint(3, 5)
    two = 0.25 if count == 3 and len(modes) == 1 else 0.0
    return [
        make_job(
            f"j{i}", float(rng.randint(20, 300)), float(rng.randint(20, 300)), slo=rng.uniform(1, 2),
            rollout_nodes=1 + (rng.random() < two), train_nodes=1 + (rng.random() < two),
            rollout_memory_gb=rng.choice((100.0, 300.0)), train_memory_gb=rng.choice((100.0, 300.0)),
            rollout_switch_s=rng.choice((0.0, 2.0)), train_switch_s=rng.choice((0.0, 4.0)), sync_s=rng.choice((0.0, 1.0)),
            modes=rng.choice(modes),
        )
        for i in range(count)
    ]  # fmt: skip


def by_name(job):
    return job.name


def solved(jobs):
    return Optimum(jobs, make_cluster(), OURS).solve(frozenset(job.name for job in jobs))


def test_two_jobs_may_share_both_sides_though_neither_alone():
    found = solved(BOTH_OR_NONE)
    assert found.usd == found.proven == pytest.approx(57.04) == pytest.approx(cheapest_usd(BOTH_OR_NONE, USD, 1000, 5))


@pytest.mark.parametrize("seed", range(examples(12)))
def test_nothing_is_cheaper_by_a_count_of_all_divisions(seed):
    jobs = drawn(seed)
    assert solved(jobs).usd == pytest.approx(cheapest_usd(jobs, USD, 1000, 5))


@pytest.mark.parametrize("seed", range(examples(8)))
def test_nothing_is_cheaper_in_any_modes_of_the_jobs(seed):
    jobs = drawn(seed, ANY_MODES)[:4]
    assert solved(jobs).usd == pytest.approx(cheapest_usd(jobs, USD, 1000, 5))


def test_without_colocated_places_it_is_the_cheapest_in_two_pools():
    jobs = [make_job("a", 100, 100, slo=1.0, modes=EITHER)]
    found = [Optimum(jobs, make_cluster(), rules).solve(frozenset("a")).usd for rules in (OURS, Rules(colocate=False))]
    assert found == pytest.approx([42.24, 57.04])


@pytest.mark.parametrize("seed", range(4))
def test_no_policy_finds_less(seed):
    jobs = drawn(seed, ANY_MODES)
    placer = Planner.of_one(make_cluster())
    for job in jobs:
        placer.admit(job)
    assert solved(jobs).usd <= placer.groups.usd_per_hour + 1e-6


@settings(max_examples=examples(15))
@given(st.data())
def test_at_any_moment_no_policy_finds_less_for_the_phases_that_hold_then(data):
    varying = with_varying_phases(
        [Arrival(job, 0.0, 400) for job in data.draw(made_jobs(most=4, modes=ANY_MODES))], Varying(0.1, 2.0), 0
    )
    present = [Moments(arrival).at(data.draw(st.integers(0, 399))) for arrival in varying]
    placers = [Planner.of_one(make_cluster(), rules) for rules in (OURS, LIVE)]
    for placer in placers:
        for job in present:
            placer.admit(job)
        placer.repack({job.name: Progress(age_s=1e6, done=100) for job in present})
    assert solved(present).usd <= min(placer.groups.usd_per_hour for placer in placers) + 1e-6


def test_highs_divides_as_the_dynamic_programme_does():
    cluster = make_cluster()
    jobs = drawn(3, ANY_MODES)
    divided = Division(cluster, Sharing(cluster).cheapest, OURS).solve(jobs)
    assert divided.usd == pytest.approx(solved(jobs).usd) and divided.proven == pytest.approx(divided.usd)
    assert sorted(job.name for members, _ in divided.parts for job in members) == [job.name for job in jobs]


def test_groups_of_five_among_many_jobs_are_left_out_and_hardly_missed(monkeypatch):
    cluster = make_cluster()
    feasibility = Feasibility()
    jobs = sorted((make_job(f"j{i}", 40 + 23 * i % 130, 30 + 31 * i % 110, slo=1.3 + i % 4 / 5) for i in range(11)), key=by_name)

    def divided():
        return Division(cluster, lambda jobs, below: cheapest_nodes(jobs, cluster, feasibility, below), OURS).solve(jobs)

    without = divided()
    monkeypatch.setattr(division, "FEW_JOBS", len(jobs))
    whole = divided()
    assert max(len(members) for members, _ in without.parts) <= division.MANY
    assert whole.usd <= without.usd + 1e-6 and without.usd <= 1.02 * whole.usd


def test_what_the_solver_prints_by_itself_is_not_in_our_output(monkeypatch, capfd):
    solve = scipy.optimize.milp

    def talking(*args, **kwargs):
        os.write(1, b"a line of its own\n")
        return solve(*args, **kwargs)

    monkeypatch.setattr(scipy.optimize, "milp", talking)
    cluster = make_cluster()
    Division(cluster, Sharing(cluster).cheapest, OURS).solve(drawn(3, ANY_MODES))
    told = capfd.readouterr()
    assert told.out == "" and "a line of its own" in told.err


def test_more_jobs_than_are_counted_out_are_divided_with_the_gap_told():
    jobs = [make_job(f"j{i}", 100, 100, slo=1.3) for i in range(8)]
    found = solved(jobs)
    assert found.usd == pytest.approx(4 * 57.04) and found.proven == pytest.approx(found.usd)
