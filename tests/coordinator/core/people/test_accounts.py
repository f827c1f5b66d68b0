"""What owners were given, what jobs have cost, and what follows from a budget; on the state machine driven by hand."""

import msgspec
import pytest

from tests.coordinator.core.placement.placed_jobs import arrive, lines, placing_config
from tests.coordinator.driver import Driver, config
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.by_hand import decide
from verl_mux.coordinator.core.people import accounts
from verl_mux.coordinator.core.records import State
from verl_mux.coordinator.core.state import Machine
from verl_mux.placement.estimator import Observed

NODES = {"rollout": ["r0"], "train": ["t0"]}
POOLS = {
    "rollout": {"nodes": [{"name": "r0", "gpus": 2, "usd_per_hour": 36.0}]},
    "train": {"kind": "H20", "nodes": [{"name": "t0", "gpus": 8}]},
}


def driven(**keys):
    return Driver(Machine(config(**{"pools": POOLS, "lease_timeout": 1e6, **keys})))


def step(driver, job, number, rollout=10.0, train=10.0):
    """What it costs in USD: a second of rollout 0.01, one of training 8 x 1.85 / 3600."""
    for phase, seconds in (("rollout", rollout), ("train", train)):
        driver.ask(job, phase, number, NODES[phase])
        if driver.machine.state.leases_of(job):
            driver.now += seconds - 1
            driver.release(job)


@pytest.fixture
def driver():
    driver = driven()
    driver.register("a", nodes=NODES, owner="ann", budget_usd=0.3)
    return driver


def cost(driver, job="a"):
    return driver.machine.state.accounts[job].usd


def test_a_job_costs_what_its_nodes_cost_while_it_holds_them(driver):
    driver.now += 1000
    step(driver, "a", 1)
    assert cost(driver) == pytest.approx(10 * 36 / 3600 + 10 * 8 * 1.85 / 3600)


def test_what_an_owner_was_given_fades(driver):
    step(driver, "a", 1)
    machine, now = driver.machine, driver.now
    given = accounts.served(machine.state, machine.config, "ann", now)
    assert given == pytest.approx(10 * 2 + 10 * 8, rel=0.01)
    assert accounts.served(machine.state, machine.config, "ann", now + 86400) == pytest.approx(given / 2)


def test_a_node_that_goes_back_early_costs_until_then():
    pools = {"rollout": {"nodes": [{"name": name, "usd_per_hour": 3600.0} for name in ("r0", "r1")]}, "train": POOLS["train"]}
    driver = driven(pools=pools)
    driver.register("a", nodes={"rollout": ["r0", "r1"], "train": ["t0"]})
    driver.ask("a", "rollout", 1, ["r0", "r1"])
    token = driver.machine.state.leases_of("a")[0].token
    driver.do(m.LeaseShrink(**driver.who("a"), key="s", token=token, nodes=["r1"]), after=4.0)
    driver.now += 5
    driver.release("a")
    assert cost(driver) == pytest.approx(4 + 10)


def test_a_budget_is_told_when_it_is_nearly_spent_and_when_it_is_once_each(driver):
    for number in (1, 2):
        step(driver, "a", number, rollout=12.5, train=1.0)
    (near,) = lines(driver, "budget_near")
    assert near == {"job": "a", "usd": pytest.approx(0.254, abs=0.001), "budget_usd": 0.3, "owner": "ann"}
    assert not lines(driver, "budget_spent")
    step(driver, "a", 3, rollout=12.5, train=1.0)
    assert len(lines(driver, "budget_near")) == len(lines(driver, "budget_spent")) == 1


def spent(driver):
    """In the midst of its second step."""
    step(driver, "a", 1)
    driver.do(m.StepReport(**driver.who("a"), step=1, metrics={}))
    driver.ask("a", "rollout", 2, ["r0"])
    driver.now += 30
    driver.release("a")
    assert lines(driver, "budget_spent")


def test_a_job_whose_budget_is_spent_finishes_its_step_and_begins_no_other(driver):
    spent(driver)
    driver.ask("a", "train", 2, ["t0"])
    assert driver.holders("t0") == ["a"]
    driver.release("a")
    driver.do(m.StepReport(**driver.who("a"), step=2, metrics={}))
    driver.ask("a", "rollout", 3, ["r0"])
    assert driver.holders("r0") == []
    driver.register("b", nodes=NODES)
    driver.ask("b", "rollout", 1, ["r0"])
    assert driver.holders("r0") == ["b"], "it is in nobody's way"


@pytest.mark.parametrize("schedule", [[{"mode": "sequential"}], [{"mode": "interleaved", "steps": 2}, {"mode": "interleaved"}]])
def test_no_turn_and_no_barrier_waits_for_a_job_that_is_paused(schedule):
    driver = driven(schedule=schedule)
    driver.register("a", nodes=NODES, budget_usd=0.1)
    driver.register("b", nodes={"rollout": ["t0"], "train": ["t0"]})
    step(driver, "a", 1)
    driver.do(m.StepReport(**driver.who("a"), step=1, metrics={}))
    driver.ask("a", "rollout", 2, ["r0"])
    for number in (1, 2, 3):
        driver.ask("b", "rollout", number, ["t0"])
        assert driver.holders("t0") == ["b"]
        driver.release("b")
        driver.do(m.StepReport(**driver.who("b"), step=number, metrics={}))


