"""Room on a device is waited for, and all ranks of a group come to the same answer."""

import threading

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

from verl_mux.memory.room import on_all_ranks, refusal
from verl_mux.platform import device_ledger

MB = 1 << 20


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
    told = refusal("states", 41 * MB, 0.0, None, alone)
    assert told.startswith("no room to wake: states take 0.04 GB, 0.04 are free after 0 s; held by math (pid ")


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
    told = refusal("states", 137 * MB, 0.0, device, alone)
    assert told.endswith("held by GPU:0 process 7 uses 100.000 MB GPU memory")


def _rank(rank, store, answers):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    device = Cuda((100 if rank else 300) * MB)
    group = dist.group.WORLD
    both = [refusal("states", needed * MB, 0.1, device, lambda fits: on_all_ranks(group, fits)) for needed in (200, 10)]
    (answers / str(rank)).write_text(" | ".join(map(str, both)))
    dist.destroy_process_group()


def test_no_rank_maps_what_another_has_no_room_for(tmp_path):
    mp.start_processes(_rank, args=(str(tmp_path / "store"), tmp_path), nprocs=2, start_method="spawn")
    first, second = ((tmp_path / rank).read_text() for rank in "01")
    assert first.startswith("no room to wake: states take 0.21 GB, 0.31 are free") and first.endswith("| None")
    assert second.startswith("no room to wake: states take 0.21 GB, 0.10 are free") and second.endswith("| None")
