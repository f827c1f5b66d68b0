"""With what probability a group keeps its SLOs while all phases vary."""

import msgspec

from tests.placement.made_jobs import make_job
from verl_mux.placement.feasibility import Feasibility, likely
from verl_mux.placement.model import Estimate


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
    assert plain.order(pair(1.0), 1, 1) == "fifo" and sure.order(pair(1.0), 1, 1) is None
    steady = [make_job(name, 100, 100, slo=1.0) for name in ("c", "d")]
    assert sure.order(steady, 1, 1) == "fifo" and Estimate(seconds=1.0).cv == 0.0
