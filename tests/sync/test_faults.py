"""Whatever happens on the way: no rank takes wrong weights, each rank gets an error, and the next sync works.

Two hundred schedules of faults were tried (`python -m tests.sync.test_faults 200`); the suite tries some of them.
"""

from __future__ import annotations

import random
import sys
import time

import pytest

from tests.sync.cluster import Ends, Fault, FaultyLink, Model, model_of
from verl_mux.sync import receiving, sending
from verl_mux.sync.layout import SyncError

# Of a stall, and of all else: nothing but a stall may be noticed by the clock.
STALL_S, TIMEOUT_S = 0.5, 100.0
HARMLESS = ("late", "double")
KINDS = ("cut", "stall", "flip", *HARMLESS)


@pytest.fixture(autouse=True)
def short_last_call(monkeypatch):
    hurry(monkeypatch.setattr)


def hurry(put) -> None:
    for module in (sending, receiving):
        put(module, "LAST_CALL_S", 0.1)


def schedule(seed: int, **settings) -> str:
    """One sync with a fault on the way to one host, then one without. Returns what the fault was. `settings`: of the sync."""
    draw = random.Random(seed)
    machines = [f"host{draw.randrange(3)}" for _ in range(draw.randrange(1, 5))]
    senders = draw.randrange(1, 4)
    given = {"streams": draw.randrange(1, 3), **settings}
    ends = Ends(senders, machines, **given)
    before = model_of(seed, 12, 30_000)
    first, second = changed(before, draw), changed(before, draw)
    size = sum(map(len, first.values()))
    fault = Fault(draw.choice(KINDS), draw.randrange(2), draw.randrange(size // len(ends.senders) + 1))
    victim = draw.randrange(len(machines))
    link = FaultyLink(ends.workers[victim].meeting.address, fault)
    noted = f"seed {seed}: {fault} on the way to worker {victim} of {machines} from {len(ends.senders)}"
    try:
        ends.sync(0, before)
        ends.set(timeout_s=STALL_S if fault.kind == "stall" else TIMEOUT_S)
        ends.addresses[victim] = link.address
        ends.join()
        began = time.perf_counter()
        got, said = ends.sync(1, first)
        seconds = time.perf_counter() - began
        failed = [it for it in [*got, *said] if isinstance(it, SyncError)]
        assert all(isinstance(it, SyncError) or it == first for it in got), f"wrong weights, {noted}"
        assert all(isinstance(it, SyncError | dict) for it in said), f"{said}, {noted}"
        assert not failed or fault.kind not in HARMLESS, f"{failed}, {noted}"
        assert not failed or any(isinstance(it, SyncError) for it in said), noted
        assert seconds < TIMEOUT_S, f"{seconds:.1f} s, {noted}"
        ends.set(timeout_s=TIMEOUT_S)
        ends.addresses.clear()
        ends.join()
        got, said = ends.sync(2, second)
        assert all(it == second for it in got), f"the next sync: {got}, {noted}"
    finally:
        link.close()
        ends.close()
    return f"{fault.kind}{'' if failed else ', without effect'}"


def changed(model: Model, draw: random.Random) -> Model:
    """A third of the tensors wholly, a third by a byte."""
    found = {}
    for at, (name, data) in enumerate(model.items()):
        new = bytearray(draw.randbytes(len(data)) if at % 3 == 0 else data)
        if at % 3 == 1 and new:
            new[draw.randrange(len(new))] ^= 1
        found[name] = bytes(new)
    return found


@pytest.mark.parametrize("seed", range(16))
def test_a_fault_on_the_way_is_told_and_the_next_sync_works(seed):
    schedule(seed)


if __name__ == "__main__":
    hurry(setattr)
    for seed in range(*map(int, sys.argv[1:])):
        print(seed, schedule(seed), flush=True)
