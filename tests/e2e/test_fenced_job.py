"""The coordinator stops answering for longer than a lease lasts: the job's memory sleeps, and it trains the same afterwards."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.e2e import tiny
from verl_mux.coordinator.command import fetch_status

pytestmark = pytest.mark.e2e

STEPS = 4
# A job fences itself after 0.7 of this without an answer. Nobody waits for its nodes, so it is never ended for its silence.
LEASE_S = 3.0
PHASES = {"rollout": "server", "train": "trainer"}  # and whose memory sleeps then
_LIMIT_S = 600


@pytest.fixture(scope="module")
def jobs(assets, tmp_path_factory) -> Path:
    """The same job twice, side by side: `fenced` under a coordinator that is stopped in both phases, `alone` under none."""
    directory = tmp_path_factory.mktemp("fenced")
    # Phases that last longer than the job's patience.
    slow = ["data.max_response_length=512", "actor_rollout_ref.actor.ppo_epochs=20"]
    keys = [*tiny.overrides(assets, STEPS), *slow, "+actor_rollout_ref.rollout.engine_kwargs.sglang.max_running_requests=8"]
    coordinator, address = _start_coordinator(directory)
    started = [tiny.start_job("fenced", keys, directory, address), tiny.start_job("alone", keys, directory, None)]
    try:
        for phase in PHASES:
            while phase not in _fenced_phases(directory):
                _stop_in(phase, coordinator, address, directory, started[0])
        for process in started:
            assert process.wait(_LIMIT_S) == 0, _logs(directory)
    finally:
        for process in (*started, coordinator):
            process.terminate()
            process.wait(60)
    return directory


def _start_coordinator(directory: Path) -> tuple[subprocess.Popen, str]:
    pools = {"rollout": {"nodes": [{"name": "r0", "cpus": [0]}]}, "train": {"nodes": [{"name": "t0", "cpus": [1]}]}}
    file = directory / "pools.yaml"
    file.write_text(yaml.safe_dump({"pools": pools, "lease_timeout": LEASE_S}))
    command = [sys.executable, "-m", "verl_mux", "coordinator", "--config", str(file), "--bind", "tcp://127.0.0.1:0"]
    log = directory / "coordinator.log"
    with log.open("w") as out:
        process = subprocess.Popen([*command, "--no-journal"], stdout=out, stderr=out)
    _wait_for(lambda: "tcp://" in log.read_text(), process, directory)
    return process, next(word for word in log.read_text().split() if word.startswith("tcp://"))


def _stop_in(phase: str, coordinator: subprocess.Popen, address: str, directory: Path, job: subprocess.Popen) -> None:
    """Nothing is answered from somewhere in the phase until its memory sleeps: by the job's own decision or, where the phase was
    just over, as always."""
    _wait_for(lambda: _phase(address) == phase, job, directory)
    stopped = time.time()
    coordinator.send_signal(signal.SIGSTOP)
    try:
        _wait_for(lambda: _since(stopped, directory, "sleep", PHASES[phase]), job, directory)
    finally:
        coordinator.send_signal(signal.SIGCONT)
    goes_on = ("lease_fenced", "lease_wait")
    _wait_for(lambda: any(_since(stopped, directory, event, "trainer") for event in goes_on), job, directory)


def _phase(address: str) -> str | None:
    """That of the job's lease after its init."""
    pools = fetch_status(address, timeout=30.0)["pools"].values()
    held = [holder["phase"] for pool in pools for node in pool["nodes"].values() for holder in node["holders"]]
    return held[0] if held else None


def _since(moment: float, directory: Path, event: str, role: str) -> bool:
    return any(e["event"] == event and tiny.ended(e) > moment for e in tiny.events(directory, "fenced", role))


def _fenced_phases(directory: Path) -> set[str]:
    return {e["extra"]["phase"] for e in tiny.events(directory, "fenced") if e["event"] == "lease_fenced"}


def _wait_for(condition: Callable[[], bool], process: subprocess.Popen, directory: Path) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, _logs(directory)
        time.sleep(0.1)


def _logs(directory: Path) -> str:
    return "\n".join(path.read_text()[-2000:] for path in directory.glob("*/job.log"))


@pytest.mark.parametrize("key", ["reward", "loss", "grad_norm", "response_length"])
def test_a_job_that_was_fenced_in_both_phases_trains_the_same_as_alone(jobs, key):
    figures = {job: [e["extra"][key] for e in tiny.events(jobs, job) if e["event"] == "step"] for job in ("fenced", "alone")}
    assert len(figures["alone"]) == STEPS
    assert figures["fenced"] == figures["alone"]
