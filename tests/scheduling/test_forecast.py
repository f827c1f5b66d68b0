"""A group run forward from where it stands."""

from tests.scheduling.made_jobs import make_job
from verl_mux.scheduling.forecast import Progress, late_job
from verl_mux.scheduling.model import Group, Pin

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
