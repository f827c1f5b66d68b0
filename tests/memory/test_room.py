"""Room on a device is waited for, and all ranks of a group come to the same answer; workers of one process sleep and wake by
themselves, and what stays on their device is reported, and refused, of all together."""

import threading

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from verl_mux.errors import Failure
from verl_mux.memory.room import Residents, on_all_ranks, refusal
from verl_mux.memory.tags import Moved
from verl_mux_cpu import device_ledger

MB, GB = 1 << 20, 10**9


@pytest.fixture
def ledger(monkeypatch, tmp_path):
    """A device of host memory with a budget; returns what sets its size."""
    monkeypatch.setenv(device_ledger.DIRECTORY_VARIABLE, str(tmp_path))
    for name in ("_tags", "_charges"):
        monkeypatch.setattr(device_ledger, name, {})
    return lambda size: monkeypatch.setenv(device_ledger.BUDGET_VARIABLE, str(size))


def alone(true_here):
    return true_here


def test_without_a_budget_there_is_room_for_anything(monkeypatch):
    monkeypatch.delenv(device_ledger.BUDGET_VARIABLE, raising=False)
    assert refusal("states", 1 << 60, 0.0, None, alone) is None


def test_what_is_too_large_is_refused_with_who_holds_what(ledger, monkeypatch):
    monkeypatch.setenv(device_ledger.JOB_VARIABLE, "math")
    ledger(100 * MB)
    device_ledger.hold({"weights": 60 * MB})
    assert refusal("states", 40 * MB, 0.0, None, alone) is None
    message = refusal("states", 41 * MB, 0.0, None, alone)
    assert message.startswith("no room to wake: states take 0.04 GB, 0.04 are free after 0 s; held by math (pid ")


def test_room_that_comes_meanwhile_is_taken(ledger):
    ledger(100 * MB)
    device_ledger.hold({"weights": 60 * MB})
    asked = threading.Event()
    leaves = threading.Thread(target=lambda: asked.wait(60) and device_ledger.hold({}))
    leaves.start()

    def looked(true_here):
        asked.set()
        return true_here

    assert refusal("states", 80 * MB, 60.0, None, looked) is None
    leaves.join()


class Cuda:
    """As torch.cuda, with some bytes free."""

    def __init__(self, free):
        self.free, self.emptied = free, 0

    def empty_cache(self):
        self.emptied += 1

    def mem_get_info(self):
        return self.free, 1 << 40

    def list_gpu_processes(self):
        return "GPU:0\nprocess      7 uses      100.000 MB GPU memory"


def test_on_cuda_cached_memory_counts_as_free_and_the_driver_rounds_up():
    device = Cuda(200 * MB)
    assert refusal("states", 136 * MB, 0.0, device, alone) is None and device.emptied == 1
    message = refusal("states", 137 * MB, 0.0, device, alone)
    assert message.endswith("held by GPU:0 process 7 uses 100.000 MB GPU memory")


def _rank(rank, store, answers):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    device = Cuda((100 if rank else 300) * MB)
    group = dist.group.WORLD
    both = [refusal("states", needed * MB, 0.1, device, lambda fits: on_all_ranks(group, fits)) for needed in (200, 10)]
    (answers / str(rank)).write_text(" | ".join(map(str, both)))
    dist.destroy_process_group()


def test_no_rank_maps_what_another_has_no_room_for(tmp_path):
    mp.start_processes(_rank, args=(str(tmp_path / "store"), tmp_path), nprocs=2, start_method="forkserver")
    first, second = ((tmp_path / rank).read_text() for rank in "01")
    assert first.startswith("no room to wake: states take 0.21 GB, 0.31 are free") and first.endswith("| None")
    assert second.startswith("no room to wake: states take 0.21 GB, 0.10 are free") and second.endswith("| None")


# ---------------------------------------------------------------- workers of one process


