"""The promises of placement, on random histories of arrivals and departures."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from research.policies import PAPER, by_its_rules
from tests.exploring import examples
from tests.placement.made_jobs import ANY_MODES, EITHER, Planner, assert_invariants, jobs, make_cluster, make_job
from verl_mux.errors import UserError
from verl_mux.placement.feasibility import Progress
from verl_mux.placement.group_run import group_periods
from verl_mux.placement.groups import isolated_usd
from verl_mux.placement.model import COLOCATED, LIVE, OURS, SEPARATE, Rules
from verl_mux.placement.planner import Open

# No two such jobs fit on one node.
ALONE = {"rollout_memory_gb": 600.0, "train_memory_gb": 600.0}


def old(placer: Planner) -> dict[str, Progress]:
    """Everybody has run for a day without delay and waits for its next rollout."""
    placed = [job for group in placer.groups.values() for job in group.jobs]
    return {job.name: Progress(age_s=100 * job.iteration_s, done=100, phase="rollout") for job in placed}


# With the paper's rules j1 trains on both nodes that j0 needs, and keeps them when j0 has left, could it be colocated or not.
SMALL, SEPARATED = (
    [make_job(f"j{i}", 5, 5, rollout_nodes=n, train_nodes=n, slo=1.0, modes=modes) for i, n in enumerate((2, 1, 1))]
    for modes in ((SEPARATE,), EITHER)
)


@settings(max_examples=examples(40))
@example(given_jobs=SMALL, leaving=range(7), rules=PAPER)
@example(given_jobs=SEPARATED, leaving=range(7), rules=PAPER)
@given(
    given_jobs=jobs(most=7, modes=ANY_MODES),
    leaving=st.permutations(range(7)),
    rules=st.sampled_from((OURS, LIVE, PAPER, Rules(cap=2), Rules(colocate=False))),
)
def test_whoever_comes_and_goes_every_promise_holds(given_jobs, leaving, rules):
    placer = by_its_rules(Planner.of_one(make_cluster(), rules))
    for job in given_jobs:
        decision = placer.admit(job, old(placer))
        assert decision.outcome == "placed" and decision.usd_per_hour <= isolated_usd(job, placer.placer.cluster) + 1e-6
        assert_invariants(placer)
    for index in leaving:
        if index < len(given_jobs):
            placer.depart(given_jobs[index].name, old(placer))
            assert_invariants(placer)
    assert not placer.groups and placer.groups.usd_per_hour == 0


@settings(max_examples=examples(30))
@given(given_jobs=jobs(most=8, modes=ANY_MODES), order=st.randoms(use_true_random=False))
def test_in_a_finite_cluster_everybody_starts_in_the_end(given_jobs, order):
    placer = Planner.of_one(make_cluster(2, 2), Rules(max_bypass=2))
    started, running = set(), []
    for job in given_jobs:
        if placer.admit(job, old(placer)).outcome == "placed":
            started.add(job.name)
            running.append(job.name)
        assert_invariants(placer)
    while running:
        moves = placer.depart(running.pop(order.randrange(len(running))), old(placer))
        starts = [move.job for move in moves if move.kind == "start"]
        started |= set(starts)
        running += starts
        assert_invariants(placer)
    assert started == {job.name for job in given_jobs}


def test_a_waiting_job_is_passed_so_often_and_no_more():
    placer = Planner.of_one(make_cluster(2, 2), Rules(max_bypass=3))
    assert placer.admit(make_job("small0", 100, 100, **ALONE)).outcome == "placed"
    assert placer.admit(make_job("wide", 100, 100, **ALONE, rollout_nodes=2, train_nodes=2)).outcome == "queued"
    assert placer.admit(make_job("small1", 100, 100, **ALONE)).outcome == "placed"
    running, passed = ["small0", "small1"], 1
    for number in range(2, 9):
        placer.depart(running.pop(0))
        if "wide" in placer.groups.home:
            break
        if placer.admit(make_job(f"small{number}", 100, 100, **ALONE)).outcome == "placed":
            running.append(f"small{number}")
            passed += 1
    assert "wide" in placer.groups.home and passed == 3


def placed(*jobs, rules: Rules = OURS, cluster=None) -> Planner:
    placer = Planner.of_one(cluster or make_cluster(), rules)
    for job in jobs:
        placer.admit(job)
    return placer


def four(rules: Rules = OURS, **fields) -> tuple[Planner, list[tuple[str, str]]]:
    """Four alike in two groups; and who shares with whom."""
    placer = placed(*(make_job(name, 100, 100, slo=1.3, cold_start_s=60, **fields) for name in "axby"), rules=rules)
    return placer, [tuple(job.name for job in group.jobs) for group in placer.groups.values()]


def test_the_complementary_jobs_of_the_paper_share_all_nodes():
    placer = Planner.of_one(make_cluster())
    first = placer.admit(make_job("a", 132, 104, slo=1.3))
    second = placer.admit(make_job("b", 137, 103, slo=1.3))
    assert (first.strategy, second.strategy, second.usd_per_hour) == ("isolated", "direct packing", 0)
    assert group_periods(placer.groups["g1"])["a"] == pytest.approx(269)


def test_a_skewed_job_brings_rollout_nodes_and_shares_the_training_node():
    placer = placed(make_job("a", 200, 50, slo=1.1))
    decision = placer.admit(make_job("b", 200, 50, slo=1.1))
    assert decision.strategy == "rollout scaling" and decision.usd_per_hour == pytest.approx(14.8)


def test_after_a_departure_those_left_share_nodes_once_it_pays():
    placer, pairs = four()
    young = {stays: Progress(age_s=30) for _, stays in pairs}
    assert [placer.depart(gone, young) for gone, _ in pairs] == [[], []]
    aged = {name: Progress(age_s=200 * 500, done=500) for name in young}
    (move,) = placer.repack(aged)
    assert move.kind == "move" and move.load_s == 60 and len(placer.groups) == 1
    assert_invariants(placer)


def test_of_jobs_that_turn_out_to_need_fewer_nodes_one_moves_to_the_others():
    placer = placed(*(make_job(name, 300, 50, slo=1.6) for name in "ab"))
    (group,) = placer.groups.values()
    assert len(group.rollout_nodes) == 2, "they share the training node alone"
    aged = {name: Progress(age_s=20_000, done=100) for name in ("a", "b")}
    moves = []
    for name in ("a", "b"):
        moves += placer.revise(make_job(name, 100, 100, slo=1.6, cold_start_s=60), aged).moves
    (move,) = moves
    (group,) = placer.groups.values()
    assert move.kind == "move" and len(group.rollout_nodes) == len(group.train_nodes) == 1
    assert_invariants(placer)


def test_a_job_that_turns_out_longer_moves_out_of_the_group_it_would_spoil():
    placer = placed(make_job("a", 100, 100, slo=1.2), make_job("b", 100, 100, slo=1.2))
    assert len(placer.groups) == 1
    revision = placer.revise(make_job("b", 300, 200, slo=1.2), old(placer))
    assert [move.kind for move in revision.moves] == ["move"] and len(placer.groups) == 2
    (action,) = revision.actions
    assert action.kind == "move" and "its SLO allows 240 s" in action.reason
    assert_invariants(placer)


def test_where_nobody_can_be_moved_the_tightest_goes_first_and_it_is_said_why():
    placer = placed(*(make_job(name, 100, 100, slo=1.2, movable=False) for name in "ab"))
    revision = placer.revise(make_job("b", 300, 200, slo=1.2, movable=False), old(placer))
    assert revision.moves == () and len(placer.groups) == 1
    (action,) = revision.actions
    assert (action.kind, action.job) == ("priority", "a") and "no job can move" in action.reason
    assert placer.groups.group_of("a").order == "tightest-first"


def test_a_job_that_nobody_can_start_again_is_not_moved():
    placer, pairs = four(movable=False)
    for gone, _ in pairs:
        placer.depart(gone)
    assert placer.repack({stays: Progress(age_s=200 * 500, done=500) for _, stays in pairs}) == []


def test_a_saving_must_pay_so_many_times():
    def moved_at(hysteresis: float) -> bool:
        placer, pairs = four(Rules(hysteresis=hysteresis))
        for gone, _ in pairs:
            placer.depart(gone, {stays: Progress(age_s=30) for _, stays in pairs})
        return bool(placer.repack({stays: Progress(age_s=20_000, done=100) for _, stays in pairs}))

    assert moved_at(1.0) and not moved_at(1000.0)


@pytest.mark.parametrize(
    ("lefts", "moves"),
    [
        ((1000, 1000), True),
        ((1000, 2), False),  # what is saved for 400 s pays for no move of 60, ten times over
        ((1000, None), False),  # who does not say is expected to stay as long as it has: 30 s
        ((None, 2), False),
    ],
)
def test_nobody_is_moved_beside_a_job_that_ends_soon(lefts, moves):
    placer, pairs = four(Rules(hysteresis=10.0))
    progress = {stays: Progress(age_s=30, solo_s=10_000, left=left) for (_, stays), left in zip(pairs, lefts, strict=True)}
    moved = [move.job for goes, _ in pairs for move in placer.depart(goes, progress)]
    assert bool(moved) is moves
    pending = placer.answer(Open(), progress).pending
    assert not placer.repack(progress) and pending is (None in lefts and 2 not in lefts)


@pytest.mark.parametrize("rules", [OURS, LIVE])
def test_a_job_that_can_runs_both_phases_where_that_costs_less(rules):
    placer = Planner.of_one(make_cluster(), rules)
    first = placer.admit(make_job("a", 100, 100, slo=1.3, modes=EITHER))
    assert (first.strategy, first.rollout, first.train) == ("colocated", ("train-0",), ("train-0",))
    assert first.usd_per_hour == pytest.approx(42.24)
    assert placer.admit(make_job("b", 100, 100, slo=1.3)).strategy == "isolated", "it cannot"
    assert_invariants(placer)


def test_who_can_only_be_colocated_is_nowhere_else_whatever_the_rules():
    placer = Planner.of_one(make_cluster(), Rules(colocate=False))
    assert placer.admit(make_job("only", 100, 100, slo=1.0, modes=(COLOCATED,))).strategy == "colocated"
    assert placer.admit(make_job("either", 100, 100, slo=1.0, modes=EITHER)).strategy == "isolated"


def test_a_colocated_job_lets_others_onto_its_node():
    placer = placed(make_job("a", 100, 20, slo=1.9, modes=EITHER))
    trains = placer.admit(make_job("b", 100, 20, slo=1.5))
    assert trains.strategy == "rollout scaling" and trains.usd_per_hour == pytest.approx(14.8)
    assert trains.train == placer.groups.pin_of("a").train
    alike = [placer.admit(make_job(name, 100, 100, slo=2.0, modes=(COLOCATED,))) for name in ("c", "d")]
    assert [each.strategy for each in alike] == ["colocated", "direct packing"]
    assert_invariants(placer)


def test_both_states_of_a_colocated_job_must_fit_on_its_node():
    placer = placed(make_job("a", 100, 10, slo=2.0, modes=(COLOCATED,), rollout_memory_gb=400, train_memory_gb=300))
    other = placer.admit(make_job("b", 10, 10, slo=2.0, modes=(COLOCATED,), rollout_memory_gb=100, train_memory_gb=250))
    assert other.strategy == "colocated"
    either = placer.admit(make_job("either", 10, 10, modes=EITHER, rollout_memory_gb=500, train_memory_gb=600))
    assert either.rollout != either.train, "both states fit on no node"
    with pytest.raises(UserError, match="1100 GB of host memory per train node"):
        placer.admit(make_job("c", 10, 10, modes=(COLOCATED,), rollout_memory_gb=500, train_memory_gb=600))


def test_a_job_moves_to_the_other_mode_when_that_pays():
    placer = placed(*(make_job(name, 100, 100, slo=1.3, cold_start_s=60, modes=EITHER) for name in "ab"))
    assert placer.groups.usd_per_hour == pytest.approx(2 * 42.24)
    moves = placer.repack({name: Progress(age_s=20_000, done=100) for name in ("a", "b")})
    assert sorted(move.job for move in moves) == ["a", "b"] and all(move.rollout != move.train for move in moves)
    assert placer.groups.usd_per_hour == pytest.approx(57.04)
    assert_invariants(placer)


def test_new_estimates_leave_a_colocated_job_colocated():
    placer = placed(make_job("a", 100, 100, modes=EITHER))
    placer.revise(make_job("a", 120, 100, modes=EITHER), old(placer))
    (job,) = placer.groups.group_of("a").jobs
    assert job.colocated and job.rollout.seconds == 120
    assert_invariants(placer)


def test_where_one_pool_is_too_small_the_other_mode_may_do():
    placer = Planner.of_one(make_cluster(1, 2))
    wide = make_job("wide", 100, 100, rollout_nodes=2, train_nodes=2, modes=EITHER)
    assert placer.admit(wide).strategy == "colocated"
    with pytest.raises(UserError, match="needs 2 rollout nodes; pool 'rollout' has 1"):
        placer.admit(make_job("other", 100, 100, rollout_nodes=2, train_nodes=2, modes=(SEPARATE,)))


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (make_job("big", 10, 10, rollout_nodes=3), "needs 3 rollout nodes; pool 'rollout' has 2"),
        (make_job("fat", 10, 10, train_memory_gb=2000), "2000 GB of host memory per train node"),
    ],
)
def test_a_job_that_the_cluster_can_never_hold_is_refused(job, words):
    with pytest.raises(UserError, match=words):
        Planner.of_one(make_cluster(2, 2)).admit(job)


def test_names_are_unique_and_only_who_is_there_departs():
    placer = placed(make_job("a", 10, 10))
    with pytest.raises(UserError, match="names are unique"):
        placer.admit(make_job("a", 10, 10))
    assert placer.depart("b") == []


def test_nobody_moves_for_what_another_job_of_its_group_was_only_said_to_take():
    placer = placed(*(make_job(name, 100, 100, slo=1.2) for name in "ab"))
    longer = make_job("a", 100, 150, slo=1.2)
    known = old(placer)
    for unseen in ({"a": known["a"]}, {**known, "b": Progress(age_s=500, done=2)}, {**known, "b": Progress(done=9, seen=2)}):
        revision = placer.revise(longer, unseen)
        assert revision.moves == () and len(placer.groups) == 1
    assert [move.kind for move in placer.revise(placer.groups.group_of("b").jobs[1], known).moves] == ["move"]


def test_nobody_moves_for_a_delay_that_a_move_would_only_make_longer():
    placer = placed(*(make_job(name, 100, 100, slo=1.6, cold_start_s=300) for name in "ab"))
    (group,) = placer.groups.values()
    # a waited for b's start-up: 5 iterations took what 10 take alone.
    progress = {"a": Progress(age_s=2000, done=5, phase="rollout"), "b": Progress(age_s=1000, done=5, phase="rollout")}
    revision = placer.revise(group.jobs[0], progress)
    assert revision.moves == () and [action.kind for action in revision.actions] in ([], ["order"], ["priority"])
    assert placer.revise(placer.groups.group_of("a").jobs[0], progress).actions == ()
