"""What `verl-mux status` says of each job, in a sentence."""

import pytest

from tests.coordinator.core.placement.placed_jobs import arrive, placing_config
from tests.coordinator.core.placement.test_moving import spoilt
from tests.coordinator.driver import Driver, config
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core import snapshot
from verl_mux.coordinator.core.state import Machine
from verl_mux.placement.estimator import Observed

BOUNDS = "to be placed by more than bounds, every response at its limit, tell the seconds of a few steps (mux.profiled)"


def seen(rollout, train):
    return Observed(rollout=(rollout,) * 3, train=(train,) * 3)


def noted(driver):
    return snapshot.reasons(driver.machine.state, driver.machine.config)


@pytest.fixture
def driver():
    return Driver(Machine(placing_config(2)))


def test_who_was_placed_is_told_with_whom_and_what_it_added(driver):
    arrive(driver, "a", slo=1.3)
    assert noted(driver)["a"].startswith("a has r0, t0 to itself, which added 2.00 USD/h, as there was no job yet to share with")
    arrive(driver, "b", slo=1.3)
    found = noted(driver)
    assert found["a"].startswith("a shares t0 with b and has r0 to itself, which added 2.00 USD/h")
    assert found["b"] == (
        "b shares t0 with a and has r1 to itself, which added 1.00 USD/h, and no other place added less;"
        f" on nodes of its own it would have cost 2.00 USD/h; {BOUNDS}"
    )
    driver.do(m.Deregister(**driver.who("a")))
    assert list(noted(driver)) == ["b"] and noted(driver)["b"].startswith("b has r1, t0 to itself")


def test_a_job_that_waits_says_why():
    driver = Driver(Machine(placing_config(1)))
    arrive(driver, "a", slo=3.0, profiled=seen(100.0, 100.0))
    arrive(driver, "b", slo=1.0, profiled=seen(300.0, 30.0))
    assert noted(driver)["b"] == "b waits to be placed: no room within everybody's SLO"
    driver.do(m.Deregister(**driver.who("a")))
    assert noted(driver)["b"] == "b has r0, t0 to itself, which came free while it waited"


def test_who_moved_is_told_so():
    driver = spoilt()
    assert (
        "where it was moved, as that keeps an SLO, saves more than the move costs, or its node was taken away"
        in noted(driver)["b"]
    )


def test_who_names_its_nodes_is_told_so(driver):
    driver.register("named", nodes={"rollout": ["r0"], "train": ["t0"]})
    assert noted(driver) == {
        "named": "named has r0, t0 to itself, as it names these nodes; to be put where it adds the least,"
        " let the coordinator choose (mux.nodes=auto)"
    }
    plain = Driver(Machine(config()))
    plain.register("a", nodes={"rollout": ["t0"], "train": ["t0"]})
    plain.register("b", nodes={"rollout": ["t0"], "train": ["t0"]})
    assert noted(plain)["a"] == "a shares t0 with b, as it names this node"


def test_fillers_and_who_is_gone_are_not_told(driver):
    driver.register("sums", nodes={"rollout": ["r0"]}, filler=True)
    driver.register("a", nodes={"rollout": ["r0"], "train": ["t0"]})
    driver.do(m.Deregister(**driver.who("a")))
    assert noted(driver) == {}
