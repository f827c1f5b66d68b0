"""Silence beyond the lease, phases that hang, and what takes their nodes away."""

import pytest

from tests.coordinator.driver import Driver, config
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core.inputs_and_instructions import (
    JobEvicted,
    JobRevoked,
    JobSilent,
    NodeReleased,
    PhaseOverdue,
    ProcessesGone,
)
from verl_mux.coordinator.core.records import JobState
from verl_mux.coordinator.core.state import IllegalMove, Machine


class Jobs(Driver):
    """Who of them is heard, is said."""

    def __init__(self, *jobs, **keys):
        super().__init__(Machine(config(**keys)))
        for job in jobs:
            self.register(job)

    def beat(self, *jobs):
        for job in jobs:
            tokens = [lease.token for lease in self.machine.state.leases_of(job)]
            self.do(m.Heartbeat(**self.who(job), beat=1, tokens=tokens), after=0.0)

    def live(self, seconds, *jobs):
        """Time in which only these jobs beat."""
        seen = []
        for _ in range(round(seconds * 2)):
            self.beat(*(job for job in jobs if self.state(job) is not JobState.DYING))
            seen += self.wait(0.5)
        return seen

    def state(self, job):
        return self.machine.state.jobs[job].state


@pytest.fixture
def two():
    jobs = Jobs("a", "b")
    jobs.ask("a", "rollout", 1, ["r0"])
    return jobs


def test_from_when_a_job_fences_itself_until_its_lease_ends_its_end_is_near(two):
    two.live(1, "a", "b")
    heard, near = two.now - 0.5, []
    for _ in range(60):
        two.live(0.5, "b")
        near += [two.now - heard] * two.machine.is_pressing(two.now)
    timeout = two.machine.config.lease_timeout
    assert near == [at * 0.5 for at in range(1, 61) if 0.7 * timeout < at * 0.5 <= timeout]


def test_a_silent_job_that_nobody_waits_for_keeps_what_it_holds(two):
    assert two.live(60, "b") == [JobSilent(job="a", uid="a:1")]
    assert two.holders("r0") == ["a"]


def test_a_silent_job_whose_node_another_waits_for_is_over_at_the_end_of_its_lease(two):
    two.ask("b", "rollout", 1, ["r0"])
    two.live(1, "a", "b")
    heard = two.now
    seen = two.live(6, "b")
    assert [type(what) for what in seen] == [JobSilent, JobRevoked]
    assert two.state("a") is JobState.DYING
    assert two.machine.state.jobs["a"].died_at - heard == pytest.approx(5 - 1.5, abs=0.5)
    assert two.holders("r0") == ["a"], "its processes may still be there"
    with pytest.raises(IllegalMove):
        two.beat("a")
    two.do(ProcessesGone(job="a", uid="a:1"))
    assert two.holders("r0") == ["b"]


def test_it_is_over_at_once_when_somebody_begins_to_wait_later(two):
    two.live(60, "b")
    two.ask("b", "rollout", 1, ["r0"])
    assert [type(what) for what in two.live(0.5, "b")] == [JobRevoked]


def test_a_waiting_job_that_is_silent_too_takes_nothing_from_anybody(two):
    two.ask("b", "rollout", 1, ["r0"])
    assert {type(what) for what in two.live(60)} == {JobSilent}
    assert two.holders("r0") == ["a"]


def test_a_pause_of_the_coordinator_makes_nobody_late(two):
    two.ask("b", "rollout", 1, ["r0"])
    two.live(2, "a", "b")
    two.now += 3600
    assert two.wait(3) == []
    assert two.live(60, "a", "b") == []


def test_a_clock_that_is_set_back_makes_nobody_late_and_hides_nobody(two):
    two.ask("b", "rollout", 1, ["r0"])
    two.live(2, "a", "b")
    two.now -= 3600
    assert [type(what) for what in two.live(8, "b")] == [JobSilent, JobRevoked]


@pytest.mark.parametrize("mode", ["sequential", "barrier"])
def test_a_silent_job_does_not_hold_the_schedule_up_for_ever(mode):
    two_segments = [{"mode": "interleaved", "steps": 1}, {"mode": "interleaved"}]
    schedule = [{"mode": "sequential"}] if mode == "sequential" else two_segments
    jobs = Jobs("a", "b", schedule=schedule)
    jobs.ask("b", "rollout", 1 if mode == "sequential" else 2, ["r1"])
    assert jobs.holders("r1") == []
    assert [type(what) for what in jobs.live(7, "b")] == [JobSilent, JobRevoked]
    assert jobs.holders("r1") == ["b"]


@pytest.fixture
def hung():
    """A job whose rollouts took 100 s holds the second for 1,000 s; another waits."""

    def start(**keys):
        jobs = Jobs("a", "b", **keys)
        jobs.ask("a", "rollout", 1, ["r0"])
        jobs.live(100, "a", "b")
        jobs.release("a")
        jobs.ask("a", "rollout", 2, ["r0"])
        jobs.ask("b", "rollout", 1, ["r0"])
        assert jobs.live(1000, "a", "b") == []
        return jobs

    return start


def test_a_phase_that_takes_far_longer_than_those_before_is_told_once(hung):
    jobs = hung()
    assert jobs.live(60, "a", "b") == [PhaseOverdue(job="a", uid="a:1", token=2)]
    assert jobs.events_logged().count("phase_overdue") == 1
    assert jobs.holders("r0") == ["a"]
    jobs.release("a", 2)
    assert jobs.machine.state.jobs["a"].overdue == []


def test_the_first_phase_of_a_kind_and_short_ones_are_never_overdue():
    jobs = Jobs("a")
    jobs.ask("a", "rollout", 1, ["r0"])
    assert jobs.live(2000, "a") == []
    jobs = Jobs("a")
    jobs.ask("a", "rollout", 1, ["r0"])
    jobs.release("a")
    jobs.ask("a", "rollout", 2, ["r0"])
    assert jobs.live(590, "a") == []


def test_an_evicted_job_ends_as_if_it_had_failed(two):
    assert two.do(JobEvicted(job="a", uid="a:1", reason="evicted")) == [m.JobEnded(reason="evicted")]
    assert two.machine.state.jobs["a"].condemned == "evicted"
    with pytest.raises(IllegalMove):
        two.beat("a")


def test_a_node_that_is_released_by_hand_is_taken_from_the_dying_alone():
    jobs = Jobs("a", "b", "c")
    jobs.ask("a", "rollout", 1, ["r0", "r1"])
    jobs.ask("b", "rollout", 1, ["r0"])
    jobs.do(NodeReleased(node="r0"))
    assert jobs.holders("r0") == ["a"]
    jobs.do(JobEvicted(job="a", uid="a:1", reason="evicted"))
    jobs.do(NodeReleased(node="r0"))
    assert (jobs.holders("r0"), jobs.holders("r1")) == (["b"], ["a"])
    jobs.do(NodeReleased(node="r1"))
    assert jobs.holders("r1") == []
