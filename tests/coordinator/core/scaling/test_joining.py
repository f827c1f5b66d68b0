"""Nodes that join and leave while jobs run, on the state machine driven by hand."""

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.coordinator.core.placement.placed_jobs import arrive, lines, needs, placing_config, register, where_told
from tests.coordinator.core.placement.test_moving import Jobs, spoilt
from tests.coordinator.driver import Driver, config
from tests.exploring import examples
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.by_hand import decide
from verl_mux.coordinator.config import make_config
from verl_mux.coordinator.core.inputs_and_instructions import Input, NodeDrained, NodeLeaving, ProcessesGone
from verl_mux.coordinator.core.placement import placing
from verl_mux.coordinator.core.placement.planner import Planner
from verl_mux.coordinator.core.records import JobState, State
from verl_mux.coordinator.core.scaling import joining
from verl_mux.coordinator.core.snapshot import describe
from verl_mux.coordinator.core.state import Machine
from verl_mux.coordinator.journal.changed_config import carried_over
from verl_mux.coordinator.status_view import plain


def by_hand(driver, message):
    """What an operator's message does, and its answer."""
    decided, answer = decide(message, driver.machine.state, driver.machine.config, lambda *_: "")
    told = [said for what in decided for said in driver.do(what)]
    return answer, told


def add(driver, pool, node, **keys):
    return by_hand(driver, m.NodeAdd(pool=pool, node=node, **keys))


def remove(driver, node, **keys):
    return by_hand(driver, m.NodeRemove(node=node, **keys))


def nodes(driver):
    return sorted(driver.machine.config.nodes)


@pytest.fixture
def named():
    driver = Driver(Machine(config()))
    driver.register("a", nodes={"rollout": ["r0"], "train": ["t0"]})
    return driver


@pytest.fixture
def placed():
    return Driver(Machine(placing_config()))


def test_a_node_joins_like_the_first_of_its_pool(placed):
    answer, _ = add(placed, "rollout", "r7", host="gpu-07")
    first, node = placed.machine.config.nodes["r0"], placed.machine.config.nodes["r7"]
    assert answer.text == "node 'r7' is in pool 'rollout'"
    assert msgspec.structs.replace(node, name="r0", host=None) == first and node.host == "gpu-07"
    assert lines(placed, "pools_changed") == [{"added": ["r7"], "removed": []}]


def test_adding_twice_is_adding_once(placed):
    add(placed, "rollout", "r7", host="gpu-07")
    answer, _ = add(placed, "rollout", "r7", host="gpu-07")
    assert answer.text == "node 'r7' is in pool 'rollout' already" and nodes(placed) == ["r0", "r7", "t0"]


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"pool": "more", "node": "r7"}, "no pool 'more' is known here; pools and their nodes: rollout (r0), train (t0)"),
        ({"pool": "rollout", "node": "t0"}, "node 't0' is there already"),
        ({"pool": "rollout", "node": "r0", "host": "other"}, "node 'r0' is there already"),
        ({"pool": "rollout", "node": "train"}, "'train' names both a pool and a node"),
        ({"pool": "rollout", "node": "r7", "gpu_ids": [0, 0]}, "node 'r7' has gpu_ids [0, 0]"),
        (
            {"pool": "rollout", "node": "r7", "host": "h", "gpu_ids": [0, 1]},
            "pool 'rollout' has nodes with different gpus (1, 2)",
        ),
    ],
)
def test_a_node_that_cannot_be_there_is_refused_with_what_there_is(placed, keys, why):
    answer, _ = by_hand(placed, m.NodeAdd(**keys))
    assert isinstance(answer, m.Refused) and why in answer.reason and nodes(placed) == ["r0", "t0"]


def test_who_waits_to_be_placed_goes_to_a_node_that_joined(placed):
    arrive(placed, "a", slo=1.0)
    assert isinstance(arrive(placed, "b", slo=1.0)[0], m.Queued)
    assert where_told(add(placed, "rollout", "r7")[1]) == [{"rollout": ["r7"], "train": ["t0"]}]


def test_an_idle_node_leaves_at_once(placed):
    add(placed, "rollout", "r7")
    answer, _ = remove(placed, "r7")
    assert answer.text == "nobody new gets node 'r7', and it is no more when nobody needs it"
    assert nodes(placed) == ["r0", "t0"] and placed.machine.state.leaving == []


