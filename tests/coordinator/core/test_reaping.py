"""Which processes a dead job's nodes wait for, which nodes come free by themselves, and what is ended."""

import pytest

from verl_mux.coordinator.bus.messages import Member
from verl_mux.coordinator.config import make_config
from verl_mux.coordinator.core.reaping import Sight
from verl_mux.coordinator.core.reaping import judge as judge_all
from verl_mux.coordinator.core.records import Host, Job, JobState, Lease, Owed, State

DRIVER, WORKER, AWAY = Member("here", 1, 1, "b"), Member("here", 2, 1, "b"), Member("there", 3, 1, "c")
UID = "a:1"


def judge(job, alive, host, config, now, *others, state=None):
    """As the coordinator on `host` judges, which sees `alive` there; `others`: what agents see."""
    return judge_all(job, [Sight("", [host], "", {UID: alive}), *others], state or State(), config, now)


def dying(*members, state=JobState.DYING, host="here", exited=False):
    job = Job(name="a", uid=UID, order=1, since=10.0, state=state, host=host, pid=1, started=1, boot="b", has_exited=exited)
    job.members, job.died_at = list(members), 10.0
    return job


def test_a_job_with_nothing_left_is_gone(make):
    verdict = judge(dying(WORKER), [], "here", make(), 10.0)
    assert verdict.gone and verdict.waits_for == []


def test_members_are_waited_for_and_ended_only_after_the_grace(make):
    early, late = (judge(dying(WORKER), [WORKER], "here", make(), at) for at in (11.9, 12.1))
    assert (early.gone, early.waits_for, early.end) == (False, ["pid 2"], False)
    assert (late.gone, late.waits_for, late.end) == (False, ["pid 2"], True)


def test_killing_can_be_switched_off(make):
    assert not judge(dying(WORKER), [WORKER], "here", make(kill=False), 99.0).end


def test_nothing_is_ended_while_the_driver_lives_unless_its_starter_says_that_it_is_over(make):
    alive = [DRIVER, WORKER]
    verdict = judge(dying(WORKER), alive, "here", make(), 99.0)
    assert (verdict.gone, verdict.waits_for, verdict.end) == (False, ["pid 1", "pid 2"], False)
    assert judge(dying(WORKER, exited=True), alive, "here", make(), 99.0).end
    assert not judge(dying(WORKER, exited=True), alive, "here", make(), 11.0).end


def test_a_silent_job_is_described_but_neither_gone_nor_ended(make):
    verdict = judge(dying(WORKER, state=JobState.SILENT), [DRIVER, WORKER], "here", make(), 99.0)
    assert (verdict.gone, verdict.waits_for, verdict.end) == (False, ["pid 1", "pid 2"], False)


def test_members_on_other_hosts_are_waited_for_until_the_remote_grace(make):
    state = holding("r0")
    verdict = judge(dying(AWAY), [], "here", make(), 1e6, state=state)
    assert (verdict.gone, verdict.waits_for) == (False, ["pid 3 on there (not visible from here)"])
    assert judge(dying(AWAY), [], "here", make(remote_grace=30), 39.0, state=state).gone is False
    assert judge(dying(AWAY), [], "here", make(remote_grace=30), 41.0, state=state).gone is True


def test_a_job_that_holds_nothing_is_not_on_record_for_ever_because_nothing_can_see_its_processes(make):
    assert judge(dying(AWAY, host="there"), [], "here", make(), 69.0).gone is False
    assert judge(dying(AWAY, host="there"), [], "here", make(), 71.0).gone is True
    assert judge(dying(AWAY, host="there"), [WORKER], "here", make(), 71.0).gone is False


def test_a_driver_elsewhere_is_believed_gone_when_its_starter_says_so(make):
    assert judge(dying(host="there"), [], "here", make(), 11.0).gone is False
    assert judge(dying(host="there", exited=True), [], "here", make(), 11.0).gone is True


# --- nodes that are places ---


@pytest.fixture
def places():
    """r0 is on the coordinator's host, r1 on another, t0 on a third; n0 names none."""
    nodes = {"r0": "here", "r1": "there", "t0": "far", "n0": None}
    pools = {"all": {"nodes": [{"name": name, "host": host} for name, host in nodes.items()]}}
    return make_config({"pools": pools, "lease_timeout": 5})


