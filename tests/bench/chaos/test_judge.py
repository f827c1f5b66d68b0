"""Schedules written by hand; every kind of violation, and what is none."""

import pytest

from bench.chaos.faults import LEASE_S
from bench.chaos.judge import judge
from bench.chaos.ledger import Ledger, Line, read

LONG, SHORT = 0.9 * LEASE_S, 0.3 * LEASE_S


def line(at, what, who="a", **about):
    return Line(at=at, what=what, who=who, **about)


def runner(at, what, text="", **about):
    return line(at, what, "runner", text=text, **about)


def violations(*lines):
    return judge(sorted(lines, key=lambda one: one.at)).violations


@pytest.mark.parametrize("what", ["double use", "old token", "late use", "waits for ever"])
def test_what_a_process_saw_go_wrong_counts_after_the_fault_before_it(what):
    assert violations(line(1, what), runner(2, "job killed", "b"), line(3, what)) == [(what, "nothing"), (what, "job killed")]


def test_a_token_is_given_once():
    grants = [line(at, "granted", token=token, nodes=["r0"]) for at, token in ((1, 1), (2, 2), (3, 2))]
    assert violations(*grants) == [("token granted twice", "nothing")]


@pytest.mark.parametrize(("seconds", "excused"), [(LONG, True), (SHORT, False)])
@pytest.mark.parametrize("kind", ["job stopped", "job cut off", "coordinator stopped"])
def test_a_lease_may_be_lost_only_by_who_was_out_of_touch_for_about_as_long(kind, seconds, excused):
    who = "a" if kind.startswith("job") else ""
    away = [runner(10, kind, who), runner(10 + seconds, f"{kind} no more", who)]
    found = violations(line(9, "granted", token=1), *away, line(20, "lease lost"))
    assert found == ([] if excused else [("lease lost", kind)])


def test_being_out_of_touch_before_the_lease_was_granted_excuses_nothing():
    away = [runner(1, "job stopped", "a"), runner(1 + LONG, "job stopped no more", "a")]
    assert violations(*away, line(9, "granted", token=1), line(10, "lease lost")) == [("lease lost", "job stopped")]


def test_two_short_outages_one_after_the_other_are_a_long_one():
    away = [runner(10, "coordinator down"), runner(10 + SHORT, "coordinator up")]
    more = [runner(10.5 + SHORT, "job cut off", "a"), runner(10.5 + 3 * SHORT, "job cut off no more", "a")]
    assert violations(line(9, "granted", token=1), *away, *more, line(20, "lease lost")) == []


def test_a_job_that_dies_by_itself_is_a_violation_and_one_that_was_killed_is_none():
    killed = [runner(10, "job killed", "a"), runner(10.1, "ended", "a", step=-9, pid=1)]
    assert violations(*killed) == []
    assert violations(runner(10, "ended", "a", step=-9, pid=1)) == [("job died", "nothing")]
    assert violations(line(9, "lease lost", pid=1), runner(10, "ended", "a", step=3, pid=1)) == [("lease lost", "nothing")]


def test_a_survivor_does_every_step_once():
    def steps(who, *done):
        return [line(at, "step", who, step=step) for at, step in enumerate(done)]

    assert judge(steps("a", 1, 2, 3)).lost_steps == 0
    assert judge(steps("a", 1, 3)).lost_steps == judge(steps("a", 1, 2, 2)).lost_steps == 1
    assert judge([*steps("a", 1, 3), runner(9, "ended", "a", step=-9)]).lost_steps == 0


def test_a_grant_is_timed_from_the_nodes_return_or_from_asking_whichever_was_later_and_in_quiet_times_only():
    lines = [
        line(1.0, "released", token=1, nodes=["r0"]),
        line(1.5, "granted", "b", token=2, nodes=["r0"], step=1, asked_at=0.5),
        line(2.0, "released", "b", token=2, nodes=["r0"]),
        line(4.0, "granted", token=3, nodes=["r0"], step=1, asked_at=3.75),
        line(9.0, "released", token=3, nodes=["r0"]),
        runner(9.1, "coordinator down"),
        runner(9.9, "coordinator up"),
        line(10.0, "granted", "b", token=4, nodes=["r0"], step=1, asked_at=8.0),
    ]
    assert judge(lines).grants_s == [0.5, 0.25]


def test_the_first_start_is_no_return():
    times = [(0, "started"), (5, "up"), (6, "down"), (7, "started"), (8, "up")]
    assert judge([runner(at, f"coordinator {what}") for at, what in times]).back_s == [1]


def test_a_ledger_is_read_back_in_order_of_time(tmp_path):
    a, b = Ledger(tmp_path / "a.jsonl", "a"), Ledger(tmp_path / "b.jsonl", "b")
    for ledger, token in ((a, 1), (b, 2), (a, 3)):
        ledger.write("granted", token=token)
    assert [(one.who, one.token) for one in read(tmp_path)] == [("a", 1), ("b", 2), ("a", 3)]
