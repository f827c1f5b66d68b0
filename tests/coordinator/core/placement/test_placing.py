"""Jobs that leave their nodes to the coordinator, on the state machine driven by hand and on real sockets."""

import concurrent.futures

import pytest

from tests.coordinator.core.placement.placed_jobs import (
    AUTO,
    arrive,
    lines,
    needs,
    placing_config,
    pools,
    register,
    shown,
    step,
    where_told,
)
from tests.coordinator.driver import Driver
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.config import make_config
from verl_mux.coordinator.core.placing import Answerer, Asked
from verl_mux.coordinator.core.records import Input, Send
from verl_mux.coordinator.core.snapshot import describe
from verl_mux.coordinator.core.state import Machine
from verl_mux.errors import UserError
from verl_mux.placement.estimator import Observed
from verl_mux.placement.planner import Arrive, Record


def test_a_job_that_comes_alone_gets_nodes_of_its_own(driver):
    (answer,) = arrive(driver, "a")
    assert isinstance(answer, m.Registered)
    assert answer.nodes == {"rollout": ["r0"], "train": ["t0"]}
    (placed,) = lines(driver, "placed")
    assert placed["outcome"] == "placed" and placed["strategy"] == "isolated" and placed["estimated"]["source"] == "bound"
    (predicted,) = lines(driver, "group_predicted")
    assert predicted["source"] == "estimated" and predicted["usd_per_hour"] == 2.0


EVEN = Observed(rollout=(3.0, 3.0, 3.0), train=(3.0, 3.0, 3.0))


def test_the_second_job_shares_nodes_because_that_costs_nothing_more():
    driver = Driver(Machine(placing_config(count=2)))
    arrive(driver, "a", profiled=EVEN)
    (answer,) = arrive(driver, "b", profiled=EVEN)
    assert answer.nodes == {"rollout": ["r0"], "train": ["t0"]}
    assert lines(driver, "placed")[-1]["strategy"] == "direct packing"
    placed = lines(driver, "placed")[-1]
    assert placed["usd_per_hour"] == 0.0
    (lost,) = placed["alternatives"]
    assert lost["strategy"] == "isolated" and lost["why"] == "costs 2.00 USD/h more"


def test_a_job_without_room_waits_and_gets_the_nodes_of_the_one_that_leaves(driver):
    arrive(driver, "a", slo=1.0)
    (answer,) = arrive(driver, "b", slo=1.0)
    assert isinstance(answer, m.Queued) and "waits for nodes" in answer.reason
    (again,) = arrive(driver, "b", slo=1.0)
    assert isinstance(again, m.Queued)
    refused = driver.ask("b", "rollout", 1, ["r0"])
    assert isinstance(refused[0], m.Refused)
    driver.ask("a", "rollout", 1, ["r0"])
    driver.release("a")
    sent = driver.do(m.Deregister(**driver.who("a")))
    assert [message.nodes for message in sent if isinstance(message, m.Registered)] == [{"rollout": ["r0"], "train": ["t0"]}]
    assert isinstance(driver.ask("b", "rollout", 1, ["r0"])[0], m.LeaseGrant)


def test_a_waiting_job_that_goes_leaves_the_queue(driver):
    arrive(driver, "a", slo=1.0)
    arrive(driver, "b", slo=1.0)
    driver.do(m.Detach(**driver.who("b")))
    assert driver.machine.state.placed.waiting == ()


def test_a_job_that_brings_a_profile_is_placed_by_it():
    driver = Driver(Machine(placing_config(count=2)))
    arrive(driver, "a", profiled=Observed(rollout=(3.0, 3.2, 2.8), train=(2.0, 2.0, 2.0)))
    spec = driver.machine.state.placed.job("a")
    assert (spec.rollout.source, spec.iteration_s) == ("profile", pytest.approx(5.0))
    assert not spec.movable and lines(driver, "placed")[0]["estimated"]["source"] == "profile"


HERE = {"rollout": ["t0"], "train": ["t0"]}


def test_a_colocated_job_gets_training_nodes_for_both_phases(driver):
    (answer,) = arrive(driver, "a", colocated=True)
    assert answer.nodes == HERE
    (placed,) = lines(driver, "placed")
    assert (placed["strategy"], placed["usd_per_hour"], placed["nodes"]) == ("colocated", 1.0, HERE)
    (granted,) = driver.ask("a", "rollout", 1, ["t0"])
    assert isinstance(granted, m.LeaseGrant)