def test_a_node_that_somebody_needs_leaves_after_him(placed):
    add(placed, "rollout", "r7")
    add(placed, "train", "t7")
    arrive(placed, "a", slo=1.0)
    answer, _ = remove(placed, "r0")
    assert answer.text.endswith("but job 'a' is registered on it: let it end, or evict it")
    placed.ask("a", "rollout", 1, ["r0"])
    assert placed.holders("r0") == ["a"], "he goes on as before"
    assert where_told(arrive(placed, "b", slo=1.0)) == [{"rollout": ["r7"], "train": ["t7"]}]
    assert isinstance(arrive(placed, "c", slo=1.0)[0], m.Queued)
    placed.do(m.Deregister(**placed.who("a")))
    assert nodes(placed) == ["r7", "t0", "t7"]


def test_of_a_node_that_is_not_idle_only_that_is_said(placed):
    add(placed, "rollout", "r7")
    arrive(placed, "a")
    answer, _ = remove(placed, "r0", if_idle=True)
    assert answer.reason == "node 'r0' is not idle: job 'a' is registered on it: let it end, or evict it"
    assert placed.machine.state.leaving == []


def test_the_status_marks_what_leaves_and_what_may_vanish(placed):
    add(placed, "rollout", "r7", spot=True)
    arrive(placed, "a", slo=1.0)
    remove(placed, "r0")
    about = {"address": "tcp://here", "journal": {"path": None, "lost": None, "blocked": None}, "settling_s": None}
    seen = plain({**about, **describe(placed.machine.state, placed.machine.config, placed.now, {})})
    assert "node rollout/r0: idle (leaving); " in seen and "node rollout/r7: idle (spot); " in seen


def test_the_last_node_of_a_pool_stays(placed):
    assert "node 'r0' is the last of pool 'rollout'" in remove(placed, "r0")[0].reason
    assert "no node 'r9' is known here" in remove(placed, "r9")[0].reason


def test_nobody_new_may_name_a_node_that_leaves_and_who_is_there_may_register_again(named):
    remove(named, "r0")
    (refused,) = named.register("b", nodes={"rollout": ["r0"], "train": ["t0"]})
    assert "node 'r0' is leaving, and is given to nobody new" in refused.reason
    (again,) = named.register("a", nodes={"rollout": ["r0"], "train": ["t0"]}, again=True)
    assert isinstance(again, m.Registered)


def test_jobs_on_a_node_that_is_gone_are_over_and_a_kept_place_there_is_given_up(named):
    named.ask("a", "rollout", 1, ["r0"])
    answer, _ = remove(named, "r0", gone=True)
    assert answer.text.endswith("jobs on it end")
    assert named.machine.state.jobs["a"].state is JobState.DYING and named.holders("r0") == []
    named.do(ProcessesGone(job="a", uid="a:1"))
    assert nodes(named) == ["r1", "t0"]
    assert lines(named, "job_exited")[-1]["reason"] == "its node r0 is gone"


def test_a_node_that_may_vanish_has_a_price_of_its_own(placed):
    add(placed, "rollout", "r7", spot=True, usd_per_hour=0.3)
    add(placed, "rollout", "r8")
    found = placed.machine.config.nodes
    assert [(found[name].usd_per_hour, found[name].spot) for name in ("r7", "r8")] == [(0.3, True), (1.0, False)]
    cluster = placed.machine.config.clusters["rollout+train"]
    assert (cluster.spot, cluster.spot_usd, cluster.rollout.kind.usd_per_hour) == ({"r7"}, {"r7": 0.3}, 1.0)
    arrive(placed, "a", slo=1.0, movable=True)
    (group,) = describe(placed.machine.state, placed.machine.config, placed.now, {})["placement"]["groups"].values()
    assert group["usd_per_hour"] == lines(placed, "placed")[-1]["usd_per_hour"] == pytest.approx(1.3)


def test_one_without_a_price_costs_its_kinds_rent():
    nodes = [{"name": "r0", "usd_per_hour": 1.0}, {"name": "r1", "spot": True}]
    pools = {"rollout": {"kind": "H20", "nodes": nodes}, "train": {"kind": "H800", "nodes": [{"name": "t0", "gpus": 0}]}}
    found = make_config({"pools": pools, "placement": {}})
    cluster = found.clusters["rollout+train"]
    assert found.price("r1") == pytest.approx(1.85) and cluster.usd_per_hour(["r1"], []) == 1.0, "as one of the others"
    assert found.price("t0") == cluster.usd_per_hour([], ["t0"]) == pytest.approx(5.28)