class Device:
    """A GPU of which this process holds `held` bytes and others nothing."""

    def __init__(self, size=80 * GB):
        self.size, self.held = size, 0

    def memory_allocated(self):
        return self.held

    def mem_get_info(self):
        return self.size - self.held, self.size

    def empty_cache(self):
        pass

    def list_gpu_processes(self):
        return "process 7 uses 9 MB"


class States:
    """So many bytes on a device; `stays`: of these, what does not leave. `room`: how much of the device is there for them."""

    def __init__(self, device, size, stays=0, room=1 << 60):
        self.device, self.size, self.stays, self.room = device, size, stays, room
        self.here = size
        device.held += size

    def sleep(self):
        moved = max(self.here - self.stays, 0)
        self.here -= moved
        self.device.held -= moved
        return {"params": Moved(moved, 0, 0.1)}

    def wake(self):
        if self.size > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Process 9 has 70 GiB in use")
        moved = self.size - self.here
        self.here += moved
        self.device.held += moved
        return {"params": Moved(moved, moved, 0.1)}


@pytest.fixture
def residents():
    made = Residents()
    made.arrived("actor")
    return made


def test_what_stays_of_a_process_is_measured_when_its_last_worker_sleeps(residents):
    device = Device()
    residents.arrived("critic")
    actor, critic = States(device, 10 * GB), States(device, 10 * GB, stays=GB // 2)
    assert residents.sleep("actor", [actor], device)["params"].mapped == 0  # the critic's bytes are unknown
    assert residents.sleep("critic", [critic], device)["params"] == Moved(19 * GB // 2, GB // 2, 0.1)
    assert residents.sleep("critic", [critic], device)["params"] == Moved(0, GB // 2, 0.1)


@pytest.mark.parametrize("stays", [[0, 2 * GB], [2 * GB, 0]])
def test_a_process_of_which_more_than_edges_stays_does_not_say_that_it_sleeps(residents, stays):
    device = Device()
    states = [States(device, 10 * GB, stays=left) for left in stays]
    with pytest.raises(Failure, match=r"sleep, but 2.00 of 20.00 GB did not leave the device"):
        residents.sleep("actor", states, device)


def test_workspaces_of_libraries_may_stay_of_a_small_model(residents):
    device = Device()
    assert residents.sleep("actor", [States(device, GB // 2, stays=GB // 5)], device)["params"].mapped == GB // 5
    with pytest.raises(Failure, match="did not leave"):
        residents.sleep("actor", [States(device, GB, stays=GB // 3)], device)


def test_on_host_memory_each_tag_says_what_stayed(residents):
    class Shared:
        def sleep(self):
            return {"params": Moved(80, 20, 0.1), "optimizer": Moved(100, 0, 0.1)}

    with pytest.raises(Failure, match="did not leave"):
        residents.sleep("actor", [Shared()], None)


def test_a_wake_without_room_maps_nothing_and_says_who_holds_what(residents):
    device = Device()
    states = States(device, 10 * GB)
    residents.sleep("actor", [states], device)
    device.size = 9 * GB
    with pytest.raises(Failure, match=r"the actor's states take 10.00 GB, 9.00 are free after 0 s; held by process 7 uses 9 MB"):
        residents.wake("actor", [states], device)
    assert device.held == 0
    device.size = 11 * GB
    assert residents.wake("actor", [states], device)["params"].nbytes == 10 * GB


def test_room_that_goes_while_it_wakes_takes_back_what_was_mapped(residents):
    device = Device()
    states = [States(device, 10 * GB), States(device, 5 * GB, room=4 * GB)]
    residents.sleep("actor", states, device)
    with pytest.raises(Failure, match=r"no room to wake the actor's states: CUDA out of memory. Process 9 has"):
        residents.wake("actor", states, device)
    assert device.held == 0
    states[1].room = 6 * GB
    assert residents.wake("actor", states, device)["params"].nbytes == 15 * GB