def test_what_a_colocated_job_is_seen_to_hold_counts_once(driver):
    arrive(driver, "a", colocated=True)
    driver.do(m.HostReport(**driver.who("a"), node="t0", bytes={"weights": 5 * 10**9}))
    for number in (1, 2, 3):
        for phase in ("rollout", "train"):
            driver.ask("a", phase, number, ["t0"])
            driver.now += 2
            driver.release("a")
        driver.do(m.HostReport(**driver.who("a"), node="t0", bytes={"weights": 6 * 10**9}))
    job = driver.machine.state.placed.job("a")
    assert job.colocated and sum(job.memory_gb) == pytest.approx(6.0)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"needs": needs(rollout_nodes=2)}, "runs both phases on the same nodes, but asks for 2 for rollout and 1 for train"),
        ({"needs": needs(rollout_gpus=2)}, "2 GPUs on each rollout node; those of pool 'train' have 1"),
        ({"placed": {"rollout": ["r0"], "train": ["t0"]}}, "says it was placed on ['r0'] for rollout; allowed: 1 of t0"),
    ],
)
def test_what_no_colocated_place_can_be_is_refused(driver, keys, words):
    (refused,) = arrive(driver, "a", colocated=True, **keys)
    assert isinstance(refused, m.Refused) and words in refused.reason


def test_after_a_loss_of_memory_a_colocated_job_is_where_it_says():
    driver = Driver(Machine(placing_config(count=2)))
    there = {"rollout": ["t1"], "train": ["t1"]}
    assert arrive(driver, "a", again=True, placed=there, colocated=True)[0].nodes == there
    (group,) = driver.machine.state.placed.groups
    assert (group.rollout_nodes, group.train_nodes) == ((), ("t1",)) and group.jobs[0].colocated
    assert arrive(driver, "b", colocated=True)[0].nodes == HERE


def test_an_answer_about_other_records_is_void_and_the_question_stays(driver):
    arrive(driver, "a")
    asked = Asked(Arrive(driver.machine.state.placed.job("a")), Record(), driver.machine.config, frozenset(), 0.0)
    stale = Answerer().answer(asked, {})
    before = driver.machine.state.placed
    driver.machine.state.questions.append(asked.question)
    driver.machine.handle(Input(driver.now, stale))
    assert driver.machine.state.placed is before and driver.machine.state.questions == [asked.question]


def test_leases_are_granted_while_the_placer_thinks():
    """A job registers, and has no answer yet; the others take their turns."""
    driver = Driver(Machine(placing_config(count=2)))
    arrive(driver, "a")
    machine = driver.machine
    where = {"host": "here", "pid": 7, "started": 1}
    out = machine.handle(Input(9.0, m.Register(**driver.who("b"), nodes=AUTO, needs=needs(), **where)))
    assert not [step for step in out if isinstance(step, Send)] and machine.state.questions
    ask = m.LeaseRequest(**driver.who("a"), key="k", phase="rollout", step=1, nodes=["r0"])
    (granted,) = [step.message for step in machine.handle(Input(9.5, ask)) if isinstance(step, Send)]
    assert isinstance(granted, m.LeaseGrant)
    again = machine.handle(Input(9.6, m.Register(**driver.who("b"), nodes=AUTO, needs=needs(), **where)))
    assert [step.message.reason for step in again if isinstance(step, Send)] == ["job 'b' waits to be placed"]


def test_a_job_that_only_asked_whether_it_would_be_taken_holds_nobody_up(driver):
    """It is forgotten at once, and still in its group while the placer answers those who asked before it left."""
    arrive(driver, "preflight")
    register(driver, "a")
    sent = driver.do(m.Deregister(**driver.who("preflight")))
    assert where_told(sent) == [{"rollout": ["r0"], "train": ["t0"]}]
    (group,) = driver.machine.state.placed.groups
    assert [job.name for job in group.jobs] == ["a"]


def test_a_job_that_left_and_came_again_is_not_told_the_answer_to_its_first_start(driver):
    register(driver, "a")
    driver.machine.handle(Input(9.1, m.Deregister(**driver.who("a"))))
    register(driver, "a")
    assert where_told(driver.do(m.Heartbeat(**driver.who("a"), beat=1))) == [{"rollout": ["r0"], "train": ["t0"]}]


def test_the_placement_is_replanned_when_a_job_leaves(driver):
    arrive(driver, "a")
    arrive(driver, "b")
    step(driver, "a", 1)
    driver.do(m.Deregister(**driver.who("a")))
    (group,) = driver.machine.state.placed.groups
    assert [job.name for job in group.jobs] == ["b"]
    assert list(lines(driver, "group_predicted")[-1]["periods"]) == ["b"]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"needs": None}, "does not say what it needs"),
        ({"slo": 0.5}, "slo is 0.5"),
        ({"profiled": Observed(rollout=(-1.0,), train=(1.0,))}, "profiled rollout phases [-1.0]"),
        ({"needs": needs(rollout_gpus=2)}, "2 GPUs on each rollout node; those of pool 'rollout' have 1"),
        ({"needs": needs(train_nodes=3)}, "needs 3 train nodes; pool 'train' has 1"),
    ],
)
def test_what_can_never_be_placed_is_refused(driver, keys, words):
    (refused,) = arrive(driver, "a", **keys)
    assert isinstance(refused, m.Refused) and words in refused.reason
    assert driver.machine.state.placed.groups == ()


