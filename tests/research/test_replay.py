"""One run, phase by phase: when each job ends, the books, and the greedy search beside the optimum."""

import pytest
from msgspec import structs

from research.policies import PAPER, by_its_rules, is_saturated
from research.replay import Replay
from research.workload.varying import Varying, profiled, with_varying_phases
from research.workload.workload import Arrival, TraceRow, draw_workload, find_shapes
from tests.placement.made_jobs import EITHER, Planner, assert_invariants, make_cluster, make_job
from verl_mux.placement.groups import isolated, isolated_usd, with_newcomer
from verl_mux.placement.model import LIVE, OURS, SEPARATE, TESTBED, Rules


def run(arrivals, rules=OURS, cluster=None):
    cluster = cluster or make_cluster()
    return Replay(arrivals, Planner.of_one(cluster, rules), cluster).run()


def test_a_job_alone_takes_its_time_and_pays_for_its_nodes():
    found = run([Arrival(make_job("a", 60, 40, sync_s=1), 3600.0, 10)])
    (job,) = found.finished
    assert (job.placed_s, job.ended_s, job.solo_s) == (3600, 3600 + 1010, 1010)
    assert found.ledger.usd == pytest.approx(57.04 * 1010 / 3600)
    assert found.ledger.busy_s == pytest.approx([610, 400]) and found.ledger.held_s == pytest.approx([1010, 1010])


def test_a_colocated_job_pays_for_training_nodes_alone():
    found = run([Arrival(make_job("a", 60, 40, sync_s=1, modes=EITHER), 3600.0, 10)])
    (job,) = found.finished
    assert job.ended_s - job.placed_s == job.solo_s == 1010 and found.ledger.usd == pytest.approx(42.24 * 1010 / 3600)
    assert found.ledger.busy_s == pytest.approx([0, 1010]) and found.ledger.held_s == pytest.approx([0, 1010])


def profiled_run(*arrivals):
    """Under the coordinator's rules, profiled first."""
    cluster = make_cluster()
    placer = Planner.of_one(cluster, LIVE)
    return Replay([profiled(arrival, movable=False) for arrival in arrivals], placer, cluster, learns=True).run()


def test_who_stays_on_the_nodes_of_its_profile_does_no_step_twice_and_starts_once():
    found = profiled_run(Arrival(make_job("a", 60, 40, sync_s=1, cold_start_s=30), 3600.0, 10))
    (job,) = found.finished
    assert (job.arrived_s, job.placed_s, job.profile_s) == (3600, 3600, 0) and job.stay_s == job.solo_s == 1040
    assert found.ledger.usd == pytest.approx(57.04 * 1040 / 3600)


def test_who_joins_others_after_its_profile_begins_anew():
    jobs = [Arrival(make_job(name, 100, 100, slo=2.0, cold_start_s=30), at_s, 20) for name, at_s in (("a", 0.0), ("b", 100.0))]
    found = {job.job: job for job in profiled_run(*jobs).finished}
    assert (found["a"].placed_s, found["a"].profile_s) == (0, 0)
    assert (found["b"].placed_s, found["b"].profile_s) == (730, 630) and found["b"].stay_s >= 30 + 20 * 200


def test_a_job_that_its_profile_brings_to_its_end_is_placed_nowhere():
    found = profiled_run(Arrival(make_job("a", 60, 40, cold_start_s=30), 0.0, 2))
    (job,) = found.finished
    assert (job.placed_s, job.ended_s, job.solo_s) == (0, 230, 230)
    assert found.ledger.usd == pytest.approx(57.04 * 230 / 3600) and found.ledger.peak_nodes == [0, 0]


def test_two_jobs_take_turns_and_halve_the_cost():
    jobs = [Arrival(make_job(name, 100, 100, slo=1.5), 0.0, 20) for name in ("a", "b")]
    shared, alone = run(jobs), run(jobs, Rules(cap=1))
    assert shared.ledger.usd == pytest.approx(alone.ledger.usd / 2, rel=0.05)
    assert max(job.ended_s for job in shared.finished) == pytest.approx(4100)


def test_who_waits_in_a_finite_cluster_starts_when_somebody_ends():
    jobs = [Arrival(make_job(name, 100, 20, slo=1.0), 0.0, 5) for name in ("a", "b")]
    first, second = run(jobs, cluster=make_cluster(1, 1)).finished
    assert second.placed_s == first.ended_s == 600 and second.ended_s == 1200


