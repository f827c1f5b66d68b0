"""A job whose driver is killed in some phase while a child of it holds device memory, and another job that waits for its node."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import uuid

import psutil

from tests.gpu.engines import ROOT, Bed
from tests.gpu.scenes import still_held
from verl_mux.coordinator.bus.client import connect
from verl_mux.coordinator.bus.members import UID_VARIABLE
from verl_mux.coordinator.config import make_config
from verl_mux.coordinator.server import Coordinator

PHASES = ("init", "rollout", "train")
NODES = {"rollout": ["r0"], "train": ["t0"]}


def killed_in(bed: Bed, phase: str, *more: str) -> list[str]:
    """What was wrong when another job got the dead one's node. `more`: see holder.py."""
    pools = {side: {"nodes": [{"name": name} for name in names]} for side, names in NODES.items()}
    with Coordinator(make_config({"pools": pools, "kill_grace": 0.5})) as coordinator:
        assert coordinator.address is not None
        uid = f"dies:{uuid.uuid4().hex}"
        kind = "bed" if bed.kind == "bed" else "cuda"
        command = [sys.executable, "-m", "tests.gpu.holder", coordinator.address, "dies", phase, kind, *more]
        environment = {**os.environ, **bed.environment, UID_VARIABLE: uid, "PYTHONPATH": str(ROOT)}
        driver = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
        assert driver.stdout is not None
        child = int(driver.stdout.readline())
        try:
            if not bed.by_pid().get(child):
                return [f"pid {child} holds device memory, and nobody sees it"]
            lives = connect(coordinator.address, "lives", NODES, uid=f"lives:{uuid.uuid4().hex}", timeout=60.0)
            driver.kill()
            driver.wait()
            lease = lives.acquire(phase, step=0 if phase == "init" else 1)
            wrong = still_held(bed, [child])
            lives.release(lease)
            lives.close()
            return wrong
        finally:
            driver.kill()
            driver.wait()
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(child).kill()
