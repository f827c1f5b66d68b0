"""A group in virtual time, and whether it keeps its SLOs: settled, while phases vary, and as it stands now."""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.placement.made_jobs import ANY_MODES, EITHER, Planner, assert_invariants, jobs, make_cluster, make_job
from verl_mux.placement import feasibility as forecast
from verl_mux.placement.feasibility import Feasibility, Progress, late_job, likely, nodes_of_pairs
from verl_mux.placement.group_run import ROLLOUT, TRAIN, group_periods, periods, planned_run, rollout_bits, settle
from verl_mux.placement.groups import pairs_of_pins
from verl_mux.placement.model import ORDERS, Estimate, Group, Pin


@st.composite
def shared(draw):
    """Jobs as they are placed, and nodes (bits) such that any pairs of them share nodes of either side."""
    found = [draw(st.sampled_from(job.in_modes)) for job in draw(jobs(modes=ANY_MODES))]
    pairs = len(found) * (len(found) - 1) // 2
    rollout, train = (draw(st.integers(0, 2**pairs - 1)) for _ in range(2))
    trained = [bits << pairs for bits in nodes_of_pairs(train, len(found))]
    return found, rollout_bits(found, nodes_of_pairs(rollout, len(found)), trained), trained


@given(found=jobs())
def test_where_all_meet_on_both_sides_the_closed_form_agrees_with_the_events(found):
    everybody = [1] * len(found), [2] * len(found)
    settled = settle(planned_run(found, *everybody, "fifo"))
    closed = periods(found, *everybody)
    assert closed == pytest.approx(settled)


@given(case=shared(), order=st.sampled_from(sorted(ORDERS)))
def test_no_node_is_held_twice_and_no_gang_is_half_granted(case, order):
    found, rollout, train = case
    run = planned_run(found, rollout, train, order)
    for _ in range(200):
        run.step()
        run.next_end()
        running = [m for m, end in zip(run.members, run.ends, strict=True) if end < float("inf")]
        for a, b in itertools.combinations(running, 2):
            assert not a.needs[a.phase] & b.needs[b.phase]
        held = 0
        for member in running:
            assert member.phase in (ROLLOUT, TRAIN) and member.needs[member.phase] & ~run.held == 0
            held |= member.needs[member.phase]
        assert held == run.held
        assert {*run.waiting}.isdisjoint(running) and len(run.waiting) + len(running) == len(found)


@given(case=shared())
def test_nobody_is_faster_than_alone(case):
    found, rollout, train = case
    assert all(p >= j.iteration_s * (1 - 1e-9) for p, j in zip(periods(found, rollout, train), found, strict=True))


def test_two_jobs_on_one_rollout_node_take_turns_as_in_figure_3():
    pins = [("a", 262.3, 86.7), ("b", 310.0, 120.5)]
    group = Group(
        name="g",
        pins=tuple(Pin(job=make_job(n, r, t), rollout=("r",), train=(f"t{n}",)) for n, r, t in pins),
        rollout_nodes=("r",),
        train_nodes=("ta", "tb"),
    )
    assert group_periods(group)["a"] == pytest.approx(572.3)


def test_periods_are_judged_and_told_from_the_same_start():
    """This group settles in another course, too slow for `slow`, if it begins in another order."""
    a = make_job("a", 5, 5, slo=2.0, rollout_nodes=2, train_nodes=2)
    b = make_job("b", 10, 20, sync_s=1.0, rollout_switch_s=2.0, slo=1.6, train_nodes=2)
    slow = make_job("slow", 5, 20, sync_s=1.0, train_switch_s=4.0, slo=1.3, rollout_nodes=2, train_nodes=2)
    pins = (
        Pin(job=slow, rollout=("r5", "r6"), train=("t7", "t8")),
        Pin(job=b, rollout=("r5",), train=("t3", "t11")),
        Pin(job=a, rollout=("r6", "r5"), train=("t4", "t5")),
    )
    nodes = {"rollout_nodes": ("r5", "r6"), "train_nodes": ("t3", "t4", "t5", "t7", "t8", "t11")}
    for order in itertools.permutations(pins):
        group = Group(name="g", pins=order, **nodes)
        periods = group_periods(group)
        judged = Feasibility().allows(group.jobs, *pairs_of_pins(order))
        assert judged and periods["slow"] == 33.0 < slow.limit_s


def test_a_tail_lets_the_next_job_onto_the_nodes():
    tails = [make_job(name, 200, 50, tail_s=tail) for name, tail in (("a", 0.0), ("b", 0.0))]
    with_tails = [make_job(name, 200, 50, tail_s=60.0) for name in ("a", "b")]
    assert periods(with_tails, [1, 1], [2, 2])[0] < periods(tails, [1, 1], [2, 2])[0]


def colocated(name: str, rollout: float, train: float, **fields):
    return make_job(name, rollout, train, modes=EITHER, colocated=True, **fields)


def test_colocated_jobs_on_one_node_take_turns_phase_by_phase():
    """Each pays its switch for every phase, as the other's comes between."""
    found = [colocated(name, 60, 40, rollout_switch_s=2, train_switch_s=3) for name in ("a", "b")]
    assert periods(found, [1, 1], [1, 1]) == [210, 210]
    assert periods(found[:1], [1], [1])[0] == 100


def test_a_job_trains_on_the_node_of_a_colocated_one_while_its_own_rollouts_run_elsewhere():
    found = [colocated("a", 60, 40), make_job("b", 90, 20)]
    assert periods(found, [2, 1], [2, 2]) == [120, 120]
    assert periods([found[0], make_job("c", 80, 100)], [2, 1], [2, 2]) == [200, 200]


