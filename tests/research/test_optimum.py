"""The optimum is what counting out all divisions finds; runs at the rate of settled periods."""

import itertools
import os
import random

import msgspec
import pytest
import scipy.optimize
from hypothesis import given, settings
from hypothesis import strategies as st

from research import optimum as division
from research.fluid import colocated, gavel, ideal, optimal, own_split, run_fluid
from research.optimum import Division, Optimum, Sharing
from research.replay import Replay
from research.simulate import Study, simulate
from research.workload.varying import Moments, Varying, with_varying_phases
from research.workload.workload import Arrival, TraceRow, find_shapes
from tests.exploring import examples
from tests.placement.made_jobs import ANY_MODES, CHEAP, EITHER, Planner, make_cluster, make_job
from tests.placement.made_jobs import jobs as made_jobs
from tests.research.counted_out import cheapest_usd
from verl_mux.placement.divisions import cheapest_nodes
from verl_mux.placement.feasibility import Feasibility, Progress
from verl_mux.placement.model import LIVE, OURS, SEPARATE, TESTBED, Rules

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


def iteration(job, rollout, train):
    return job.rollout_nodes * job.rollout.seconds / rollout + job.train_nodes * job.train.seconds / train


@pytest.mark.parametrize(("seconds", "nodes"), [((315, 121), (1, 1)), ((268, 362), (2, 2)), ((50, 200), (1, 2))])
def test_the_split_of_gavel_is_as_fast_as_the_job_alone_and_no_other_is_cheaper(seconds, nodes):
    job = make_job("a", *seconds, rollout_nodes=nodes[0], train_nodes=nodes[1])
    rollout, train = own_split(job, USD)
    cost = rollout * USD[0] + train * USD[1]
    assert iteration(job, rollout, train) == pytest.approx(sum(seconds))
    for by in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
        left = sum(seconds) - nodes[0] * seconds[0] / (rollout * by)  # seconds for the training, if any
        assert left <= 0 or rollout * by * USD[0] + nodes[1] * seconds[1] / left * USD[1] > cost


def test_under_gavel_a_job_of_long_rollouts_holds_more_of_the_cheap_nodes_and_part_of_a_dear_one():
    held = gavel(make_cluster())({"a": make_job("a", 315, 121, sync_s=1), "b": make_job("b", 315, 121, sync_s=1)})
    assert held.nodes[0] > 2 > held.nodes[1] and held.usd_per_hour < 2 * 57.04
    assert held.usd_per_hour == pytest.approx(held.nodes[0] * 14.8 + held.nodes[1] * 42.24)
    assert held.periods == {"a": 437, "b": 437}
    assert sum(busy / nodes for busy, nodes in zip(held.busy, held.nodes, strict=True)) == pytest.approx(1.0)  # one at a time


def test_the_bound_is_what_the_phases_alone_would_cost():
    jobs = {"a": make_job("a", 60, 40, sync_s=20), "b": make_job("b", 60, 60, rollout_nodes=2, train_nodes=3)}
    held = ideal(make_cluster(), OURS)(jobs)
    assert held.nodes == held.busy == pytest.approx((80 / 120 + 2 * 60 / 120, 40 / 120 + 3 * 60 / 120))
    assert held.usd_per_hour == pytest.approx(held.nodes[0] * 14.8 + held.nodes[1] * 42.24)


def test_the_bound_counts_a_job_in_the_mode_in_which_its_phases_cost_the_least():
    job = make_job("a", 60, 60, rollout_nodes=4, train_nodes=4, modes=EITHER)
    dear = make_cluster()
    cheap = msgspec.structs.replace(CHEAP, usd_per_gpu_hour=1.0)
    cheaper = msgspec.structs.replace(dear, train=msgspec.structs.replace(dear.train, kind=cheap))
    assert ideal(dear, OURS)({"a": job}).nodes == (2, 2)
    assert ideal(cheaper, OURS)({"a": job}).nodes == (0, 4)
    assert ideal(cheaper, Rules(colocate=False))({"a": job}).nodes == (2, 2)


def test_no_policy_costs_less_than_the_bound_while_phases_vary_and_grow():
    names = ("ideal", "live", "ours", "rollmux", "colocated", "gavel", "random", "most-idle")
    study = Study(
        rows=[TraceRow(f"job{i}", i * 0.5, 2.0 + i % 3) for i in range(8)], shapes=find_shapes("mixed"), slo=(2.0, 2.0),
        policies=names, cluster=TESTBED, rules=OURS, varying=Varying(0.1, 2.0), movable=True, seeds=2, max_optimum_jobs=0,
    )  # fmt: skip
    found = {name: each["usd_per_hour_mean"] for name, each in simulate(study)["policies"].items()}
    assert min(found, key=found.__getitem__) == "ideal"
