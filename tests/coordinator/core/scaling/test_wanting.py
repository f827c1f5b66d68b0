"""When whoever starts and ends nodes is told, on the state machine driven by hand."""

import msgspec
import pytest

from tests.coordinator.core.placement.placed_jobs import arrive, lines, needs, placing_config
from tests.coordinator.driver import Driver, config
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.config import make_config
from verl_mux.coordinator.core.inputs_and_instructions import (
    Call,
    HookFailed,
    NodeDrained,
    NodeJoined,
    NodeLeaving,
    ScalingDue,
)
from verl_mux.coordinator.core.records import State
from verl_mux.coordinator.core.scaling.wanting import OVERDUE_S
from verl_mux.coordinator.core.state import Machine
from verl_mux.errors import UserError

DELAY = 100.0
WANTED = {"on_nodes_wanted": "start"}


class Told(Driver):
    """The same with who was called, and for what."""

    def __init__(self, machine):
        super().__init__(machine)
        self.calls = []

    def _handle(self, event):
        out = super()._handle(event)
        self.calls += [step for step in out if isinstance(step, Call)]
        return out

    def more(self):
        return [(call.pool, call.about["more"]) for call in self.calls if call.hook == "on_nodes_wanted"]

    def idle(self):
        return [call.brief["nodes"] for call in self.calls if call.hook == "on_nodes_idle"]


def placing(count=1, keys=None, **of_pools):
    given = msgspec.structs.replace(placing_config(count), lease_timeout=1e6, **keys or {})
    return with_pools(given, **of_pools)


def with_pools(given, **keys):
    return msgspec.structs.replace(given, pools={n: msgspec.structs.replace(p, **keys) for n, p in given.pools.items()})


@pytest.fixture
def wanting():
    """`a` holds all there is, alone; `b` waits for a rollout node: both sides of it together are twice as dear."""
    driver = Told(Machine(placing(keys=WANTED, delay=DELAY)))
    for job in "ab":
        arrive(driver, job, slo=1.0)
    assert driver.machine.state.scaling.wants[0].job == "b"
    return driver


def lacking(driver):
    (want,) = driver.machine.state.scaling.wants
    return want.nodes


def test_nodes_are_asked_for_once_when_waiting_has_cost_as_much_as_their_coming(wanting):
    assert lacking(wanting) == {"rollout": 1}
    wanting.wait(DELAY / 2 - 5)  # the job's nodes cost two an hour, the one that it lacks one
    assert wanting.more() == []
    wanting.wait(200)
    assert wanting.more() == [("rollout", 1)]
    (told,) = lines(wanting, "nodes_wanted")
    assert told == wanting.calls[0].about
    assert told["jobs"] == [{"job": "b", "why": "starts", "nodes": 1, "saves_usd_per_hour": 0.0}]
    assert (told["usd_per_hour"], told["delay_s"], told["coming"]) == (1.0, DELAY, 0)
    assert wanting.calls[0].brief == {"pool": "rollout", "more": "1", "total": "2"}


def test_a_node_that_comes_starts_who_waited_and_nothing_more_is_asked_for(wanting):
    wanting.wait(DELAY)
    first = wanting.machine.config.pools["rollout"].nodes[0]
    wanting.do(NodeJoined(pool="rollout", node=msgspec.structs.replace(first, name="r7")))
    assert wanting.machine.state.jobs["b"].nodes["rollout"] == ["r7"]
    wanting.wait(2 * DELAY + OVERDUE_S + 10, every=5.0)
    assert wanting.more() == [("rollout", 1)] and wanting.machine.state.scaling.wants == []


def test_who_goes_before_it_comes_leaves_it_to_the_next(wanting):
    wanting.wait(DELAY)
    wanting.do(m.Deregister(**wanting.who("b")))
    assert wanting.machine.state.scaling.wants == []
    arrive(wanting, "c", slo=1.0)
    wanting.wait(2 * DELAY)
    assert wanting.more() == [("rollout", 1)], "it is on its way"
    arrive(wanting, "d", slo=1.0)
    wanting.wait(DELAY)
    assert wanting.more() == [("rollout", 1), ("rollout", 1), ("train", 1)]
    assert (wanting.calls[1].about["coming"], wanting.calls[1].about["total"]) == (1, 3)


def test_what_does_not_come_is_asked_for_again(wanting):
    wanting.wait(DELAY)
    wanting.wait(2 * DELAY + OVERDUE_S, every=5.0)
    assert wanting.more() == [("rollout", 1)] * 2