def by_hand(driver, usd, job="a"):
    decided, answer = decide(m.SetBudget(job=job, usd=usd), driver.machine.state, driver.machine.config, lambda *_: "")
    for what in decided:
        driver.do(what)
    return answer


def test_with_a_larger_budget_it_goes_on(driver):
    spent(driver)
    driver.do(m.StepReport(**driver.who("a"), step=2, metrics={}))
    driver.ask("a", "rollout", 3, ["r0"])
    assert by_hand(driver, 0.2).text == "job 'a' has cost 0.45 of 0.20 USD and begins no other step"
    assert driver.holders("r0") == []
    assert by_hand(driver, 10.0).text == "job 'a' has cost 0.45 of 10.00 USD and goes on"
    assert driver.holders("r0") == ["a"]
    assert "no job 'b' runs here; jobs: a" in by_hand(driver, 1.0, job="b").reason


def test_starts_of_a_job_add_up_until_one_has_finished(driver):
    step(driver, "a", 1)
    before = cost(driver)
    driver.do(m.Deregister(**driver.who("a"), reason="an exception"))
    driver.register("a", nodes=NODES, uid="a:2", owner="ann", budget_usd=0.3)
    driver.do(m.Deregister(**driver.who("a", "a:2")))  # it only asked whether it would be taken
    assert cost(driver) == before
    driver.register("a", nodes=NODES, uid="a:3", owner="ann", budget_usd=0.3)
    driver.do(m.LeaseRequest(**driver.who("a", "a:3"), key="k", phase="rollout", step=1, nodes=["r0"]))
    driver.do(m.Deregister(**driver.who("a", "a:3")))
    assert driver.machine.state.accounts == {}


def test_another_owner_under_the_same_name_has_an_account_of_his_own(driver):
    step(driver, "a", 1)
    driver.do(m.Deregister(**driver.who("a"), reason="an exception"))
    driver.register("a", nodes=NODES, uid="a:2", owner="bob")
    assert cost(driver) == 0.0


def test_hours_count_from_the_first_start(driver):
    driver.register("b", nodes=NODES, within_s=100.0)
    first = driver.machine.state.jobs["b"].deadline
    driver.do(m.Deregister(**driver.who("b"), reason="an exception"), after=50.0)
    driver.register("b", nodes=NODES, uid="b:2", within_s=100.0)
    assert driver.machine.state.jobs["b"].deadline == first == driver.machine.state.accounts["b"].since + 100


def test_a_budget_needs_prices():
    driver = driven(pools={"rollout": {"nodes": [{"name": "r0"}]}, "train": POOLS["train"]})
    (refused,) = driver.register("a", nodes=NODES, budget_usd=1.0)
    assert "job 'a' has a budget, but node 'r0' has no price" in refused.reason


def test_a_job_whose_profile_costs_more_than_its_budget_is_refused():
    driver = Driver(Machine(placing_config(2)))
    seen = Observed(rollout=(1800.0,) * 3, train=(900.0,) * 3)
    (refused,) = arrive(driver, "a", profiled=seen, steps=4, budget_usd=2.9)
    assert refused.reason == "job 'a' would cost 3.00 USD by its profile (4 steps), and its budget is 2.90 USD"
    assert isinstance(arrive(driver, "a", profiled=seen, steps=4, budget_usd=3.1)[0], m.Registered)
    assert isinstance(arrive(driver, "b", steps=4, budget_usd=0.1)[0], m.Registered), "bounds are no reason"


def test_what_a_job_would_cost_is_told_by_the_cheapest_nodes_that_it_may_get():
    driver = Driver(Machine(placing_config(2)))
    decided, _ = decide(
        m.NodeAdd(pool="rollout", node="r7", spot=True, usd_per_hour=0.25), driver.machine.state, driver.machine.config, str
    )
    driver.do(decided[0])
    about = {"profiled": Observed(rollout=(1800.0,) * 3, train=(900.0,) * 3), "steps": 4}
    (refused,) = arrive(driver, "a", **about, budget_usd=2.9)
    assert "job 'a' would cost 3.00 USD by its profile" in refused.reason
    (refused,) = arrive(driver, "a", **about, budget_usd=1.4, movable=True)
    assert "job 'a' would cost 1.50 USD by its profile" in refused.reason
    assert isinstance(arrive(driver, "a", **about, budget_usd=1.6, movable=True)[0], m.Registered)


def test_a_filler_has_no_account():
    driver = driven()
    driver.register("sums", nodes={"rollout": ["r0"]}, filler=True, owner="ann")
    driver.do(m.LeaseRequest(**driver.who("sums"), key="k", phase="train", step=0, nodes=["r0"], num_nodes=1))
    driver.release("sums")
    assert driver.machine.state.accounts == {} and driver.machine.state.served == {}


def test_accounts_outlive_a_restart(driver):
    spent(driver)
    again = Machine(driver.machine.config)
    for event in driver.events:
        again.handle(event)
    assert again.state == driver.machine.state
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(again.state), type=State) == again.state
