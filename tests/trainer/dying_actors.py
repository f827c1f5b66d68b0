"""`python -m tests.trainer.dying_actors`: kills actors of a job under a real Ray, one by one; what its trainer hears.

Run with VERL_PLATFORM=cpu and RAY_TMPDIR.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from types import SimpleNamespace

import ray

from verl_mux.config.queue_namespace import CONTROLLER, namespace
from verl_mux.profiling.eventlog.log import NULL_LOG
from verl_mux.trainer.job_hosts import ActorWatch, DeadActor, actors_of_rollout, end_process
from verl_mux.warm.engine_processes import worker_command

MARK = "said: "
QUICK = {"every_s": 0.1, "patience_s": 0.2}
KILLED = ("server 0 of replica 1", "reward worker 0", "agent loop worker 1", "the load balancer", "TransferQueueStorageUnit#0")


@ray.remote(num_cpus=0)
class Server:
    """As an engine's server, an agent loop worker or a reward worker: verl's are asynchronous."""

    async def pid(self) -> int:
        return os.getpid()


@ray.remote(num_cpus=0)
class Balancer:
    """As verl's load balancer, or TransferQueue's actors: one call at a time."""

    def pid(self) -> int:
        return os.getpid()

    def work(self) -> None:
        threading.Event().wait()


@ray.remote(num_cpus=0)
class Trainer:
    """Waits for an answer that does not come, as verl's TransferQueue client does."""

    def run(self, actors: dict) -> None:
        phases = SimpleNamespace(fail=lambda reason: None, log=NULL_LOG)
        with ActorWatch(actors, functools.partial(end_process, phases), **QUICK):
            threading.Event().wait()


class Job:
    """What a trainer has of its actors."""

    def __init__(self) -> None:
        servers, self.loops, self.rewards = ([Server.remote(), Server.remote()] for _ in range(3))
        named = ((CONTROLLER, namespace()), ("TransferQueueStorageUnit#0", None))
        self._queue = [Balancer.options(name=name, namespace=space).remote() for name, space in named]
        replicas = [SimpleNamespace(replica_rank=rank, servers=[server]) for rank, server in enumerate(servers)]
        self.engines = SimpleNamespace(global_load_balancer=Balancer.remote(), get_replicas=lambda: replicas)


def kill(actor) -> None:
    os.kill(ray.get(actor.pid.remote()), signal.SIGKILL)


def heard(watch: ActorWatch) -> str:
    """What the trainer hears, though it asks no actor."""
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        try:
            watch.check()
        except DeadActor as dead:
            return f"{dead}; {type(dead.__cause__).__name__}"
        time.sleep(0.05)
    return "nothing"


def say(what: str) -> None:
    """Ray writes among our lines."""
    os.write(1, f"{MARK}{what}\n".encode())  # at once: a raylet writes there too


def main() -> None:
    forked = {"py_executable": worker_command()} if worker_command() else None
    sizes = {"num_cpus": 2, "num_gpus": 0, "object_store_memory": 80_000_000}
    ray.init(**sizes, include_dashboard=False, log_to_driver=False, runtime_env=forked)
    job = Job()
    alive = actors_of_rollout(job.engines, job.loops, job.rewards)
    ray.get([actor.pid.remote() for actor in alive.values()])
    say(", ".join(sorted(alive)))
    busy = Balancer.remote()
    working = busy.work.remote()  # noqa: F841  (dropped, it would be cancelled)
    for name in KILLED:
        with ActorWatch(alive | {"a busy one": busy}, print, every_s=0.1) as watch:
            kill(alive[name])
            say(heard(watch))
        del alive[name]
    trainer = Trainer.remote()
    stuck = trainer.run.remote(alive)
    kill(alive[CONTROLLER])
    try:
        ray.get(stuck, timeout=200)
    except ray.exceptions.RayError as error:
        say(type(error).__name__)


if __name__ == "__main__":
    main()
