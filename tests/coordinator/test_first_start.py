"""The first coordinator at an address: how soon it grants, and what makes it doubt that it is the first."""

import uuid

import pytest
import zmq

from tests.coordinator.driver import Driver, config
from tests.coordinator.raw import Stranger, raw_dealer
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core import patience
from verl_mux.coordinator.core.inputs_and_instructions import Settled, SomebodyWasBefore
from verl_mux.coordinator.core.state import Machine
from verl_mux.coordinator.core.tokens import claims, numbering

LEASE_S = 600


@pytest.fixture
def driver():
    driver = Driver(Machine(config(lease_timeout=30)))
    claims.settle(driver.machine.state, driver.machine.config, numbering.LAST, is_first=True)
    return driver


def claim(token):
    return m.Claim(token=token, key="k", phase="rollout", step=1, nodes=["r0"], granted_at=0.0)


def test_where_nobody_from_before_speaks_it_grants_sooner(driver):
    assert patience.first_look(driver.machine.config) == pytest.approx(2 + 1 + 9)
    driver.register("a")
    driver.ask("a", "rollout", 1, ["r0"])
    assert driver.wait(11.5) == [] and driver.holders("r0") == []
    assert driver.wait(2) == [Settled()]
    assert driver.holders("r0") == ["a"]


@pytest.mark.parametrize("words", [{"again": True}, {"seen": 7}, {"held": [claim(7)]}], ids=str)
def test_a_job_from_before_makes_it_wait_for_all_others(driver, words):
    driver.register("a", **words)
    assert driver.wait(29) == []
    assert Settled() in driver.wait(3)


def test_it_waits_too_for_whom_it_could_not_understand(driver):
    assert driver.machine.takes_nobody_to_be_before()
    driver.do(SomebodyWasBefore())
    assert not driver.machine.takes_nobody_to_be_before()
    assert driver.wait(29) == []


def test_once_it_has_granted_nobody_makes_it_wait(driver):
    driver.wait(13)
    driver.do(SomebodyWasBefore())
    driver.register("a", again=True)
    driver.ask("a", "rollout", 1, ["r0"])
    assert driver.holders("r0") == ["a"]


@pytest.fixture
def address():
    return f"ipc:///tmp/verl-mux-{uuid.uuid4().hex}"


@pytest.fixture
def context():
    with zmq.Context() as context:
        yield context


def test_it_is_sooner_the_first_time_only(serve, address):
    first = serve(bind=address, lease_timeout=LEASE_S)
    assert first.snapshot()["settling_s"] < LEASE_S / 2
    assert "no earlier coordinator at this address is known" in first.snapshot()["journal"]["lost"]
    first.stop()
    assert serve(bind=address, lease_timeout=LEASE_S).snapshot()["settling_s"] > LEASE_S / 2


def test_one_that_ended_while_nobody_held_anything_is_forgotten(serve, address, eventually):
    first = serve(bind=address, lease_timeout=1.1)
    eventually(lambda: first.snapshot()["settling_s"] is None)
    first.stop()
    assert serve(bind=address, lease_timeout=LEASE_S).snapshot()["settling_s"] < LEASE_S / 2


def test_a_message_of_a_job_that_nobody_knows_is_a_sign_of_another_before(serve, address, context):
    first = serve(bind=address, lease_timeout=LEASE_S)
    stranger = Stranger(context, address)
    _, seen = stranger.say()
    assert seen["settling_s"] < LEASE_S / 2
    stranger.say(m.Heartbeat(job="a", uid="a:1", client=stranger.identity, beat=1))
    assert first.snapshot()["settling_s"] > LEASE_S / 2
    stranger.dealer.close(linger=0)


def test_so_is_a_key_that_does_not_fit(serve, address, context, tmp_path, eventually):
    """As after the whole folder was deleted, with the keys that jobs hold."""
    from verl_mux.coordinator.bus import curve_keys as keys

    first = serve(bind=address, lease_timeout=LEASE_S)
    keys.make(tmp_path / "old")
    raw_dealer(context, address, directory=tmp_path / "old")
    eventually(lambda: first.snapshot()["settling_s"] > LEASE_S / 2)
    context.destroy(linger=0)