def test_without_a_scheduler_nodes_must_be_named():
    driver = Driver(Machine(make_config({"pools": {"rollout": {"nodes": [{"name": "r0"}]}}})))
    (refused,) = arrive(driver, "a")
    assert "no `placement: scheduler`" in refused.reason


def test_a_coordinator_that_lost_its_memory_finds_jobs_where_they_say_they_are():
    driver = Driver(Machine(placing_config(count=2)))
    where = {"rollout": ["r1"], "train": ["t1"]}
    for job in ("a", "b"):
        answer = arrive(driver, job, again=True, placed=where)[0]
        assert answer.nodes == where
    (group,) = driver.machine.state.placed.groups
    assert {job.name for job in group.jobs} == {"a", "b"}
    assert arrive(driver, "c", slo=1.0)[0].nodes == {"rollout": ["r0"], "train": ["t0"]}


def test_the_status_shows_groups_periods_and_who_waits(driver):
    arrive(driver, "a", slo=1.0)
    arrive(driver, "b", slo=1.0)
    seen = describe(driver.machine.state, driver.machine.config, driver.now, {})
    assert seen["placement"]["waiting"] == ["b"]
    (group,) = seen["placement"]["groups"].values()
    assert group["nodes"] == {"rollout": ["r0"], "train": ["t0"]} and set(group["periods"]) == {"a"}
    text = shown(driver)
    assert "group g1: r0, t0; a " in text and "waiting for nodes; b" in text


def test_a_client_waits_for_nodes_as_long_as_it_takes(serve, join, eventually):
    coordinator = serve(pools=pools(), placement={})
    first = join(coordinator, "a", AUTO, needs=needs(), slo=1.0)
    assert first.nodes == {"rollout": ["r0"], "train": ["t0"]}
    asked = join(coordinator, "probe", AUTO, needs=needs(), slo=1.0, wait=False)
    assert asked.nodes == {}
    asked.close()
    with concurrent.futures.ThreadPoolExecutor() as executor:
        second = executor.submit(join, coordinator, "b", AUTO, needs=needs(), slo=1.0, timeout=1.0)
        eventually(lambda: coordinator.snapshot()["placement"]["waiting"] == ["b"])
        first.close()
        assert second.result(60).nodes == {"rollout": ["r0"], "train": ["t0"]}
        with second.result().phase("rollout", step=1) as lease:
            assert lease.nodes == ["r0"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"placement": "solver"}, "placement"),
        ({"placement": {"train": "rollout"}}, "name pool 'rollout' twice; two pools are needed, each for one of them"),
        ({"placement": {"rollout": ["rollout", "nowhere"]}}, "placement.rollout is 'nowhere'; it must be a pool: rollout, train"),
        ({"placement": {"rollout": []}}, "placement.rollout names no pool; one of these is needed, or several: rollout, train"),
        ({"placement": {"slo": 0.9}}, ">= 1.0 - at `$.placement.slo`, given: 0.9"),
        ({"placement": {"observe": 0}}, ">= 1 - at `$.placement.observe`, given: 0"),
        ({"pools": {**pools(), "rollout": {"kind": "other", "nodes": [{"name": "r0"}]}}}, "GPU kind 'other' is not known"),
        ({"pools": {"rollout": {"nodes": [{"name": "r0"}]}, "train": {"nodes": [{"name": "t0"}]}}}, "has no kind"),
        (
            {"pools": {**pools(), "rollout": {"kind": "cpu", "nodes": [{"name": "r0"}, {"name": "r1", "gpus": 2}]}}},
            "different gpus (1, 2)",
        ),
        (
            {"pools": {**pools(), "rollout": {"kind": "H100", "nodes": [{"name": "r0"}]}}},
            "pool 'rollout' (H100) has no price",
        ),
    ],
)  # fmt: skip
def test_a_bad_placement_configuration_is_refused_in_one_line(change, words):
    with pytest.raises(UserError) as error:
        make_config({"pools": pools(), "placement": {}, **change})
    assert words in str(error.value) and "\n" not in str(error.value)


def test_the_word_scheduler_stands_for_the_defaults():
    given = {side: {"kind": "H20", "nodes": [{"name": side[0] + "0", "gpus": 8}]} for side in ("rollout", "train")}
    assert make_config({"pools": given, "placement": "scheduler"}).placement.slo == 2.0
