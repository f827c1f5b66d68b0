"""What a process may rely on of the memory that it keeps over syncs."""

import os

from verl_mux.sync.region import Held


def test_stamps_are_of_memory_that_nobody_writes_to_and_go_with_it():
    held = Held()
    first = held.of(100)
    held.stamps = {0: b"it"}
    assert held.of(100) is first and held.stamps == {0: b"it"}
    assert held.take_stamps() == {0: b"it"} and held.stamps == {}
    held.stamps = {0: b"it"}
    assert held.of(200) is not first and held.stamps == {}
    held.close()


def test_memory_of_another_process_is_not_received_into():
    """Its owner relies on what is in it."""
    owner, reader = Held(), Held()
    theirs = owner.of(100)
    theirs.view[:2] = b"ab"
    reader.mapped(os.dup(theirs.fd), 100)
    mine = reader.of(100)
    mine.view[:2] = b"cd"
    assert bytes(theirs.view[:2]) == b"ab" and reader.of(100) is mine
    for held in (owner, reader):
        held.close()