def holding(*nodes):
    return State(leases={1: Lease(token=1, key="k", job="a", client="c", phase="train", step=1, nodes=[*nodes], granted_at=1.0)})


def seen(name, *alive, space="1", gone=False):
    return Sight(f"{name}/{space}", [name], space, {UID: [*alive]}, gone)


def not_looked(name):
    return Sight(f"{name}/1", [name], "1", {})


def verdict(config, *sights, job=None, alive=(), now=11.0, nodes=("r0", "r1", "t0"), state=None):
    return judge(job or dying(), list(alive), "here", config, now, *sights, state=state or holding(*nodes))


def test_a_node_comes_free_when_its_host_was_found_empty_though_another_was_not(places):
    found = verdict(places, seen("there", AWAY), seen("far"))
    assert found.free == ["r0", "t0"] and not found.gone
    assert found.waits_for == ["pid 3 on there"]


def test_a_node_of_a_host_that_was_not_looked_at_since_the_death_does_not_come_free(places):
    found = verdict(places, not_looked("there"), seen("far"))
    assert found.free == ["r0", "t0"] and not found.gone
    assert found.waits_for == ["host there (not looked at yet)"]


def test_a_node_without_a_host_comes_free_only_when_nothing_is_left_anywhere(places):
    found = verdict(places, seen("there", AWAY), seen("far"), nodes=["n0", "r0"])
    assert found.free == ["r0"] and not found.gone
    found = verdict(places, seen("there"), seen("far"), nodes=["n0"])
    assert found.free == [] and found.gone


def test_a_node_where_the_agent_is_gone_is_owed_and_the_job_does_not_wait_for_it(places):
    found = verdict(places, seen("there", gone=True), seen("far"), job=dying(AWAY))
    assert found.free == ["r0", "t0"] and found.owed == {"there/1": ["r1"]}
    assert found.gone


def test_a_node_where_no_agent_ever_spoke_is_owed_until_the_remote_grace(places):
    found = verdict(places, seen("far"))
    assert found.free == ["r0", "t0"] and found.owed == {"there/": ["r1"]}
    forgiving = make_config({"pools": {"all": {"nodes": [{"name": "r1", "host": "there"}]}}, "remote_grace": 30})
    assert verdict(forgiving, nodes=["r1"], now=99.0).free == ["r1"]


def test_nothing_comes_free_while_the_driver_lives_or_was_not_looked_for(places):
    far = dying(host="far")
    driver = far.driver
    assert verdict(places, seen("there"), seen("far", driver), job=far).free == []
    assert verdict(places, seen("there"), not_looked("far"), job=far).free == []
    assert verdict(places, seen("there"), seen("far"), job=far).free == ["r0", "r1", "t0"]


def test_a_driver_that_cannot_be_seen_is_in_the_way_until_its_lease_is_over(places):
    far = dying(host="far")
    assert verdict(places, seen("there"), seen("far", gone=True), job=far, now=14.0).free == []
    found = verdict(places, seen("there"), seen("far", gone=True), job=far, now=16.0)
    assert found.free == ["r0", "r1"] and found.owed == {"far/1": ["t0"]} and found.gone


def test_a_process_in_a_container_is_not_seen_by_the_agent_around_it(places):
    inside = Member("there", 3, 1, "c", "2")
    found = verdict(places, seen("there"), seen("far"), job=dying(inside))
    assert found.free == ["r0", "t0"] and not found.gone
    assert found.waits_for == ["pid 3 on there (not visible from here)"]
    found = verdict(places, seen("there"), seen("there", space="2"), seen("far"), job=dying(inside))
    assert found.free == ["r0", "r1", "t0"] and found.gone


def test_all_who_look_at_a_host_must_have_found_it_empty(places):
    inside = Member("there", 3, 1, "c", "2")
    found = verdict(places, seen("there"), seen("there", inside, space="2"), seen("far"))
    assert found.free == ["r0", "t0"] and not found.gone


def test_what_is_owed_already_is_not_owed_again(places):
    state = holding("r0")
    state.hosts["there/1"] = Host(names=["there"], since=1.0, agent=True, gone=True, owed=[Owed(job="a", uid=UID, since=1.0)])
    found = verdict(places, seen("there", gone=True), seen("far"), job=dying(AWAY), state=state)
    assert found.owed == {} and found.gone
