"""What the state machine says is withheld until it is on disk."""

import pytest

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core.inputs_and_instructions import Input, Send
from verl_mux.coordinator.journal import Delivery, Journal
from verl_mux.coordinator.journal import delivery as delivery_module
from verl_mux.coordinator.journal_files import Before

WHO = {"job": "a", "uid": "a:1", "client": "a"}
REGISTER = m.Register(**WHO, host="h", pid=1, started=1, nodes={"rollout": ["r0"], "train": ["t0"]})
BEAT = m.Heartbeat(**WHO, beat=1)


def ask(key, phase="rollout", node="r0"):
    return m.LeaseRequest(**WHO, key=key, phase=phase, step=1, nodes=[node])


class World:
    """A journal, a machine and a delivery; what was told, and how often something was written."""

    def __init__(self, path, config, monkeypatch):
        self.journal = Journal(path)
        self.machine = self.journal.restore(config, "name", Before.NOBODY)
        self.told, self.later, self.fail = [], [], None
        self.delivery = Delivery(self.journal, self.machine, self.carry_out, self.later.append)
        self.writes = 0
        write = type(self.journal)._write

        def counted(journal, *arguments):
            self.writes += 1
            if self.fail:
                raise self.fail
            write(journal, *arguments)

        monkeypatch.setattr(type(self.journal), "_write", counted)
        monkeypatch.setattr("verl_mux.coordinator.journal._RETRY_S", 0.0)

    def carry_out(self, instruction):
        if isinstance(instruction, Send):
            self.told.append(instruction.message.__struct_config__.tag)

    def take(self, what):
        keep = self.machine.changes(given := Input(1.0, what))
        self.delivery.take(given, self.machine.handle(given), keep)


@pytest.fixture
def world(make, tmp_path, monkeypatch):
    world = World(tmp_path / "journal", make(), monkeypatch)
    yield world
    world.journal.close()


def test_nothing_is_told_before_it_is_written_and_what_came_together_is_one_write(world):
    for what in (REGISTER, BEAT, ask("k")):
        world.take(what)
    assert (world.told, world.writes, len(world.later)) == ([], 0, 1)
    world.later.pop()()
    assert (world.told, world.writes) == (["REGISTERED", "HEARTBEAT_ACK", "LEASE_GRANT"], 1)


def test_a_sign_of_life_is_answered_without_a_write(world):
    world.take(REGISTER)
    world.later.pop()()
    world.take(BEAT)
    assert (world.told[-1], world.writes, world.later) == ("HEARTBEAT_ACK", 1, [])


def test_what_is_for_people_waits_for_the_next_write_in_its_place(world, make, tmp_path):
    world.take(REGISTER)
    world.later.pop()()
    world.take(m.PhaseNote(**WHO, note="sync"))
    assert (world.writes, world.later) == (1, [])
    world.delivery.flush()
    assert world.writes == 2
    world.journal.close()
    again = Journal(tmp_path / "journal")
    assert again.restore(make(), "name", Before.NOBODY).state.jobs["a"].note == "sync"
    again.close()


def test_a_flood_without_a_pause_is_written_all_the_same(world, monkeypatch):
    monkeypatch.setattr(delivery_module, "MOST_TOGETHER", 3)
    for what in (REGISTER, ask("k"), ask("l", "train", "t0")):
        world.take(what)
    assert world.told == ["REGISTERED", "LEASE_GRANT", "LEASE_GRANT"]


def test_while_nothing_can_be_written_grants_wait_and_signs_of_life_are_answered(world, caplog, make, tmp_path):
    world.take(REGISTER)
    world.later.pop()()
    world.fail = OSError(28, "No space left on device")
    for _ in range(3):
        world.take(ask("k"))  # the client asks again every second
        world.later.pop()()
    world.take(BEAT)
    assert world.told == ["REGISTERED", "HEARTBEAT_ACK"]
    assert world.journal.about()["blocked"] == "No space left on device"
    assert [record.message for record in caplog.records] == [
        f"journal {tmp_path / 'journal'} cannot be written (No space left on device): nothing is granted until it can"
    ]
    world.fail = None
    world.delivery.flush()
    assert world.told == ["REGISTERED", "HEARTBEAT_ACK", "LEASE_GRANT"]
    assert world.journal.about()["blocked"] is None
    world.journal.close()
    again = Journal(tmp_path / "journal")
    assert [lease.key for lease in again.restore(make(), "name", Before.NOBODY).state.leases.values()] == ["k"]
    again.close()