def test_one_that_costs_more_than_others_counts_as_these():
    nodes = [{"name": "r0", "usd_per_hour": 1.0}, {"name": "r1", "spot": True, "usd_per_hour": 3.0}]
    pools = {"rollout": {"kind": "H20", "nodes": nodes}, "train": {"kind": "H800", "nodes": [{"name": "t0"}]}}
    found = make_config({"pools": pools, "placement": {}})
    cluster = found.clusters["rollout+train"]
    assert (cluster.spot, cluster.spot_usd) == ({"r1"}, {}) and found.price("r1") == 3.0


def test_nodes_that_may_vanish_go_to_who_is_started_again(placed):
    add(placed, "rollout", "r7", spot=True)
    add(placed, "train", "t7", spot=True)
    assert where_told(arrive(placed, "a", slo=1.0, movable=True)) == [{"rollout": ["r7"], "train": ["t7"]}]
    assert where_told(arrive(placed, "b", slo=1.0)) == [{"rollout": ["r0"], "train": ["t0"]}]


def test_one_that_nobody_starts_again_joins_none_there_and_takes_one_only_where_nothing_else_is_free(placed):
    add(placed, "rollout", "r7", spot=True)
    add(placed, "train", "t7", spot=True)
    arrive(placed, "a", movable=True)
    assert where_told(arrive(placed, "b")) == [{"rollout": ["r0"], "train": ["t0"]}]
    placed.do(m.Deregister(**placed.who("a")))
    assert where_told(arrive(placed, "c", slo=1.0)) == [{"rollout": ["r7"], "train": ["t0"]}], (
        "it shares only what does not vanish"
    )


def test_a_job_on_a_node_that_vanished_is_placed_elsewhere_when_it_is_started_again(placed):
    add(placed, "rollout", "r7", spot=True)
    arrive(placed, "a", slo=1.0, movable=True)
    assert placed.machine.state.jobs["a"].nodes["rollout"] == ["r7"]
    remove(placed, "r7", gone=True)
    placed.do(ProcessesGone(job="a", uid="a:1"))
    assert nodes(placed) == ["r0", "t0"]
    told = placed.register("a", uid="a:2", nodes={"rollout": [m.AUTO], "train": [m.AUTO]}, needs=needs(), movable=True)
    assert where_told(told) == [{"rollout": ["r0"], "train": ["t0"]}]


@pytest.mark.parametrize("how", ["leaves", "drains"])
def test_who_can_be_moved_is_asked_to_leave_a_node_that(how):
    driver = Jobs(Machine(placing_config()))
    driver.come("a", movable=True, slo=1.0)
    for pool, node in (("rollout", "r7"), ("train", "t7")):
        add(driver, pool, node)
    driver.step("a", 1)
    if how == "leaves":
        remove(driver, "r0")
    else:
        driver.do(NodeDrained(node="r0"))
    (asked,) = lines(driver, "move_asked")
    assert (asked["job"], asked["nodes"]) == ("a", {"rollout": ["r7"], "train": ["t0"]})
    assert driver.beat("a") == 1
    driver.leave("a", 1, step=1)
    assert ("r0" in driver.machine.config.nodes) is (how == "drains")
    driver.come_again("a", slo=1.0)
    assert driver.state.jobs["a"].nodes == {"rollout": ["r7"], "train": ["t0"]}


def test_who_cannot_be_moved_or_has_nowhere_to_go_stays(placed):
    add(placed, "rollout", "r7")
    arrive(placed, "a", slo=1.0)
    remove(placed, "r0")
    assert not lines(placed, "move_asked") and placed.machine.state.jobs["a"].nodes["rollout"] == ["r0"]
    driver = Jobs(Machine(placing_config()))
    driver.come("a", movable=True, slo=1.0)
    driver.do(NodeDrained(node="r0"))
    assert not lines(driver, "move_asked") and driver.place("a") == {"rollout": ["r0"], "train": ["t0"]}


