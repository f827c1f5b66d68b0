"""Nodes on which nobody is placed: those that drain, and those that jobs name themselves."""

from tests.coordinator.core.placement.placed_jobs import arrive, placing_config, register, where_told
from tests.coordinator.driver import Driver
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core.inputs_and_instructions import Input, NodeDrained
from verl_mux.coordinator.core.placement import placing
from verl_mux.coordinator.core.placement.planner import Planner
from verl_mux.coordinator.core.state import Machine


def test_nodes_that_jobs_name_themselves_are_out_of_the_schedulers_hands():
    driver = Driver(Machine(placing_config(count=2)))
    driver.register("named", nodes={"rollout": ["r0"], "train": ["t0"]})
    assert arrive(driver, "a")[0].nodes == {"rollout": ["r1"], "train": ["t1"]}
    (refused,) = driver.register("late", nodes={"rollout": ["r1"], "train": ["t0"]})
    assert "names node 'r1', on which the coordinator has placed a" in refused.reason


def test_nobody_new_goes_to_a_draining_node_be_it_free_or_shared():
    driver = Driver(Machine(placing_config(count=2)))
    driver.do(NodeDrained(node="r0"))
    assert arrive(driver, "a")[0].nodes == {"rollout": ["r1"], "train": ["t0"]}
    driver.do(NodeDrained(node="t0"))
    driver.do(NodeDrained(node="r0", undo=True))
    assert arrive(driver, "b")[0].nodes["train"] == ["t1"]


def test_who_waits_goes_to_a_node_that_drains_no_more(driver):
    driver.do(NodeDrained(node="r0"))
    assert isinstance(arrive(driver, "a")[0], m.Queued)
    told = where_told(driver.do(NodeDrained(node="r0", undo=True)))
    assert told == [{"rollout": ["r0"], "train": ["t0"]}]


def test_a_node_that_drains_does_not_come_free_when_its_job_leaves(driver):
    arrive(driver, "a", slo=1.0)
    arrive(driver, "b", slo=1.0)
    driver.do(NodeDrained(node="r0"))
    assert where_told(driver.do(m.Deregister(**driver.who("a")))) == []
    assert where_told(driver.do(NodeDrained(node="r0", undo=True))) == [{"rollout": ["r0"], "train": ["t0"]}]


def test_a_filler_takes_no_node_from_who_is_to_be_placed(driver):
    driver.register("sums", nodes={"train": ["train"], "rollout": ["rollout"]}, filler=True)
    assert arrive(driver, "a")[0].nodes == {"rollout": ["r0"], "train": ["t0"]}


def test_who_waits_goes_where_a_job_was_that_named_its_nodes(driver):
    driver.register("named", nodes={"rollout": ["r0"], "train": ["t0"]})
    assert isinstance(arrive(driver, "a")[0], m.Queued)
    assert where_told(driver.do(m.Deregister(**driver.who("named")))) == [{"rollout": ["r0"], "train": ["t0"]}]


def test_a_job_that_named_its_nodes_leaves_while_the_placer_thinks_about_another(driver):
    driver.register("named", nodes={"rollout": ["r0"], "train": ["t0"]})
    register(driver, "a")
    machine = driver.machine
    no_room = Planner().answer(placing.asked(machine.state, machine.config, 9.0), {})
    machine.handle(Input(9.1, m.Deregister(**driver.who("named"))))
    assert where_told(driver.do(no_room)) == [{"rollout": ["r0"], "train": ["t0"]}]
