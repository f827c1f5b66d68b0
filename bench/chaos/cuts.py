"""How long a node stays with a job that is cut off: from the cut to the next job's lease.

python -m bench.chaos.cuts ADDRESS JOB: the job that is cut off. It holds a lease on `r0`, on which a process of its own
runs, prints that process's id, and waits.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import uuid
from typing import Any

from bench.coordinator_process import CoordinatorProcess
from verl_mux.coordinator.bus.client import connect
from verl_mux.coordinator.bus.members import UID_VARIABLE, is_alive, member_of
from verl_mux.launcher.run_processes import free_port

LEASE_S, ALLOWED_S = 5.0, 1.0
_NODES = {"rollout": ["r0"], "train": ["t0"]}
_POOLS = {"rollout": {"nodes": [{"name": "r0"}]}, "train": {"nodes": [{"name": "t0"}]}}
_HERE, _LONGEST_S = "127.0.0.1", 60.0


def measure(cuts: int) -> dict[str, Any]:
    """`after_lease_s`: from the end of the lease, counted from the cut, to the next job's; below 0, as the lease was last renewed
    before the cut. `over`: how many took longer than ALLOWED_S. `outlived`: processes of cut-off jobs that lived when their node
    was given on. In every other cut the job is stopped as well, so that it cannot give way by itself."""
    after, outlived = [], 0
    with CoordinatorProcess({"pools": _POOLS, "lease_timeout": LEASE_S}) as coordinator:
        for number in range(cuts):
            seconds, lives = _cut(coordinator.address, number)
            after.append(seconds - LEASE_S)
            outlived += lives
    return {
        "cuts": cuts,
        "lease_s": LEASE_S,
        "after_lease_s": {"median": round(statistics.median(after), 3), "max": round(max(after), 3)},
        "over": sum(seconds > ALLOWED_S for seconds in after),
        "outlived": outlived,
    }


def _cut(address: str, number: int) -> tuple[float, bool]:
    """Seconds from the cut to the next job's lease, and whether the process of the job that was cut off lived then."""
    port = free_port(_HERE)
    through = [str(port), address.rpartition(":")[2]]
    proxy = subprocess.Popen([sys.executable, "-m", "bench.chaos.proxy", *through])
    environment = {**os.environ, UID_VARIABLE: uuid.uuid4().hex}
    command = [sys.executable, "-m", "bench.chaos.cuts", f"tcp://{_HERE}:{port}", f"cut{number}"]
    holder = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        worker = member_of(int(holder.stdout.readline()))
        return _until_the_next_lease(address, number, proxy, holder), is_alive(worker)
    finally:
        for process in (proxy, holder):
            process.kill()
            process.wait()


def _until_the_next_lease(address: str, number: int, proxy: subprocess.Popen, holder: subprocess.Popen) -> float:
    mux = connect(address, f"next{number}", _NODES, uid=uuid.uuid4().hex)
    granted: list[float] = []

    def ask() -> None:
        lease = mux.acquire("rollout", step=1)
        granted.append(time.monotonic())
        mux.release(lease)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    time.sleep(1.0 + (0.13 * number) % 1.0)  # anywhere between two beats
    cut = time.monotonic()
    proxy.send_signal(signal.SIGSTOP)
    if number % 2:
        holder.send_signal(signal.SIGSTOP)
    asking.join(_LONGEST_S)
    mux.close()
    return (granted or [cut + _LONGEST_S])[0] - cut


def main() -> None:
    mux = connect(sys.argv[1], sys.argv[2], _NODES, uid=os.environ[UID_VARIABLE])
    worker = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL)
    mux.members([member_of(worker.pid)])
    mux.acquire("rollout", step=1)
    print(worker.pid, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
