"""`python -m tests.rollout.engine.dying_server`: two servers of a job under a real Ray, one is killed; what its trainer is told.

Run with VERL_PLATFORM=cpu and RAY_TMPDIR.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from types import SimpleNamespace

import ray

from verl_mux.rollout.engine.replica import MuxLLMServerManager


@ray.remote(num_cpus=0)
class Server:
    async def never(self) -> None:
        await asyncio.Event().wait()

    async def pid(self) -> int:
        return os.getpid()


def main() -> None:
    ray.init(num_cpus=2, num_gpus=0, include_dashboard=False, object_store_memory=80_000_000)
    manager = MuxLLMServerManager.__new__(MuxLLMServerManager)
    servers = [Server.remote(), Server.remote()]
    manager._ends, manager.rollout_replicas = [], [SimpleNamespace(servers=[server]) for server in servers]
    pids = ray.get([server.pid.remote() for server in servers])
    manager.check_alive()
    print("alive", flush=True)
    os.kill(pids[1], signal.SIGKILL)
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        try:
            manager.check_alive()
        except ray.exceptions.RayActorError as error:
            print(type(error).__name__, flush=True)
            return
        time.sleep(0.05)


if __name__ == "__main__":
    main()
