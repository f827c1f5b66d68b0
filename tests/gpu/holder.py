"""`python -m tests.gpu.holder ADDRESS JOB PHASE KIND`: a job with a lease of PHASE, and a child that holds device memory.

KIND: cuda or bed; with a word more the child does not carry the job's mark. Prints the child's pid; ends with its stdin. The
child lives on until another process ends it.

`python -m tests.gpu.holder grows KIND`: has a context, says so, and after a line takes more and more device memory; ends with its
stdin.
"""

import os
import signal
import subprocess
import sys
import threading

from verl_mux.coordinator.bus.client import connect
from verl_mux.coordinator.bus.members import UID_VARIABLE

SIZE = 1 << 30
# What grows takes a step of these bytes each so many seconds, and this many steps at most.
STEP, STEP_S, STEPS = 8 << 20, 0.01, 1000
_held = []


def take(kind: str, size: int) -> None:
    if kind == "cuda":
        import torch

        _held.append(torch.full((size,), 1, dtype=torch.uint8, device="cuda"))
        torch.cuda.synchronize()
    else:
        from verl_mux_cpu import device_ledger

        _held.append(size)
        device_ledger.hold({"block": sum(_held)})


def hold(kind: str) -> None:
    take(kind, SIZE)
    print("held", flush=True)
    while True:
        signal.pause()


def grow(kind: str) -> None:
    take(kind, STEP)
    print("held", flush=True)
    sys.stdin.readline()
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    for _ in range(STEPS):
        if over.wait(STEP_S):
            return
        take(kind, STEP)
    over.wait()


def main() -> None:
    if sys.argv[1] in ("child", "grows"):
        return {"child": hold, "grows": grow}[sys.argv[1]](sys.argv[2])
    address, job, phase, kind, *more = sys.argv[1:]
    mux = connect(address, job, {"rollout": ["r0"], "train": ["t0"]}, uid=os.environ[UID_VARIABLE], timeout=60.0)
    mux.acquire(phase, step=0 if phase == "init" else 1)
    environment = {name: value for name, value in os.environ.items() if name != UID_VARIABLE or not more}
    command = [sys.executable, "-m", "tests.gpu.holder", "child", kind]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert child.stdout.readline() == "held\n"
    print(child.pid, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
