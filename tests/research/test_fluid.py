"""Runs at the rate of settled periods, held against those that are carried out phase by phase."""

import itertools

import msgspec
import pytest

from research.fluid import colocated, optimal, run_fluid
from research.optimum import Optimum
from research.replay import Replay
from research.workload.varying import Moments, Varying, with_varying_phases
from research.workload.workload import Arrival
from tests.placement.made_jobs import EITHER, make_cluster, make_job
from verl_mux.placement.planner import Planner
from verl_mux.placement.rules import OURS, Rules

COUNTED = msgspec.structs.replace(OURS, count_stays=True)


def moments_of(arrivals):
    return {arrival.job.name: Moments(arrival) for arrival in arrivals}


def optimal_usd(arrivals):
    """USD per hour of the optimum while the last job is there beside the others."""
    moments, cluster = moments_of(arrivals), make_cluster()
    optimum = Optimum([job for its in moments.values() for job in its.jobs], cluster, COUNTED)
    found = run_fluid(arrivals, moments, optimal(optimum))
    return max((span for span in found.spans if len(span.steps) == len(arrivals)), key=lambda span: span.seconds).usd_per_hour


def grown(rollout, train, slo):
    """A job whose phases have doubled after 300 steps, and another of such phases as they have come to be, or were at first."""
    old = with_varying_phases([Arrival(make_job("old", rollout, train, slo=slo), 0.0, 2000)], Varying(0.0, 2.0), 0)[0]
    at_s = Moments(old).alone_s[320]
    return old, *(Arrival(make_job("new", by * rollout, by * train, slo=slo), at_s, 50) for by in (2, 1))


def test_the_optimum_plans_on_the_phases_that_hold_and_not_on_those_that_were_announced():
    old, like_now, like_then = grown(100, 100, 1.2)
    assert optimal_usd([old, like_now]) == pytest.approx(57.04)  # announced: 100 + 100 beside 200 + 200, which would be late
    assert optimal_usd([old, like_then]) == pytest.approx(2 * 57.04)  # announced: 100 + 100 beside 100 + 100


def test_the_optimum_shares_nothing_that_makes_jobs_stay_so_long_that_it_costs_more():
    arrivals = [Arrival(make_job(name, 20, 100, slo=1.8, modes=EITHER), 0.0, 100) for name in "ab"]
    moments, cluster = moments_of(arrivals), make_cluster()
    optimum = Optimum([arrival.job for arrival in arrivals], cluster, COUNTED)
    shared, apart = (run_fluid(arrivals, moments, hold).ledger.usd for hold in (optimal(optimum), colocated(cluster)))
    assert shared == pytest.approx(apart) == pytest.approx(2 * 42.24 * 12000 / 3600)
    assert Optimum([arrival.job for arrival in arrivals], cluster, OURS).solve(frozenset("ab")).usd == pytest.approx(57.04)


def test_a_job_in_steady_phases_is_as_announced_all_its_life():
    steady = Moments(Arrival(make_job("a", 60, 40), 0.0, 10))
    assert steady.jobs == [make_job("a", 60, 40)] and steady.step_after(250.0) == 2 and steady.step_after(1000.0) == 9


def test_phases_that_double_are_followed_in_stretches_whose_means_hold():
    (arrival,) = with_varying_phases([Arrival(make_job("a", 60, 40, sync_s=1), 0.0, 500)], Varying(0.1, 2.0), 0)
    moments = Moments(arrival)
    seconds = [moments.at(step).iteration_s for step in range(500)]
    assert sum(seconds) == pytest.approx(moments.alone_s[-1])
    assert 5 <= len(moments.jobs) <= 12 and len({job.name for job in moments.jobs}) == len(moments.jobs)
    for step, (rollout, train) in enumerate(itertools.islice(arrival.draws(), 500)):
        real = moments.alone_s[step + 1] - moments.alone_s[step]
        assert real == pytest.approx(1 + rollout + train) == pytest.approx(seconds[step], rel=0.5)
    assert seconds[0] == pytest.approx(101, rel=0.1) and seconds[-1] == pytest.approx(201, rel=0.05)


def test_phases_that_vary_and_grow_take_a_colocated_job_as_long_as_one_alone():
    cluster = make_cluster()
    steady = [Arrival(make_job("a", 60, 40, sync_s=1), 3600.0, 400), Arrival(make_job("b", 30, 70), 0.0, 200)]
    varying = with_varying_phases(steady, Varying(0.1, 2.0), 0)
    alone = {job.job: job for job in Replay(varying, Planner.of_one(cluster, Rules(cap=1)), cluster).run().finished}
    for job in run_fluid(varying, moments_of(varying), colocated(cluster)).finished:
        assert job.solo_s == pytest.approx(alone[job.job].solo_s) and job.solo_s > 1.2 * job.planned_solo_s
        assert job.ended_s - job.placed_s == pytest.approx(job.solo_s)
