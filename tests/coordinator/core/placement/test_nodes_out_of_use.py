"""Nodes on which no job is placed: those that drain, leave or are added while jobs run, and those that jobs name themselves."""

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.coordinator.core.placement.placed_jobs import AUTO, arrive, lines, needs, placing_config, register, shown, where_told
from tests.coordinator.core.placement.test_moving import Jobs
from tests.coordinator.driver import Driver, changed_pools
from tests.exploring import examples
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core import hosts, placing
from verl_mux.coordinator.core.placing import Answerer
from verl_mux.coordinator.core.records import Input, JobState, PoolsChanged, State
from verl_mux.coordinator.core.state import Machine


def test_nodes_that_jobs_name_themselves_are_out_of_the_schedulers_hands():
    driver = Driver(Machine(placing_config(count=2)))
    driver.register("named", nodes={"rollout": ["r0"], "train": ["t0"]})
    assert arrive(driver, "a")[0].nodes == {"rollout": ["r1"], "train": ["t1"]}
    (refused,) = driver.register("late", nodes={"rollout": ["r1"], "train": ["t0"]})
    assert "names node 'r1', on which the coordinator has placed a" in refused.reason


def test_nobody_new_goes_to_a_draining_node_be_it_free_or_shared():
    driver = Driver(Machine(placing_config(count=2)))
    driver.reload(drain=["r0"])
    assert arrive(driver, "a")[0].nodes == {"rollout": ["r1"], "train": ["t0"]}
    driver.reload(drain=["t0"])
    driver.reload(undrain=["r0"])
    assert arrive(driver, "b")[0].nodes["train"] == ["t1"]


def test_a_node_that_drains_does_not_come_free_when_its_job_leaves(driver):
    arrive(driver, "a", slo=1.0)
    arrive(driver, "b", slo=1.0)
    driver.reload(drain=["r0"])
    assert where_told(driver.do(m.Deregister(**driver.who("a")))) == []
    assert where_told(driver.reload(undrain=["r0"])) == [{"rollout": ["r0"], "train": ["t0"]}]


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
    no_room = Answerer().answer(placing.asked(machine.state, machine.config, 9.0), {})
    machine.handle(Input(9.1, m.Deregister(**driver.who("named"))))
    assert where_told(driver.do(no_room)) == [{"rollout": ["r0"], "train": ["t0"]}]


def test_who_waits_to_be_placed_goes_to_a_node_that_was_added(driver):
    arrive(driver, "a", slo=1.0)
    assert isinstance(arrive(driver, "b", slo=1.0)[0], m.Queued)
    assert where_told(driver.reload(add={"r7": "rollout"})) == [{"rollout": ["r7"], "train": ["t0"]}]
    assert lines(driver, "pools_changed") == [{"added": ["r7"], "removed": []}]


def test_a_node_that_drains_is_removed_after_its_job_and_the_status_marks_it(driver):
    driver.reload(add={"r7": "rollout"})
    arrive(driver, "a", slo=1.0)
    driver.reload(drain=["r0"])
    driver.ask("a", "init", 0, ["t0"])
    assert driver.holders("t0") == ["a"], "it goes on where nothing drains"
    assert where_told(arrive(driver, "b", slo=1.0)) == [{"rollout": ["r7"], "train": ["t0"]}]
    assert "node rollout/r0: idle (draining); " in shown(driver)
    left = msgspec.structs.replace(driver.machine.config, pools=changed_pools(driver.machine.config.pools, remove=["r0"]))
    assert "job 'a' is registered on it: let it end" in hosts.change_refusal(driver.machine.state, driver.machine.config, left)
    driver.do(m.Deregister(**driver.who("a")))
    assert hosts.change_refusal(driver.machine.state, driver.machine.config, left) is None
    driver.reload(remove=["r0"])
    assert sorted(driver.machine.config.nodes) == ["r7", "t0"]


def test_who_can_be_moved_is_asked_to_leave_a_node_that_drains():
    driver = Jobs(Machine(placing_config()))
    driver.come("a", movable=True, slo=1.0)
    driver.reload(add={"r7": "rollout", "t7": "train"})
    driver.step("a", 1)
    driver.reload(drain=["r0"])
    (asked,) = lines(driver, "move_asked")
    assert (asked["job"], asked["nodes"]) == ("a", {"rollout": ["r7"], "train": ["t0"]})
    assert driver.beat("a") == 1
    driver.leave("a", 1, step=1)
    driver.come_again("a", slo=1.0)
    assert driver.state.jobs["a"].nodes == {"rollout": ["r7"], "train": ["t0"]}


