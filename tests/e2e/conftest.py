"""One multiplexed run of real jobs for all tests here, submitted to one standing Ray cluster: the coordinator is killed, then one
job in its rollout, which the launcher starts again; the coordinator falls silent for longer than a lease lasts; the job is killed
again, in training, then the launcher.

Then two colocated jobs on one node. Never more than two jobs at once: each is a dozen processes and several GiB.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from bench.coordinator_process import CoordinatorProcess
from tests.e2e import tiny
from tests.e2e.standing import standing_cluster
from verl_mux.coordinator.bus.members import UID_VARIABLE
from verl_mux.coordinator.commands import fetch_status
from verl_mux.launcher.marked_process import read_note

# `stays` is interrupted when all is seen. It writes a checkpoint every so many steps.
STEPS, SAVED = 400, 4
# A job fences itself after 0.7 of this without an answer; its memory then sleeps: whose, by phase.
LEASE_S, FENCED = 3.0, {"rollout": "server", "train": "trainer"}
# A rollout that lasts longer than a job goes on without its coordinator's answer.
LONG_ROLLOUT = ["data.max_response_length=192", tiny.at_once(4)]
# Tail rounds, by windows of which a resume begins in the middle.
DEFERRED = ["mux.rollout.tail=defer"]
# Fewer requests run at once than are launched, so that some still wait or run when enough prompt groups are complete.
OVERSAMPLED = ["mux.rollout.oversample.rate=0.5", tiny.at_once(8)]
# Steps of the job of verl's own streaming trainer, and how many prompt groups are enough for one of them.
STREAMED, ENOUGH = 4, 2
# Of two jobs on one node, one with rollout control. A segment takes long enough that an abort finds somebody in the engine.
CONTROLLED_STEPS, SEGMENT, LONGEST, VALIDATED = 5, 48, 96, 4
_LIMIT_S = 600
# The time that Ray has to end what is a job's when its driver has ended.
_ENDED_S = 20.0


@dataclass
class Run:
    """`killed[phase]`: when `rolls` was killed in it, and when some process of it was last seen alive; `coordinator_killed`: when
    that was. Seconds since the epoch. `left`: what its jobs have in the Ray cluster when all have ended."""

    directory: Path
    returncode: int = -1
    log: str = ""
    killed: dict[str, tuple[float, float]] = field(default_factory=dict)
    left: dict[str, list[str]] = field(default_factory=dict)
    coordinator_killed: float = 0.0


@pytest.fixture(scope="session")
def assets(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("assets")
    tiny.make_assets(directory)
    return directory


@pytest.fixture(scope="session")
def run(assets, tmp_path_factory, request) -> Run:
    """`stays` and `rolls` start together; the coordinator is killed, then `rolls` in a rollout; while it starts up again, `stays`
    hears nothing in a phase of each kind; `rolls` is killed in a training phase, then the launcher. A second one takes `stays`
    up, while the next test's job starts.

    `rolls` over-samples: what is cut off goes on in its next step, after its kills too.
    """
    directory = tmp_path_factory.mktemp("run")
    out = directory / "out"
    checkpoints = [f"trainer.save_freq={SAVED}", "trainer.max_actor_ckpt_to_keep=100"]
    slowly = [f"reward.custom_reward_function.path={assets}/slow_reward.py", *LONG_ROLLOUT, *DEFERRED]
    slowly += ["actor_rollout_ref.model.external_lib=slow_loss", "actor_rollout_ref.actor.policy_loss.loss_mode=slow"]
    # The phase in which a job is killed lasts longer than Ray takes to end its workers, a second or two, and than it takes to ask
    # the coordinator whether it still lasts.
    restarts = [*tiny.overrides(assets, STEPS), OVERSAMPLED[0], *LONG_ROLLOUT, "trainer.save_freq=1"]
    restarts += ["actor_rollout_ref.actor.ppo_epochs=8"]
    restarts += ["data.max_response_length=512", "trainer.max_actor_ckpt_to_keep=2"]
    jobs = {"stays": [*tiny.overrides(assets, STEPS), *checkpoints, *slowly], "rolls": restarts}
    jobs = {name: [*keys, "mux.launch.warm=true"] for name, keys in jobs.items()}
    path = os.pathsep.join(filter(None, (str(assets), os.environ.get("PYTHONPATH"))))
    file = tiny.run_file(directory / "run.yaml", out, jobs, {"PYTHONPATH": path}, restarts={"rolls": 1}, lease_timeout=LEASE_S)
    result = Run(out)
    with standing_cluster(tiny.ENVIRONMENT) as cluster, (directory / "log").open("w") as log:
        command = [sys.executable, "-m", "verl_mux", "run", str(file), "--submit", cluster.url]
        environment = {**os.environ, **cluster.environment}
        runner = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            for job in jobs:
                _until(lambda job=job: _since(0.0, out, job, "step"), runner)
            result.coordinator_killed = time.time()
            os.kill(read_note(out / "coordinator").pid, signal.SIGKILL)
            # What the new coordinator says of it is true when it has heard it.
            _until(lambda: _since(result.coordinator_killed, out, "rolls", "lease_wait"), runner)
            result.killed["rollout"] = _kill_in(runner, out, "rolls", "rollout")
            checkpoint = out / "stays" / "checkpoints" / f"global_step_{SAVED}"
            _until(checkpoint.exists, runner)
            for phase in FENCED:
                _fence_in(runner, out, "stays", phase)
            _until(lambda: _since(result.killed["rollout"][1], out, "rolls", "step"), runner)
            result.killed["train"] = _kill_in(runner, out, "rolls", "train")
            request.getfixturevalue("streaming")
            _until(lambda: _since(result.killed["train"][1], out, "stays", "step"), runner, 60)
            runner.kill()
            runner.wait()
            runner = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            _until(lambda: "job stays runs" in (directory / "log").read_text(), runner, 60)
            taken_up = time.time()
            _until(lambda: _since(taken_up, out, "stays", "step"), runner, 60)
        finally:
            if runner.poll() is None:
                runner.send_signal(signal.SIGINT)
            result.returncode = runner.wait(120)
        result.left = cluster.left_after(_ENDED_S)
    result.log = (directory / "log").read_text()
    return result


@pytest.fixture(scope="session")
def streaming(assets, tmp_path_factory) -> Iterator[tuple[Path, subprocess.Popen]]:
    """A job of verl's own trainer with the training trigger, started and not waited for: two that start up side by side take
    less time than one after the other."""
    directory = tmp_path_factory.mktemp("streaming")
    keys = [
        "actor_rollout_ref.rollout.nnodes=0",
        f"mux.rollout.trigger.n_min={ENOUGH}",
        "mux.rollout.trigger.t_max_s=30",
        # Any policy is below: both thresholds double after the first step.
        "mux.rollout.trigger.entropy=[1000,2000]",
    ]
    process = tiny.start_job("job", tiny.overrides(assets, STREAMED, mode="colocate_async"), directory, None, *keys)
    yield directory, process
    process.kill()


@pytest.fixture(scope="session")
def controlling(assets, tmp_path_factory) -> Iterator[tuple[Path, dict[str, subprocess.Popen]]]:
    """Two colocated jobs that share the only node, under one coordinator, started and not waited for: all four of their phases
    take turns. Both train LoRA: `plain`, whose engine serves the adapter, has nothing else switched on. `job`, for whose rollout
    it is merged, over-samples and generates in segments: a step takes 4 of at least 6 groups under way, a segment at a time."""
    directory = tmp_path_factory.mktemp("rollout")
    lora = "actor_rollout_ref.model.lora_rank=4"
    keys = {
        "plain": [lora, "actor_rollout_ref.rollout.calculate_log_probs=true", "actor_rollout_ref.actor.optim.lr=1e-1"],
        "job": [
            *OVERSAMPLED,
            lora,
            "actor_rollout_ref.model.lora.merge=true",
            "mux.profile.texts=0.5",
            f"data.max_response_length={LONGEST}",
            f"mux.rollout.segments.segment_length={SEGMENT}",
            "mux.rollout.segments.treatment=mask",
            f"data.val_max_samples={VALIDATED}",
            f"trainer.test_freq={CONTROLLED_STEPS}",
            f"trainer.save_freq={CONTROLLED_STEPS}",
        ],
    }
    pools = {"gpus": {"nodes": [{"name": "n0"}]}}
    with CoordinatorProcess({"pools": pools}, directory / "coordinator") as coordinator:
        overrides = tiny.overrides(assets, CONTROLLED_STEPS, mode="mux_colocate")
        nodes = ["mux.nodes.rollout=[n0]", "mux.nodes.train=[n0]"]
        processes = {
            name: tiny.start_job(name, overrides, directory, coordinator.address, *more, *nodes) for name, more in keys.items()
        }
        yield directory, processes
        for process in processes.values():
            process.kill()


@pytest.fixture(scope="session")
def controlled(controlling) -> Path:
    """The folder of these jobs and of their coordinator's log when both have finished."""
    directory, processes = controlling
    for name, process in processes.items():
        assert process.wait(_LIMIT_S) == 0, (directory / name / "job.log").read_text()[-3000:]
    return directory


