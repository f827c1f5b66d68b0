"""Jobs come to one standing Ray cluster and are stopped and killed there, in random orders: what is left of them, and the others?

python -m tests.e2e.orders FOLDER ORDERS [SEED]: each order submits two or three tiny jobs to Ray's job server, one after another
at random moments, lets some end, stops some as `ray job stop` does and kills the driver of some, at random moments too. It prints
a line of JSON for each order, and ends with 1 where a job that was let alone did not do its steps, or where a job left an actor,
a placement group, a process or shared memory.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil

from bench.coordinator_process import CoordinatorProcess
from tests.e2e import tiny
from tests.e2e.standing import Standing, standing_cluster
from verl_mux.coordinator.bus.members import UID_VARIABLE, carriers

STEPS, LIMIT_S, ENDED_S = 3, 400.0, 30.0
FATES = ("ends", "ends", "stopped", "killed")
# When a job is submitted after the one before, and when its fate comes after that: in half a minute it comes to its first step.
APART_S, FATE_S = 15.0, 45.0


class Job:
    def __init__(self, name: str, fate: str, at: float, order: random.Random) -> None:
        self.name, self.fate, self.submit_at, self.uid = name, fate, at, uuid4().hex
        self.fate_at = at + order.uniform(0.5, FATE_S)
        self.id = f"{name}-{self.uid[:8]}"


def play(order: random.Random, folder: Path, assets: Path, cluster: Standing, client: Any, address: str) -> dict[str, Any]:
    """One order. Returns what was done and `wrong`, a line for each thing that is."""
    jobs, at = [], 0.0
    for name in ("a", "b", "c")[: order.choice((2, 2, 3))]:
        jobs.append(Job(name, order.choice(FATES), at, order))
        at += order.uniform(0.0, APART_S)
    if not any(job.fate == "ends" for job in jobs):
        order.choice(jobs).fate = "ends"
    shared, began = shared_memory(), time.monotonic()
    waiting, unmet = list(jobs), [job for job in jobs if job.fate != "ends"]
    while waiting or unmet:
        now = time.monotonic() - began
        for job in [job for job in waiting if now >= job.submit_at]:
            waiting.remove(job)
            submit(job, folder, assets, client, address)
        for job in [job for job in unmet if now >= job.fate_at]:
            unmet.remove(job)
            if job.fate == "stopped":
                client.stop_job(job.id)
            else:
                kill_driver(job)
        time.sleep(0.1)
    deadline = time.monotonic() + LIMIT_S
    while not all(client.get_job_status(job.id).is_terminal() for job in jobs) and time.monotonic() < deadline:
        time.sleep(0.5)
    wrong = []
    for job in jobs:
        status, steps = (
            client.get_job_status(job.id).value,
            [e["step"] for e in tiny.events(folder, job.name) if e["event"] == "step"],
        )
        if job.fate == "ends" and (status != "SUCCEEDED" or steps != list(range(1, STEPS + 1))):
            wrong.append(f"{job.name} was let alone: {status} after steps {steps}: {client.get_job_logs(job.id)[-1500:]}")
    left = cluster.left_after(ENDED_S)
    wrong += [f"{kind}: {names}" for kind, names in left.items() if names]
    deadline = time.monotonic() + ENDED_S
    while any(carriers(job.uid) for job in jobs) and time.monotonic() < deadline:
        time.sleep(0.5)
    wrong += [f"process {member.pid} of {job.name} ({job.fate})" for job in jobs for member in carriers(job.uid)]
    wrong += [f"shared memory: {name}" for name in shared_memory() - shared]
    done = [
        f"{job.name} at {job.submit_at:.0f} s {job.fate}" + (f" at {job.fate_at:.0f} s" if job.fate != "ends" else "")
        for job in jobs
    ]
    return {"order": done, "seconds": round(time.monotonic() - began), "wrong": wrong}


def submit(job: Job, folder: Path, assets: Path, client: Any, address: str) -> None:
    home = folder / job.name
    home.mkdir()
    variables = {**tiny.ENVIRONMENT, **tiny._own_devices(folder), UID_VARIABLE: job.uid, "RAY_OVERRIDE_JOB_RUNTIME_ENV": "1"}
    variables["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
    keys = [word for word in tiny.overrides(assets, STEPS) if "ray_init" not in word]
    words = [
        sys.executable, "-m", "verl_mux.warm.fork_server", "verl.trainer.main_ppo", "--config-name", "mux_ppo_trainer", *keys,
        f"mux.job={job.name}", f"mux.coordinator={address}", "mux.nodes.rollout=[r0]", "mux.nodes.train=[t0]",
        f"mux.profile.dir={home / 'events'}", f"trainer.default_local_dir={home / 'checkpoints'}",
        f"hydra.run.dir={home / 'hydra'}",
    ]  # fmt: skip
    entry = f"cd {home} && exec {shlex.join(words)}"
    client.submit_job(entrypoint=entry, submission_id=job.id, runtime_env={"env_vars": variables})


def kill_driver(job: Job) -> None:
    """kill -9 of what was submitted: its oldest process that is not Ray's own."""
    found = [psutil.Process(member.pid) for member in carriers(job.uid)]
    drivers = [it for it in found if "verl.trainer.main_ppo" in " ".join(it.cmdline()) and "ray::" not in " ".join(it.cmdline())]
    if drivers:
        min(drivers, key=lambda it: it.create_time()).send_signal(signal.SIGKILL)


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def main() -> None:
    folder, orders = Path(sys.argv[1]).absolute(), int(sys.argv[2])
    seed = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    assets, bad = tiny.assets_in(folder), 0
    with standing_cluster(tiny.ENVIRONMENT) as cluster:
        os.environ.update(cluster.environment)  # before Ray reads them
        from ray.job_submission import JobSubmissionClient

        client = JobSubmissionClient(cluster.url)
        for number in range(seed, seed + orders):
            home = folder / str(number)
            home.mkdir()
            with CoordinatorProcess({"pools": tiny.pools()}, home / "coordinator") as coordinator:
                found = play(random.Random(number), home, assets, cluster, client, coordinator.address)
            print(json.dumps({"seed": number, **found}), flush=True)
            bad += bool(found["wrong"])
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