def test_who_cannot_be_moved_or_has_nowhere_to_go_stays(driver):
    driver.reload(add={"r7": "rollout"})
    arrive(driver, "a", slo=1.0)
    driver.reload(drain=["r0"])
    assert not lines(driver, "move_asked") and driver.machine.state.jobs["a"].nodes["rollout"] == ["r0"]
    alone = Jobs(Machine(placing_config()))
    alone.come("a", movable=True, slo=1.0)
    alone.reload(drain=["r0"])
    assert not lines(alone, "move_asked") and alone.place("a") == {"rollout": ["r0"], "train": ["t0"]}


@pytest.mark.parametrize("needed", [False, True])
def test_nobody_is_placed_on_a_node_that_began_to_drain_while_the_placer_was_thinking(needed):
    driver = Driver(Machine(placing_config(2)))
    if needed:
        arrive(driver, "first", slo=4.0, movable=True)
    register(driver, "a")
    machine = driver.machine
    thought = Answerer().answer(placing.asked(machine.state, machine.config, 9.0), {})
    (group,) = thought.answer.changed
    node = group.rollout_nodes[-1]
    machine.handle(Input(9.1, PoolsChanged(pools=changed_pools(machine.config.pools, drain=[node]))))
    noted = where_told(driver.do(thought))
    assert noted and node not in noted[0]["rollout"]


WORDS = st.tuples(
    st.sampled_from(["arrive", "arrive", "end", "add", "remove", "drain", "undrain", "late"]), st.integers(0, 3), st.booleans()
)


@settings(max_examples=examples(80), deadline=None, suppress_health_check=list(HealthCheck))
@given(history=st.lists(WORDS, max_size=25))
def test_in_any_history_jobs_are_on_nodes_that_there_are_and_a_restart_knows_it(history):
    driver = Driver(Machine(placing_config(2)))
    for number, (word, which, flag) in enumerate(history):
        _say(driver, word, which, flag, number)
        state, there = driver.machine.state, set(driver.machine.config.nodes)
        held = [node for group in state.placed.groups for node in (*group.rollout_nodes, *group.train_nodes)]
        assert len(set(held)) == len(held) and set(held) <= there, "each node is one group's"
        assert all(set(job.all_nodes) <= there for job in state.jobs.values() if job.state is not JobState.ENDED)
    again = Machine(placing_config(2))
    for event in driver.events:
        again.handle(event)
    assert again.state == driver.machine.state and again.config.pools == driver.machine.config.pools
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(again.state), type=State) == again.state


def _say(driver, word, which, flag, number):
    config, jobs = driver.machine.config, [job for job in driver.machine.state.jobs.values() if job.state is JobState.LIVE]
    nodes = sorted(config.nodes)
    node = nodes[which % len(nodes)]
    if word == "arrive":
        arrive(driver, f"j{number}", slo=1.0 + which, movable=flag)
    elif word == "late":  # the placer thinks while a node begins to drain
        where = {"host": "here", "pid": 7, "started": 1, "nodes": AUTO}
        driver._handle(Input(driver.now, m.Register(**driver.who(f"j{number}"), **where, needs=needs())))
        thought = Answerer().answer(placing.asked(driver.machine.state, config, driver.now), {})
        driver._handle(Input(driver.now, PoolsChanged(pools=changed_pools(config.pools, drain=[node]))))
        driver.do(thought)
    elif word == "end" and jobs:
        driver.do(m.Deregister(**driver.who(jobs[which % len(jobs)].name)))
    elif word == "add":
        driver.reload(add={f"n{number}": "rollout" if flag else "train"})
    elif word in ("drain", "undrain"):
        driver.reload(**{word: [node]})
    elif word == "remove":
        changed = changed_pools(config.pools, remove=[node])
        after = msgspec.structs.replace(config, pools=changed)
        if all(pool.nodes for pool in changed.values()) and hosts.change_refusal(driver.machine.state, config, after) is None:
            driver.do(PoolsChanged(pools=changed))
