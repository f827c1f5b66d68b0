"""Telling weights from other traffic by what interfaces count; and one sync between the bed's hosts, by their own counters."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bench.sync.group import Group
from tests.hosts.conftest import NAME
from tests.hosts.interfaces import EVERY_S, Counters, Sync, bytes_received, copies, read, summary, weights_bytes, whole_lines

MODEL = 10_000_000


def counting(rate: float, bursts: dict[float, int], seconds: float = 4.0) -> Counters:
    """`rate` bytes a second all the time, and bursts just before some moments."""
    times = [at * EVERY_S for at in range(round(seconds / EVERY_S))]
    return Counters(times, [round(rate * now + sum(n for when, n in bursts.items() if when <= now)) for now in times])


def test_what_comes_in_between_two_looks_is_a_part_of_the_sync_between_them():
    counters = counting(0.0, {1.99: 70, 2.0: 5, 2.05: MODEL, 2.13: 6, 2.15: 80})
    assert counters.between(2.01, 2.11)[0] == MODEL
    assert counters.between(1.99, 2.14) == (MODEL + 70 + 5 + 6, pytest.approx(0.16))


def test_the_busier_of_the_times_beside_bounds_what_is_no_weights():
    counters = counting(1e6, {2.05: MODEL, 2.5: 500_000})
    nbytes, idle = counters.of(2.01, 2.11)
    assert idle == pytest.approx(2e6 * 0.12, rel=0.1) and nbytes == pytest.approx(MODEL + 1e6 * 0.12)


def test_a_sync_without_looks_around_it_is_none():
    with pytest.raises(ValueError, match="not looked at"):
        counting(0.0, {}).between(3.5, 5.0)


def test_each_host_with_no_trainer_is_asked_for_itself_and_all_of_them_together():
    """Half of b's model comes from a rank of its own, over no interface."""
    counters = {"a": counting(1e6, {2.05: MODEL}), "b": counting(0.0, {2.06: MODEL // 2})}
    sync = Sync(3, 2.01, 2.11, MODEL, 1.5 * MODEL)
    (found,) = copies([sync], counters, ["a", "b"], ["b", "c"])
    assert found["version"] == 3 and list(found["copies"]) == ["a"]
    assert found["copies"]["a"]["counted"] == pytest.approx(1.012)
    assert found["copies"]["a"]["less_idle"] == pytest.approx(1.0, abs=0.001)
    assert found["over_sent"]["less_idle"] == pytest.approx(1.0, abs=0.001)


def test_a_second_copy_shows():
    counters = {"a": counting(0.0, {2.05: MODEL, 2.1: MODEL})}
    found = summary(copies([Sync(0, 2.01, 2.11, MODEL, MODEL)], counters, ["a"], []))
    assert found["copies"]["less_idle"] == found["over_sent"]["most_less_idle"] == 2.0


def test_an_event_of_the_log_is_a_sync():
    extra = {"version": 2, "slow_bytes": 8.0, "fast_bytes": 1.0}
    assert Sync.of({"duration_sec": 0.5, "extra": extra}, 7.0, 10) == Sync(2, 6.5, 7.0, 10, 9.0)


def test_what_a_file_of_weights_holds_is_told_without_its_header(tmp_path):
    weights = {"a": torch.zeros(3, 5), "b": torch.zeros(7, dtype=torch.bfloat16)}
    save_file(weights, tmp_path / "model.safetensors")
    assert weights_bytes(tmp_path / "model.safetensors") == 3 * 5 * 4 + 7 * 2


def test_the_kernels_table_is_read():
    table = "Inter-|   Receive\n face |bytes packets\n    lo: 5 1 0\n  eth0:1234    7 0 0\n"
    assert bytes_received(table) == 1234


@pytest.mark.e2e
def test_a_sync_brings_every_byte_to_each_host_once(bed, tmp_path):
    """The product's ends: two trainer ranks, and three workers on two hosts, one of which has a rank too."""
    file, names, trainers = tmp_path / "interfaces.jsonl", ("hosta", "hostb"), ("hostb", "hostc")
    at = {name: (bed.enter(name), name, host.address) for name, host in bed.hosts().items()}
    workers = [at["hosta"], at["hosta"], at["hostb"]]
    settings = {"piece_bytes": 1 << 20, "streams": 2, "timeout_s": 60.0}
    recorder = subprocess.Popen([sys.executable, "-m", "tests.hosts.interfaces", str(file), NAME])
    try:
        with Group.of([at[name] for name in trainers], workers, MODEL, [0.5, 0.5], settings) as group:
            _wait_until(file, 0.0)  # it has begun
            _wait_until(file, time.time() + 1)
            began = group.begin("two_stage", 1)
            told = group.answers()
        ended = max(it["ended"] for it in told)
        _wait_until(file, ended + 1)
    finally:
        recorder.kill()
        recorder.wait()
    between = sum(it.get("slow_bytes", 0.0) + it.get("fast_bytes", 0.0) for it in told)
    (found,) = copies([Sync(1, began, ended, MODEL, between)], read(file), names, trainers)
    assert between == pytest.approx(1.5 * MODEL, rel=0.001)
    assert found["copies"]["hosta"]["counted"] >= 1.0 and found["copies"]["hosta"]["less_idle"] < 1.02
    assert found["over_sent"]["counted"] >= 1.0 and found["over_sent"]["less_idle"] < 1.02


def _wait_until(file: Path, when: float) -> None:
    """A look later than that is in the file."""
    deadline = time.monotonic() + 30
    while not file.exists() or max((json.loads(line)["time"] for line in whole_lines(file)[-1:]), default=-1.0) < when:
        assert time.monotonic() < deadline, "the interfaces are not looked at"
        time.sleep(0.05)
