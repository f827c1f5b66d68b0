"""Which processes a dead job's nodes wait for, and which are killed."""

from verl_mux.coordinator.bus.messages import Member
from verl_mux.coordinator.core.reaping import judge
from verl_mux.coordinator.core.records import Job, JobState

DRIVER, WORKER, AWAY = Member("here", 1, 1, "b"), Member("here", 2, 1, "b"), Member("there", 3, 1, "c")


def dying(*members, state=JobState.DYING, host="here", told=False):
    job = Job(name="a", uid="a:1", order=1, since=10.0, state=state, host=host, pid=1, started=1, boot="b", told=told)
    job.members, job.died_at = list(members), 10.0
    return job


def test_a_job_with_nothing_left_is_gone(make):
    assert judge(dying(WORKER), [], "here", make(), 10.0) == (True, [], [])


def test_members_are_waited_for_and_killed_only_after_the_grace(make):
    assert judge(dying(WORKER), [WORKER], "here", make(), 11.9) == (False, ["pid 2"], [])
    assert judge(dying(WORKER), [WORKER], "here", make(), 12.1) == (False, ["pid 2"], [WORKER])


def test_killing_can_be_switched_off(make):
    assert judge(dying(WORKER), [WORKER], "here", make(kill=False), 99.0).kill == []


def test_nothing_is_killed_while_the_driver_lives_unless_its_starter_says_that_it_is_over(make):
    alive = [DRIVER, WORKER]
    assert judge(dying(WORKER), alive, "here", make(), 99.0) == (False, ["pid 1", "pid 2"], [])
    assert judge(dying(WORKER, told=True), alive, "here", make(), 99.0).kill == alive
    assert judge(dying(WORKER, told=True), alive, "here", make(), 11.0).kill == []


def test_a_silent_job_is_described_but_neither_gone_nor_killed(make):
    verdict = judge(dying(WORKER, state=JobState.SILENT), [DRIVER, WORKER], "here", make(), 99.0)
    assert verdict == (False, ["pid 1", "pid 2"], [])


def test_members_on_other_hosts_are_waited_for_until_the_remote_grace(make):
    assert judge(dying(AWAY), [], "here", make(), 1e6) == (False, ["pid 3 on there (not visible from here)"], [])
    assert judge(dying(AWAY), [], "here", make(remote_grace=30), 39.0).gone is False
    assert judge(dying(AWAY), [], "here", make(remote_grace=30), 41.0).gone is True


def test_a_driver_elsewhere_is_believed_gone_when_its_starter_says_so(make):
    assert judge(dying(host="there"), [], "here", make(), 11.0).gone is False
    assert judge(dying(host="there", told=True), [], "here", make(), 11.0).gone is True