def varying(job, cv=0.1, unsure=0.0):
    changed = (msgspec.structs.replace(estimate, cv=cv, unsure=unsure) for estimate in (job.rollout, job.train))
    return msgspec.structs.replace(job, **dict(zip(("rollout", "train"), changed, strict=True)))


def pair(slo, **noise):
    return [varying(make_job(name, 100, 100, slo=slo), **noise) for name in ("a", "b")]


def kept(jobs, keep=0.95):
    return likely(jobs, [1, 1], [2, 2], "fifo", keep)


def test_two_jobs_that_just_fit_do_not_when_phases_vary():
    assert kept(pair(1.0, cv=0.0)) and not kept(pair(1.0, cv=0.1)) and kept(pair(1.3, cv=0.1))


def test_who_is_unsure_of_the_estimates_needs_more_room():
    room = 1.06
    assert kept(pair(room, cv=0.01)) and not kept(pair(room, cv=0.01, unsure=0.5))


def test_the_same_question_has_the_same_answer():
    assert len({kept(pair(1.08, cv=0.1), keep) for keep in (0.9, 0.9, 0.9)}) == 1


def test_without_noise_nothing_is_run_and_a_placer_that_must_be_sure_refuses_more():
    sure, plain = Feasibility(keep=0.95), Feasibility()
    assert plain.allows(pair(1.0), 1, 1) and not sure.allows(pair(1.0), 1, 1)
    steady = [make_job(name, 100, 100, slo=1.0) for name in ("c", "d")]
    assert sure.allows(steady, 1, 1) and Estimate(seconds=1.0).cv == 0.0


# `b` just makes it if `a` is slow to get back to the training node that they share.
A = make_job("a", 66.9, 73, slo=1.8, train_switch_s=4.1)
B = make_job("b", 195.7, 161, slo=1.108, rollout_nodes=2, train_nodes=2)
GROUP = Group(
    name="g",
    pins=(Pin(job=A, rollout=("r0",), train=("t0",)), Pin(job=B, rollout=("r1", "r2"), train=("t0", "t1"))),
    rollout_nodes=("r0", "r1", "r2"),
    train_nodes=("t0", "t1"),
)


def test_whether_a_job_is_warm_can_decide_who_is_late():
    at = Progress(age_s=20000, done=141, phase="rollout", remaining_s=53.2)
    cold = Progress(age_s=20000, done=141, phase="rollout", remaining_s=53.2, warm=(("r0",), ()))
    warm = Progress(age_s=20000, done=141, phase="rollout", remaining_s=53.2, warm=(("r0",), ("t0",)))
    assert late_job(GROUP, {"a": cold}, {"b": 0.0}) is None
    assert late_job(GROUP, {"a": at}, {"b": 0.0}) is None
    assert late_job(GROUP, {"a": warm}, {"b": 0.0}) == "b"


def test_a_cold_start_counts_until_the_job_is_old_enough_to_bear_it():
    alone = Group(name="g", pins=(GROUP.pins[0],), rollout_nodes=("r0",), train_nodes=("t0",))
    young, old = (Progress(age_s=done * A.iteration_s, done=done) for done in (0, 10))
    assert late_job(alone, {"a": young}, {"a": 200.0}) == "a"
    assert late_job(alone, {"a": old}, {"a": 200.0}) is None


# `fast` gains 3 s on `slow` with every iteration; once they meet at the training node they share it must go at its pace.
FAST, SLOW = make_job("fast", 210, 74, slo=1.005), make_job("slow", 211, 74, slo=1.5, train_switch_s=2)


def _meeting_in(seconds: float) -> dict[str, Progress]:
    return {
        "fast": Progress(age_s=1000 * FAST.iteration_s, done=1000, phase="rollout", remaining_s=210.0),
        "slow": Progress(age_s=1000 * SLOW.iteration_s, done=1000, phase="rollout", remaining_s=210.0 - 74 - seconds),
    }


def _pair(*more: Pin) -> Group:
    pins = (
        Pin(job=FAST, rollout=("rollout-1",), train=("train-1",)),
        Pin(job=SLOW, rollout=("rollout-2",), train=("train-1",)),
        *more,
    )
    return Group(name="g1", pins=pins, rollout_nodes=("rollout-1", "rollout-2"), train_nodes=("train-1",))


def test_jobs_of_almost_equal_pace_meet_late_and_then_at_every_iteration(monkeypatch):
    assert late_job(_pair(), _meeting_in(116.0), {}) == "fast"
    monkeypatch.setattr(forecast, "FAR_AHEAD", forecast.ITERATIONS_AHEAD)
    assert late_job(_pair(), _meeting_in(116.0), {}) is None


def test_a_departure_moves_out_who_would_be_late_beside_those_who_stay():
    """Settled periods from a common start allow the pair; as the two stand when a third leaves, one of them would be late."""
    placer = Planner.of_one(make_cluster(4, 4))
    third = Pin(job=make_job("third", 50, 5), rollout=("rollout-2",), train=("train-1",))
    placer.groups.adopt([_pair(third)])
    placer.books.named = 1
    moves = placer.depart("third", _meeting_in(0.0))
    assert [move.kind for move in moves] == ["move"]
    assert not set(placer.groups.pin_of("fast").train) & set(placer.groups.pin_of("slow").train)
    assert_invariants(placer)
