"""Whether a group keeps its SLOs while phases vary, and as it stands now."""

import msgspec

from tests.placement.made_jobs import Planner, assert_invariants, make_cluster, make_job
from verl_mux.placement import feasibility as forecast
from verl_mux.placement.feasibility import Feasibility, Progress, late_job, likely
from verl_mux.placement.model import Estimate, Group, Pin


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
