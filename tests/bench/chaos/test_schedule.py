"""Schedules of a few seconds with real processes."""

from contextlib import closing

from bench.chaos import ledger
from bench.chaos.faults import Fault
from bench.chaos.judge import judge
from bench.chaos.schedule import Schedule

JOBS = ["a", "b"]


def carried_out(folder, faults, planted=""):
    with closing(Schedule(folder, seed=1, planted=planted)) as schedule:
        schedule.run(JOBS, faults, 2.5)
    return judge(ledger.read(folder / "ledger"))


def test_a_kill_between_journal_and_answer_costs_nobody_anything(tmp_path):
    found = carried_out(tmp_path / "run", [Fault(0.5, "coordinator killed at a message", die_at="LEASE_RELEASE:written:2")])
    assert (found.violations, found.lost_steps) == ([], 0)
    assert len(found.back_s) == 2  # once after the kill that armed it, once after it died at the message


def test_a_coordinator_that_grants_too_early_is_noticed(tmp_path):
    found = carried_out(tmp_path / "run", [], planted="early grant")
    assert ("double use", "nothing") in found.violations
