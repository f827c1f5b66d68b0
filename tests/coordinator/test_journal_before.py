"""What a coordinator that finds no journal can know of others that were at its address."""

import pytest

from verl_mux.coordinator import journal_files as before
from verl_mux.coordinator.journal_files import Before, arrive


@pytest.mark.parametrize("bind", ["tcp://127.0.0.1:0", "tcp://*:*"])
def test_an_address_that_the_system_chooses_is_known_to_nobody(bind):
    assert arrive(bind) is arrive(bind) is Before.NOBODY


@pytest.mark.parametrize("bind", ["tcp://127.0.0.1:5570", "ipc:///run/mux"])
def test_on_one_machine_it_is_known_who_was_there_until_that_is_forgotten(bind):
    assert [arrive(bind), arrive(bind)] == [Before.NOBODY_KNOWN, Before.PERHAPS]
    before.forget(bind)
    assert arrive(bind) is Before.NOBODY_KNOWN


def test_who_listened_everywhere_was_at_the_same_port_here_too():
    assert arrive("tcp://0.0.0.0:5570") is Before.PERHAPS
    assert arrive("tcp://127.0.0.1:5570") is Before.PERHAPS
    assert arrive("tcp://127.0.0.1:5571") is Before.NOBODY_KNOWN


def test_what_other_machines_reach_may_have_been_anybodys():
    assert arrive("tcp://10.0.0.1:5570") is Before.PERHAPS


def test_where_nothing_can_be_written_nothing_can_be_known(state_folder):
    (state_folder / "verl_mux").write_text("")
    assert arrive("tcp://127.0.0.1:5570") is Before.PERHAPS