class Watched(Planner):
    """Checks every promise after every answer."""

    def answer(self, *given, **named):
        found = super().answer(*given, **named)
        assert_invariants(self)
        return found


class Recording(Planner):
    """Keeps which progress it is shown, and which jobs it may not move."""

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.noted = []

    def answer(self, question, progress, now, held):
        self.noted.append((now, dict(progress), held))
        return super().answer(question, progress, now, held)


def test_live_is_told_of_jobs_what_the_coordinator_tells():
    """Nothing before a job's first step, its time from there on, and that one on its way is not to be moved again."""
    cluster = make_cluster()
    jobs = [make_job(f"j{i}", 100, 60, slo=1.9, cold_start_s=100.0, move_s=900.0, modes=EITHER) for i in range(4)]
    arrivals = with_varying_phases([Arrival(job, 800.0 * i, 60) for i, job in enumerate(jobs)], Varying(0.1, 2.0), 1)
    placer = Recording.of_one(cluster, LIVE)
    found = Replay(arrivals, placer, cluster, learns=True).run()
    assert sum(job.moves for job in found.finished) >= 1 and any(held for _, _, held in placer.noted)
    for now, progress, held in placer.noted:
        assert held == {name for name, at in progress.items() if at.phase == "loading"}
        for name, at in progress.items():
            assert at.age_s == pytest.approx(now - arrivals[int(name[1:])].at_s - 100) and at.age_s >= 0


@pytest.mark.parametrize("modes", [(SEPARATE,), EITHER])
@pytest.mark.parametrize("shapes", ["balanced", "rollout-heavy", "train-heavy", "mixed"])
def test_jobs_that_share_and_move_keep_within_their_slos(shapes, modes):
    rows = [TraceRow(f"job{i}", i * 0.2, 0.3 + i * 7 % 5 / 4) for i in range(16)]
    arrivals = draw_workload(rows, find_shapes(shapes), (1.0, 2.0), seed=1)
    arrivals = [structs.replace(each, job=structs.replace(each.job, modes=modes)) for each in arrivals]
    found = Replay(arrivals, Watched.of_one(TESTBED), TESTBED).run()
    assert len(found.finished) == 16
    assert all(job.stay_s <= job.slo * job.solo_s * (1 + 1e-9) for job in found.finished)


@pytest.mark.parametrize(("prune", "group"), [(True, "g2"), (False, "g1")])
def test_under_the_papers_rules_a_newcomer_trains_on_the_whole_pool_of_a_group_that_is_not_saturated(prune, group):
    placer = by_its_rules(Planner.of_one(make_cluster(), structs.replace(PAPER, prune_saturated=prune)))
    placer.admit(make_job("a", 100, 50, train_nodes=2))
    assert placer.admit(make_job("b", 50, 100)).train == ("train-0", "train-1")
    assert placer.admit(make_job("wide", 10, 10, train_nodes=3)).group == "g2", "for which the group has too few nodes"
    assert placer.admit(make_job("c", 10, 10, slo=30)).group == group, "a and b keep the nodes of g1 busy"


@pytest.mark.parametrize(("train_s", "switch_s", "saturated"), [(40, 0, False), (40, 5, True), (55, 0, True)])
def test_a_group_is_saturated_when_its_busiest_node_has_no_bubble(train_s, switch_s, saturated):
    a, b = (make_job(name, 45, seconds, train_switch_s=switch_s) for name, seconds in (("a", 50), ("b", train_s)))
    first = isolated(a)
    assert is_saturated(with_newcomer(first, b, ["r"], first.train_nodes)) is saturated


ROWS = [TraceRow(f"job{i}", float(i), 10.0) for i in range(100)]


def saving(rules, seed):
    """USD per hour of every job alone, over what they are placed for."""
    jobs = [arrival.job for arrival in draw_workload(ROWS, find_shapes("mixed"), (1.0, 2.0), seed)]
    placer = by_its_rules(Planner.of_one(TESTBED, rules))
    for job in jobs:
        placer.admit(job)
    return sum(isolated_usd(job, TESTBED) for job in jobs) / placer.placer.groups.usd_per_hour


@pytest.mark.parametrize("seed", range(3))
def test_live_saves_at_least_what_algorithm_1_does(seed):
    assert saving(LIVE, seed) >= saving(PAPER, seed)
