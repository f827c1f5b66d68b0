"""Processor time of a run's processes, on real processes and on paper."""

import subprocess
import sys

import psutil
import pytest

from tests.launcher.made_run import ORIGIN, MadeRun
from verl_mux.coordinator.config import make_config
from verl_mux.launcher import cores, run_intervals
from verl_mux.launcher.cores import Account, Interval
from verl_mux.launcher.run_summary import summarise

BUSY = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass\nprint('done', flush=True); input()"


def test_processor_time_of_living_processes_is_counted_once(tmp_path):
    account = Account(tmp_path)
    account.look([])
    with subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "done\n"
        it = psutil.Process(process.pid)
        account.look([it])
        account.look([it])
        first, second = cores.read(tmp_path)
        process.communicate("\n")
    assert 0.3 <= first.cpu < 1.0 and second.cpu < 0.1
    account.look([it])  # it has ended
    assert cores.read(tmp_path)[2].cpu == 0


def test_a_process_that_one_look_missed_is_not_counted_from_its_start_again(tmp_path):
    account, it = Account(tmp_path), psutil.Process()
    account.look([it])
    account.look([])
    account.look([it])
    used = it.cpu_times()
    missed, again = cores.read(tmp_path)
    assert missed.cpu == 0 and again.cpu < (used.user + used.system) / 2


def test_a_folder_that_cannot_be_written_costs_figures_and_not_the_run(tmp_path):
    account = Account(tmp_path / "is not there")
    account.look([psutil.Process()])
    account.look([psutil.Process()])
    assert cores.read(tmp_path / "is not there") == []


def test_cores_of_a_window():
    intervals = [Interval(0, 10, 15.0), Interval(10, 20, 10.0)]
    assert cores.busy(intervals, [(5, 20)]) == pytest.approx((2.5 + 5 + 10) / 15)
    assert cores.busy(intervals, [(30, 40)]) is None


def test_a_run_tells_its_limit(tmp_path):
    made = MadeRun(tmp_path)
    made.steps("a", [10, 20, 30, 80, 92, 104])
    made.steps("b", [40, 52, 64, 84, 98, 112])
    start = ORIGIN.timestamp()
    intervals = [Interval(start + at, start + at + 1, 1.25 if at < 66 else 1.9) for at in range(120)]
    pools = {"rollout": {"nodes": [{"name": "r0", "cpus": [0]}]}, "train": {"nodes": [{"name": "t0", "cpus": [1]}]}}
    config = make_config({"pools": pools, "schedule": [{"mode": "sequential", "steps": 3}, {"mode": "interleaved"}]})
    mux = summarise(run_intervals.read(tmp_path, ["a", "b"]), config, ["a", "b"], 0, 0.0, intervals)["mux"]
    assert (mux["cores_alone"], mux["cores_mux"], mux["limit"]) == (1.25, 1.9, 1.6)


def test_what_is_printed_of_cores():
    mux = {"cores_alone": 1.25, "cores_mux": 1.9, "limit": 1.6, "throughput_ratio": 1.44}
    said = "cores busy: 1.25 alone, 1.90 together, so these cores allow about 1.60x: 90% of that"
    assert cores.sentences(mux) == [said]
    assert cores.sentences({**mux, "cores_alone": 1.5, "limit": 2 / 1.5, "throughput_ratio": None}) == [
        "cores busy: 1.50 alone, 1.90 together, so these cores allow about 1.33x",
    ]
    assert cores.sentences({**mux, "cores_mux": None}) == ["cores busy: not measured"]
