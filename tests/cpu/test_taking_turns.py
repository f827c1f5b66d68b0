"""Three engines on one device take turns, each a process of its own with what it would keep on a GPU: within the certificate's
bytes no engine is refused, and with less only the engine that asks is."""

import json
import os
import subprocess
import sys

import pytest

from tests.memory.certificate.models import QWEN25_7B, verl
from verl_mux.memory.certificate import device
from verl_mux.memory.certificate.certify import Capacity, certify
from verl_mux.memory.certificate.job import read_job
from verl_mux_cpu import device_ledger as ledger

NAMES = ("a", "b", "c")
ROUNDS = 20
GPU = 96 * 10**9
ENGINE = """
import json, sys
from verl_mux_cpu import device_ledger as ledger
awake, kept = json.loads(sys.argv[1])
for line in sys.stdin:
    word, answer = line.strip(), 'done'
    try:
        if word == 'start':
            ledger.charge(kept)
        else:
            ledger.reserve(awake if word == 'wake' else {})
    except ledger.DeviceFull as full:
        answer = str(full)
    print(answer, flush=True)
"""


def certificate(budget):
    jobs = [read_job(verl(name, {"tensor_model_parallel_size": 2}), QWEN25_7B) for name in NAMES]
    capacities = {("r0", "rollout"): Capacity(gpu=budget), ("t0", "train"): Capacity(gpu=budget)}
    return jobs, certify(jobs, capacities)


class Engine:
    def __init__(self, name, awake, kept, folder, budget):
        environment = {ledger.DIRECTORY_VARIABLE: str(folder), ledger.BUDGET_VARIABLE: str(budget), ledger.JOB_VARIABLE: name}
        environment |= {ledger.NODE_VARIABLE: "r0", ledger.DEVICE_VARIABLE: "0"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", ENGINE, json.dumps([awake, kept])], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **environment},
        )  # fmt: skip

    def ask(self, word):
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


@pytest.fixture
def engines(tmp_path, monkeypatch):
    """A function that starts one engine a job on a device of this budget; each knows what it maps awake."""
    started = []

    def start(budget):
        jobs, _ = certificate(GPU)
        for variable, value in ((ledger.DIRECTORY_VARIABLE, tmp_path), (ledger.BUDGET_VARIABLE, budget),
                                (ledger.NODE_VARIABLE, "r0"), (ledger.DEVICE_VARIABLE, 0)):  # fmt: skip
            monkeypatch.setenv(variable, str(value))
        for job in jobs:
            kept = device.kept(job, "rollout")
            awake = {kind: held for kind, held in device.rollout(job, GPU).items() if kind not in kept}
            started.append(Engine(job.name, awake, kept, tmp_path, budget))
        return started

    yield start
    for engine in started:
        engine.process.communicate()


def test_within_the_certificate_no_engine_is_refused_and_the_peak_is_what_it_says(engines):
    _, certified = certificate(GPU)
    total = certified.gpus["r0"].phases["rollout"].total
    started, peak = engines(total), 0
    assert certified.fits and [engine.ask("start") for engine in started] == ["done"] * 3
    for turn in range(ROUNDS):
        engine = started[turn % 3]
        assert engine.ask("wake") == "done"
        peak = max(peak, total - ledger.free())
        assert engine.ask("sleep") == "done"
    assert peak == pytest.approx(total, rel=0.05)


def test_with_a_tenth_less_the_certificate_says_no_and_only_the_engine_that_asks_is_refused(engines):
    _, certified = certificate(GPU)
    less = int(0.9 * certified.gpus["r0"].phases["rollout"].total)
    first, second, third = engines(less)
    assert [engine.ask("start") for engine in (first, second, third)] == ["done"] * 3
    refused = first.ask("wake")
    assert "out of memory on r0" in refused and f"b (pid {second.process.pid})" in refused
    # It is the same with a smaller device from the start, where an engine takes a share of what is there.
    assert not certificate_with_fixed_cache(less).fits
    assert second.ask("sleep") == third.ask("sleep") == "done"


def certificate_with_fixed_cache(budget):
    """Of engines whose KV cache is as large as on the whole device."""
    jobs, _ = certificate(GPU)
    tokens = (device.kv_cache(jobs[0], GPU) - device.request_table(jobs[0])) // device.kv_per_token(jobs[0])
    fixed = {"gpu_memory_utilization": 0.95, "engine_kwargs": {"sglang": {"max_total_tokens": tokens}}}
    jobs = [read_job(verl(name, {"tensor_model_parallel_size": 2, **fixed}), QWEN25_7B) for name in NAMES]
    return certify(jobs, {("r0", "rollout"): Capacity(gpu=budget), ("t0", "train"): Capacity(gpu=budget)})
