"""What clients claim after a loss of memory."""

import msgspec
import pytest

from tests.coordinator.driver import Driver, config
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core.leases import LAST_TOKEN, epoch_of, tokens_before
from verl_mux.coordinator.core.records import Settled
from verl_mux.coordinator.core.state import Machine

BEFORE = tokens_before(3)


def claim(token, nodes=("r0",), phase="rollout"):
    return m.Claim(token=token, key=f"k{token}", phase=phase, step=3, nodes=list(nodes), granted_at=0.0)


@pytest.fixture
def driver():
    """Settling, at the start of epoch 3."""
    driver = Driver(Machine(config()))
    driver.machine.state.token = BEFORE
    driver.machine.settle(unknown_up_to=BEFORE)
    return driver


def taken_away(driver, job):
    """Tokens of which the job's client hears at its next heartbeat that they are not its any more."""
    return [token for token, lost in driver.machine.state.jobs[job].closed.items() if lost]


def test_of_two_leases_on_one_node_the_later_is_right_whoever_speaks_first(driver):
    for job, token in (("a", 5), ("b", 7), ("c", 6)):
        driver.register(job, again=True, held=[claim(token)])
    assert driver.holders("r0") == ["b"]
    assert [taken_away(driver, job) for job in "abc"] == [[5], [], [6]]


def test_a_lease_that_its_client_does_not_hold_any_more_ends(driver):
    driver.register("a", again=True, held=[claim(5, ["r0"]), claim(6, ["r1"])])
    driver.register("a", again=True, held=[claim(6, ["r1"])])
    assert (driver.holders("r0"), driver.holders("r1")) == ([], ["a"])


def test_who_speaks_late_keeps_what_is_free_and_loses_what_was_granted_since(driver):
    driver.register("b")
    driver.ask("b", "rollout", 1, ["r0"])
    driver.do(Settled())
    assert driver.holders("r0") == ["b"]
    driver.register("a", again=True, held=[claim(5, ["r0"]), claim(6, ["r1"])])
    assert taken_away(driver, "a") == [5]
    assert (driver.holders("r0"), driver.holders("r1")) == (["b"], ["a"])


@pytest.mark.parametrize(
    "made_up", [claim(BEFORE + 1), claim(0), claim(2**64 - 1), claim(5, []), claim(5, ["r9"]), claim(5, phase="sync")], ids=str
)
def test_what_no_coordinator_can_have_granted_is_not_believed(driver, made_up):
    driver.register("a", again=True, held=[made_up])
    assert taken_away(driver, "a") == [made_up.token]
    assert driver.machine.state.leases == {}


@pytest.fixture
def secret_driver(driver):
    """Its coordinator has keys: a job `a` was granted r0 and r1 before the memory was lost."""
    before = Driver(Machine(config()))
    before.machine.secret = driver.machine.secret = b"of the keys"
    before.machine.state.token = 4
    before.register("a")
    (granted,) = before.ask("a", "rollout", 1, ["r0", "r1"])
    driver.granted = m.Claim(**{name: getattr(granted, name) for name in m.Claim.__struct_fields__})
    return driver


def test_a_claim_takes_no_node_from_its_holder_without_the_proof_of_a_grant(secret_driver):
    driver, true = secret_driver, secret_driver.granted
    driver.register("a", again=True, held=[true])
    later = msgspec.structs.replace(true, token=true.token + 1)
    for number, forged in enumerate([claim(7), later, msgspec.structs.replace(later, granted=["r0"])]):
        driver.register(f"thief{number}", again=True, held=[forged])
    driver.register("thief", uid="a:2", again=True, held=[msgspec.structs.replace(later, proof=b"")])
    assert driver.holders("r0") == driver.holders("r1") == ["a"] and taken_away(driver, "a") == []


def test_a_proof_holds_for_what_is_left_of_a_lease_and_for_no_other_node_nor_job(secret_driver):
    driver, true = secret_driver, secret_driver.granted
    driver.register("b", again=True, held=[true])
    driver.register("c", again=True, held=[msgspec.structs.replace(true, nodes=["t0"])])
    assert not driver.machine.state.leases
    driver.register("a", again=True, held=[msgspec.structs.replace(true, nodes=["r1"])])
    assert (driver.holders("r0"), driver.holders("r1")) == ([], ["a"])


def test_registering_again_keeps_nobody_from_being_granted(driver):
    driver.do(Settled())
    driver.register("b")
    driver.register("a", again=True)
    driver.ask("b", "rollout", 1, ["r0"])
    assert driver.holders("r0") == ["b"]


def test_where_the_epoch_was_lost_too_it_is_taken_from_those_who_hold():
    driver = Driver(Machine(config()))
    driver.machine.settle(unknown_up_to=LAST_TOKEN)
    driver.register("a", again=True, held=[claim(BEFORE + 4)])
    driver.ask("a", "train", 3, ["t0"])
    driver.do(Settled())
    assert [epoch_of(lease.token) for lease in driver.machine.state.leases_of("a")] == [3, 4]


def test_a_pause_while_it_settles_takes_no_time_from_those_who_have_yet_to_speak(driver):
    driver.register("b", again=True)
    driver.ask("b", "rollout", 1, ["r0"])
    driver.now += 60  # the coordinator was stopped
    assert driver.wait(1) == []
    driver.register("a", again=True, held=[claim(5)])
    assert driver.holders("r0") == ["a"] and taken_away(driver, "a") == []
    assert driver.wait(5) == [Settled()]


def test_a_registration_that_comes_after_a_newer_one_asserts_nothing(driver):
    driver.register("a", again=True, held=[claim(5)], number=3)
    driver.register("a", again=True, held=[claim(6, ["r1"])], number=2)
    assert (driver.holders("r0"), driver.holders("r1")) == (["a"], [])


def test_a_request_from_before_the_newest_registration_is_late_and_gets_nothing(driver):
    driver.register("a", again=True, number=3)
    driver.do(Settled())
    about = {"phase": "rollout", "step": 1, "nodes": ["r0"]}
    assert driver.do(m.LeaseRequest(**driver.who("a"), key="old", number=2, **about)) == []
    assert driver.holders("r0") == []
    driver.do(m.LeaseRequest(**driver.who("a"), key="new", number=3, **about))
    assert driver.holders("r0") == ["a"]
