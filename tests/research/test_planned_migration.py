"""Tails as a decision of placement: what a rollout of expected lengths would do, and which jobs of a group do it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from research.paper.tails import THRESHOLDS, Engines, Tail, choose_tails, plan_tails, with_tail
from verl_mux.placement.group_run import group_periods
from verl_mux.placement.model import Estimate, Group, JobSpec, Pin
from verl_mux.rollout.control.replica_plan import EngineSpeed, MigrationPolicy

# A token of every request takes a hundredth of a second, however many run; a prefill is nearly free.
SPEED = EngineSpeed(prefill=1e6, step_s=0.01, step_per_request_s=0.0)
ENGINES = Engines(replicas=4, speed=SPEED)
LONG_TAIL = [100] * 36 + [1000] * 4


def job(name="a", rollout=100.0, train=40.0, slo=2.0, **keys):
    return JobSpec(name=name, rollout=Estimate(seconds=rollout), train=Estimate(seconds=train), slo=slo, **keys)


def group(*jobs):
    pins = tuple(Pin(job=each, rollout=("r0",), train=("t0",)) for each in jobs)
    return Group(name="g", pins=pins, rollout_nodes=("r0",), train_nodes=("t0",))


def tail(**changes):
    given = {"threshold": 0.8, "kept": 1, "nodes": 4, "rollout_s": 100.0, "before_s": 100.0, "tail_s": 60.0}
    return Tail(**{**given, "reprefill_tokens": 100, "gain_node_s": 10.0, **changes})


def test_a_long_tail_is_gathered_and_most_nodes_are_freed():
    (found,) = plan_tails(LONG_TAIL, 10, ENGINES, thresholds=(0.8,))
    assert (found.threshold, found.nodes, found.kept) == (0.8, 4, 1)
    # The short ones end at 1 s; the long ones, one a replica, go on to 10 s, then on one replica as fast as on four.
    assert found.before_s == pytest.approx(10.0) and found.rollout_s == pytest.approx(10.0, abs=0.01)
    assert found.tail_s == pytest.approx(9.0, abs=0.01) and found.freed_s == pytest.approx(9.0 * 3 / 4, abs=0.01)
    assert found.reprefill_tokens == 3 * (10 + 100)


def test_prefilling_again_is_paid_for():
    patient = MigrationPolicy(max_slowdown=9)
    cheap, dear = (
        plan_tails(LONG_TAIL, 10, Engines(replicas=4, speed=EngineSpeed(speed, 0.01, 0.0)), (0.8,), patient)[0]
        for speed in (1e6, 300.0)
    )
    assert dear.rollout_s > cheap.rollout_s and dear.gain_node_s < cheap.gain_node_s


def test_where_moving_costs_more_than_it_frees_nothing_is_planned():
    slow = Engines(replicas=4, speed=EngineSpeed(prefill=10.0, step_s=0.01, step_per_request_s=0.0))
    assert plan_tails(LONG_TAIL, 10_000, slow) == []


def test_what_the_kept_replicas_cannot_hold_stays_where_it_is():
    assert plan_tails(LONG_TAIL, 10, Engines(replicas=4, max_requests=1, speed=SPEED)) == []


def test_one_replica_has_nowhere_to_gather():
    assert plan_tails(LONG_TAIL, 10, Engines(replicas=1, speed=SPEED)) == []


@given(st.lists(st.integers(1, 2000), min_size=8, max_size=60), st.integers(2, 6), st.floats(0.0, 0.001))
def test_a_plan_is_sound_for_any_lengths(lengths, replicas, per_request):
    engines = Engines(replicas=replicas, speed=EngineSpeed(5e3, 0.01, per_request))
    for found in plan_tails(lengths, 50, engines):
        assert found.threshold in THRESHOLDS and 1 <= found.kept < found.nodes == replicas
        assert 0 < found.tail_s <= found.rollout_s + 1e-6 and found.freed_s < found.tail_s
        assert found.before_s >= max(lengths) * 0.01 - 1e-6


def test_a_job_with_a_tail_gives_its_nodes_away_for_the_freed_share():
    migrated = with_tail(job(), tail(rollout_s=110.0))
    assert migrated.rollout.seconds == pytest.approx(110.0)
    assert migrated.tail_s == pytest.approx(60.0 * 3 / 4)
    assert migrated.limit_s == job().limit_s  # what the SLO counts is the job as it was


def test_tails_speed_up_jobs_that_wait_for_one_anothers_rollouts():
    both = group(job("a"), job("b"))
    chosen_group, chosen = choose_tails(both, {name: [tail()] for name in ("a", "b")})
    assert set(chosen) == {"a", "b"}
    before, after = (group_periods(each)[0].mean_s for each in (both, chosen_group))
    assert (before, after) == (200.0, pytest.approx(140.0))


def test_no_job_migrates_where_that_gains_nothing():
    alone = group(job("a"))
    assert choose_tails(alone, {"a": [tail(rollout_s=101.0)]})[1] == {}
    balanced = group(job("a", 50.0, 100.0), job("b", 50.0, 100.0))  # training is what they wait for
    assert choose_tails(balanced, {"a": [tail(rollout_s=101.0)], "b": []})[1] == {}


def test_the_threshold_is_chosen_that_serves_the_group():
    dear, good = tail(threshold=0.5, rollout_s=150.0, tail_s=80.0), tail(threshold=0.9)
    _, chosen = choose_tails(group(job("a"), job("b")), {"a": [dear, good], "b": [dear, good]})
    assert {found.threshold for found in chosen.values()} == {0.9}


def test_nobody_is_brought_beyond_the_slo():
    tight = group(job("a", slo=1.45, rollout=60.0, train=60.0), job("b", rollout=100.0, train=20.0))
    limits = {each.name: each.limit_s for each in tight.jobs}
    migrated, _ = choose_tails(tight, {"b": [tail()], "a": [tail(rollout_s=170.0)]})
    before = dict(zip(limits, group_periods(tight), strict=True))
    for each, period in zip(migrated.jobs, group_periods(migrated), strict=True):
        assert period.mean_s <= limits[each.name] + 1e-6 or before[each.name].mean_s > limits[each.name]
