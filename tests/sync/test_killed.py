"""Ends in processes of their own, of which one is killed or stopped in the middle of a sync: the others are told, by name."""

from __future__ import annotations

import signal

import msgspec
import pytest

from bench.sync.group import Group
from tests.sync.cluster import Fault, FaultyLink
from verl_mux.errors import Failure

# More than the sockets' buffers hold: who is met still has something to send.
MODEL = 64 << 20
# Trainer ranks 0 and 1, then workers 0 to 2.
NAMES = ("trainer rank 0", "trainer rank 1", "rollout worker 0 on a", "rollout worker 1 on a", "rollout worker 2 on b")


@pytest.fixture
def group():
    settings = {"piece_bytes": 1 << 18, "streams": 2, "timeout_s": 4.0}
    trainers = [([], "trainers", "127.0.0.1")] * 2
    workers = [([], host, "127.0.0.1") for host in "aab"]
    with Group.of(trainers, workers, MODEL, [0.5, 0.5], settings) as made:
        yield made


def sync_with_a_stall(group: Group, victim: int, what: signal.Signals) -> str:
    """Nothing moves towards worker 0 any more; then the victim gets the signal. Returns what the others say."""
    link = FaultyLink(group.meetings[2].address, Fault("stall", None, MODEL // 64))
    straight = list(group.meetings)
    group.meetings[2] = msgspec.structs.replace(straight[2], address=link.address)
    try:
        group.begin("two_stage", 1)
        assert link.reached.wait(60.0)
        group.processes[victim].process.send_signal(what)
        link.unstall.set()
        with pytest.raises(Failure) as failure:
            group.answers(without=[victim] if what == signal.SIGSTOP else [])
    finally:
        group.processes[victim].process.send_signal(signal.SIGCONT)
        group.meetings[:] = straight
        link.close()
    return str(failure.value)


@pytest.mark.parametrize("victim", [1, 2, 4])
def test_who_is_killed_is_named_to_all_that_need_it(group, victim):
    told = sync_with_a_stall(group, victim, signal.SIGKILL)
    assert f"{NAMES[victim]}" in told and ("is gone" in told or "did not come" in told)


def test_who_stands_still_is_named_and_the_next_sync_works(group):
    told = sync_with_a_stall(group, 1, signal.SIGSTOP)
    assert "trainer rank 1 on trainers stands still: nothing moved for 4 s" in told
    with pytest.raises(Failure):
        group.processes[1].answer()  # it goes on, and hears that it is over
    assert group.sync("two_stage", 2)["bit_equal"]