def _address(directory: Path) -> str:
    return (directory / "coordinator" / "address").read_text().strip()


def _kill_in(process: subprocess.Popen, directory: Path, job: str, phase: str) -> tuple[float, float]:
    """kill -9 of the job's driver while it holds a lease of `phase`, after the first steps of it and of `stays`.

    It is stopped for a second look, as the phase may have ended since the first, and for a third, since the coordinator may have
    answered the second before it read what the driver had sent.
    """
    deadline = time.monotonic() + _LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        address = directory / "coordinator" / "address"
        if address.exists():
            state = fetch_status(_address(directory), timeout=30.0)
            holds = _phases(state, job)
            # A job that is still starting up could not go on at once.
            under_way = all(state["jobs"].get(name, {}).get("steps_done", 0) >= 1 for name in ("stays", job))
            if phase in holds and under_way:
                driver = psutil.Process(state["jobs"][job]["pid"])
                driver.suspend()
                try:
                    looks = [_phases(fetch_status(_address(directory), timeout=30.0), job) for _ in range(2)]
                    if all(phase in look for look in looks):
                        return _kill(driver)
                finally:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        driver.resume()
        time.sleep(0.05)
    raise AssertionError(f"{job} never held a {phase} lease after its first step")


def _fence_in(runner: subprocess.Popen, directory: Path, job: str, phase: str) -> None:
    """The coordinator answers nobody, from somewhere in such a phase of the job until its memory sleeps; again and again until
    the job decided so by itself, since the phase may be just over."""
    coordinator = read_note(directory / "coordinator").pid
    while phase not in fenced(directory, job):
        _until(lambda: phase in _phases(fetch_status(_address(directory), timeout=30.0), job), runner)
        stopped = time.time()
        os.kill(coordinator, signal.SIGSTOP)
        try:
            _until(lambda since=stopped: _since(since, directory, job, "sleep", FENCED[phase]), runner)
        finally:
            os.kill(coordinator, signal.SIGCONT)
        _until(lambda since=stopped: _since(since, directory, job, "lease_wait"), runner)