def test_who_could_not_be_told_is_told_at_the_next_change(wanting):
    wanting.wait(DELAY)
    wanting.do(HookFailed(pool="rollout", more=1, reason="exit code 1: no money"))
    assert lines(wanting, "hook_failed") == [{"hook": "on_nodes_wanted", "pool": "rollout", "reason": "exit code 1: no money"}]
    wanting.wait(DELAY)
    assert len(wanting.more()) == 1
    arrive(wanting, "c", slo=1.0)
    wanting.wait(DELAY)
    assert wanting.more() == [("rollout", 1), ("rollout", 2), ("train", 1)]


def test_a_pool_gets_no_more_than_its_most():
    driver = Told(Machine(placing(keys=WANTED, delay=0.0, most=2)))
    for job in "abc":
        arrive(driver, job, slo=1.0)
    driver.wait(10)
    assert driver.more() == [("rollout", 1)]


def test_nobody_is_told_where_nobody_is_named():
    driver = Told(Machine(placing(delay=0.0)))
    for job in "ab":
        arrive(driver, job, slo=1.0)
    driver.wait(2000, every=10.0)
    assert driver.calls == [] and driver.machine.state.scaling.wants == []


@pytest.fixture
def idle():
    driver = Told(Machine(config(on_nodes_idle="stop", idle_after=60, lease_timeout=1e6)))
    driver.register("a", nodes={"rollout": ["r0"], "train": ["t0"]})
    return driver


def test_a_node_without_residents_is_told_once(idle):
    idle.wait(55)
    assert idle.idle() == []
    idle.wait(200)
    assert idle.idle() == ["r1"]
    (told,) = lines(idle, "nodes_idle")[0]["nodes"]
    assert (told["node"], told["pool"], told["host"], told["joined"]) == ("r1", "rollout", None, False) and told["idle_s"] >= 60


def test_all_that_are_idle_are_told_when_another_one_is(idle):
    idle.wait(100)
    idle.do(m.Deregister(**idle.who("a")))
    idle.wait(100)
    assert idle.idle() == ["r1", "r0 r1 t0"]


def test_a_resident_begins_the_time_anew(idle):
    idle.wait(50)
    idle.register("b", nodes={"rollout": ["r1"], "train": ["t0"]})
    idle.wait(5)
    idle.do(m.Deregister(**idle.who("b")))
    idle.wait(50)
    assert idle.idle() == []
    idle.wait(20)
    assert idle.idle() == ["r1"]


def test_a_filler_is_a_resident_and_a_node_that_leaves_is_not_told(idle):
    idle.register("sums", nodes={"rollout": ["r1"]}, filler=True)
    idle.wait(70)
    assert idle.idle() == []
    idle.do(m.Deregister(**idle.who("sums")))
    idle.wait(70)
    assert idle.idle() == ["r1"]
    idle.do(m.Deregister(**idle.who("a")))
    idle.do(NodeLeaving(node="r0"))
    idle.wait(100)
    assert idle.idle() == ["r1", "r1 t0"]


def test_a_node_that_somebody_lacks_another_beside_is_not_idle():
    """`wide` waits for a second rollout node: the one that is free is kept for it."""
    driver = Told(Machine(placing(2, {**WANTED, "on_nodes_idle": "stop", "idle_after": 30.0}, delay=0.0)))
    arrive(driver, "a", slo=1.0)
    arrive(driver, "wide", slo=1.0, needs=needs(rollout_nodes=2))
    driver.wait(60)
    assert driver.more() == [("rollout", 1)] and driver.idle() == ["t1"]


def test_a_restart_knows_what_was_told(wanting):
    wanting.wait(DELAY)
    wanting.do(HookFailed(pool="rollout", more=1, reason="no"))
    wanting.do(NodeDrained(node="r0"))
    again = Machine(placing(keys=WANTED, delay=DELAY))
    for event in wanting.events:
        again.handle(event)
    assert again.state == wanting.machine.state
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(again.state), type=State) == again.state
    assert not [what for what in again.due(wanting.now) if isinstance(what.what, ScalingDue)]


POOLS = {"gpus": {"nodes": [{"name": "n0"}, {"name": "n1"}]}}


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"on_nodes_idle": " "}, "on_nodes_idle is ' '; a command or an http(s) URL is needed"),
        ({"on_nodes_idle": []}, "on_nodes_idle is []; a command or an http(s) URL is needed"),
        ({"on_nodes_wanted": "x"}, "on_nodes_wanted takes `placement: scheduler`"),
        ({"idle_after": 0}, "idle_after is 0 s; it must be above 0 s"),
        ({"pools": {"gpus": {**POOLS["gpus"], "delay": -1}}}, "pool 'gpus' has delay -1 s; it must be from 0"),
        ({"pools": {"gpus": {**POOLS["gpus"], "most": 1}}}, "pool 'gpus' has most 1, and 2 nodes; it must be at least as many"),
    ],
)
def test_keys_that_make_no_sense_are_refused(keys, why):
    with pytest.raises(UserError) as error:
        make_config({"pools": POOLS, **keys})
    assert why in str(error.value)
