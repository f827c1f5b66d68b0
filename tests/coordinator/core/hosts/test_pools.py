"""Which changes of the configuration jobs on record can live with."""

import pytest

from tests.coordinator.driver import POOLS, Driver, config
from verl_mux.coordinator.core import hosts
from verl_mux.coordinator.core.state import Machine

ONE_LESS = {**POOLS, "rollout": {"nodes": [{"name": "r0"}]}}


@pytest.fixture
def driver():
    driver = Driver(Machine(config()))
    driver.register("a", nodes={"rollout": ["r0"], "train": ["t0"]})
    return driver


def refusal(driver, **keys):
    return hosts.change_refusal(driver.machine.state, driver.machine.config, config(**keys))


def test_nodes_may_be_added(driver):
    assert refusal(driver, pools={**POOLS, "more": {"nodes": [{"name": "m0"}]}}) is None


def test_a_node_may_be_removed_when_it_is_draining_and_nobodys(driver):
    assert "node 'r1' is missing, and is not draining: give it `drain: true` first" in refusal(driver, pools=ONE_LESS)
    driver.reload(drain=["r1"])
    assert refusal(driver, pools=ONE_LESS) is None


def test_a_node_that_is_held_or_a_jobs_is_refused_by_name(driver):
    less = {**POOLS, "rollout": {"nodes": [{"name": "r1"}]}}
    driver.reload(drain=["r0"])
    assert "node 'r0' is missing, and job 'a' is registered on it" in refusal(driver, pools=less)
    driver.reload(undrain=["r0"])
    driver.ask("a", "rollout", 1, ["r0"])
    assert "node 'r0' is missing, and job 'a' holds it" in refusal(driver, pools=less)


def test_a_node_may_not_become_another(driver):
    moved = {**POOLS, "rollout": {"nodes": [{"name": "r0", "gpus": 4}, {"name": "r1"}]}}
    assert "node 'r0' is another" in refusal(driver, pools=moved)
    swapped = {"rollout": {"nodes": [{"name": "r0"}, {"name": "t0"}]}, "train": {"nodes": [{"name": "r1"}]}}
    assert "is another" in refusal(driver, pools=swapped)


def test_what_is_not_a_pool_takes_a_restart(driver):
    after = config(lease_timeout=9, kill_grace=3)
    assert hosts.restart_needed(driver.machine.config, after).startswith("lease_timeout, kill_grace changed")
    assert hosts.restart_needed(driver.machine.config, config()) is None


def test_a_drained_node_is_given_to_nobody_and_its_holder_keeps_it(driver):
    driver.ask("a", "rollout", 1, ["r0"])
    driver.reload(drain=["r0"])
    assert driver.holders("r0") == ["a"]
    driver.release("a")
    driver.ask("a", "rollout", 2, ["r0"])
    assert driver.holders("r0") == []
    driver.reload(undrain=["r0"])
    assert driver.holders("r0") == ["a"]


def test_a_node_may_begin_and_cease_to_drain_while_it_is_held(driver):
    driver.ask("a", "rollout", 1, ["r0"])
    drained = {**POOLS, "rollout": {"nodes": [{"name": "r0", "drain": True}, {"name": "r1"}]}}
    assert refusal(driver, pools=drained) is None
    driver.reload(drain=["r0"])
    assert refusal(driver) is None
    assert [(line.extra["node"], line.extra["undo"]) for line in driver.logged if line.event == "node_draining"] == [
        ("r0", False)
    ]