def test_a_place_on_a_node_that_vanished_is_not_kept_for_who_is_on_his_way():
    driver = spoilt()
    driver.leave("b", 1)
    remove(driver, "r1", gone=True)
    assert lines(driver, "move_given_up")[0]["job"] == "b" and nodes(driver) == ["r0", "t0", "t1"]


def test_a_file_that_is_read_again_or_another_start_leaves_what_joined(placed):
    add(placed, "rollout", "r7")
    state, read = placed.machine.state, placing_config()
    assert [node.name for node in joining.merged(read, state).pools["rollout"].nodes] == ["r0", "r7"]
    arrive(placed, "a")
    after = carried_over(placed.machine, read, None)
    assert sorted(after.config.nodes) == ["r0", "r7", "t0"] and after.state.joined == state.joined
    named_in_file = joining.merged(placing_config(count=8), state)
    assert named_in_file.joined == {} and len(named_in_file.pools["rollout"].nodes) == 8


def test_what_joined_a_pool_that_the_file_has_no_more_is_gone(placed):
    add(placed, "rollout", "r7")
    other = make_config({"pools": {"gpus": {"nodes": [{"name": "node0"}]}}})
    assert joining.merged(other, placed.machine.state).joined == {}


def test_a_restart_knows_who_joined_and_who_leaves(placed):
    add(placed, "rollout", "r7")
    arrive(placed, "a")
    remove(placed, "r0")
    again = Machine(placing_config())
    for event in placed.events:
        again.handle(event)
    assert again.state == placed.machine.state and again.state.leaving == ["r0"]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(again.state), type=State) == again.state
    assert again.config.pools == placed.machine.config.pools


@pytest.mark.parametrize("needed", [False, True])
def test_nobody_is_placed_on_a_node_that_left_while_the_placer_was_thinking(needed):
    driver = Driver(Machine(placing_config(2)))
    if needed:
        arrive(driver, "first", slo=4.0, movable=True)
    register(driver, "a")
    machine = driver.machine
    thought = Planner().answer(placing.asked(machine.state, machine.config, 9.0), {})
    (group,) = thought.changed
    node = group.rollout_nodes[-1]
    machine.handle(Input(9.1, NodeLeaving(node=node)))
    told = where_told(driver.do(thought))
    assert told and node not in told[0]["rollout"]


WORDS = st.tuples(
    st.sampled_from(["arrive", "arrive", "end", "add", "remove", "gone", "drain", "late"]), st.integers(0, 3), st.booleans()
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
        assert set(state.leaving) <= {*held, *(node for job in state.jobs.values() for node in job.all_nodes)}
    again = Machine(placing_config(2))
    for event in driver.events:
        again.handle(event)
    assert again.state == driver.machine.state and again.config.pools == driver.machine.config.pools


def _say(driver, word, which, flag, number):
    nodes, jobs = (
        sorted(driver.machine.config.nodes),
        [job for job in driver.machine.state.jobs.values() if job.state is JobState.LIVE],
    )
    if word == "arrive":
        arrive(driver, f"j{number}", slo=1.0 + which, movable=flag)
    elif word == "late":  # the placer thinks while a node goes
        where = {"host": "here", "pid": 7, "started": 1, "nodes": {"rollout": [m.AUTO], "train": [m.AUTO]}}
        driver._handle(Input(driver.now, m.Register(**driver.who(f"j{number}"), **where, needs=needs())))
        asked = placing.asked(driver.machine.state, driver.machine.config, driver.now)
        thought = Planner().answer(asked, {})
        for what in decide(
            m.NodeRemove(node=nodes[which % len(nodes)]), driver.machine.state, driver.machine.config, lambda *_: ""
        )[0]:
            driver._handle(Input(driver.now, what))
        driver.do(thought)
    elif word == "end" and jobs:
        driver.do(m.Deregister(**driver.who(jobs[which % len(jobs)].name)))
    elif word == "add":
        add(driver, "rollout" if flag else "train", f"n{number}", spot=which == 0)
    elif word == "drain":
        driver.do(NodeDrained(node=nodes[which % len(nodes)], undo=flag))
    elif word == "remove" or word == "gone":
        remove(driver, nodes[which % len(nodes)], gone=word == "gone")
        for job in [job for job in driver.machine.state.jobs.values() if job.state is JobState.DYING]:
            driver.do(ProcessesGone(job=job.name, uid=job.uid))