def fenced(directory: Path, job: str) -> dict[str, int]:
    """By phase: the first step after its first checkpoint in which the job fenced itself in it."""
    found = [(e["step"], e["extra"]["phase"]) for e in tiny.events(directory, job) if e["event"] == "lease_fenced"]
    return {phase: step for step, phase in sorted(found, reverse=True) if step > SAVED}


def _since(moment: float, directory: Path, job: str, event: str, role: str = "trainer") -> bool:
    """Whether an event of the job has ended after this moment."""
    return any(e["event"] == event and tiny.ended(e) > moment for e in tiny.events(directory, job, role))


def _until(condition: Callable[[], bool], runner: subprocess.Popen, seconds: float = _LIMIT_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert runner.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)


def _phases(state: dict, job: str) -> set[str]:
    """Of which the job holds leases."""
    nodes = [node for pool in state["pools"].values() for node in pool["nodes"].values()]
    return {holder["phase"] for node in nodes for holder in node["holders"] if holder["job"] == job}


def _kill(driver: psutil.Process) -> tuple[float, float]:
    """SIGKILL to the process that the user started; returns when, and when some process of the job was still alive."""
    ancestors = [p for p in (driver, *driver.parents()) if "verl.trainer.main_ppo" in " ".join(p.cmdline())]
    target = ancestors[-1] if ancestors else driver
    uid = driver.environ()[UID_VARIABLE]
    when = last_seen = time.time()
    target.kill()
    with contextlib.suppress(psutil.NoSuchProcess):
        driver.resume()  # it is to notice that it lost its parent
    while True:
        looked = time.time()
        if not _alive(uid):
            return when, last_seen
        last_seen = looked  # whatever was found alive after this moment was alive in it


def _alive(uid: str) -> bool:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            marked = process.environ().get(UID_VARIABLE) == uid and process.pid != os.getpid()
            if marked and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False
