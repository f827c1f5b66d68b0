"""A job in a Ray cluster over the bed's hosts, as recipes/cluster/clusters.py starts it, and a stand-in for verl's driver.

`python -m tests.hosts.ray_job FILE OUT ...`: the job's process, as `verl-mux run` starts it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import yaml

from tests.hosts.conftest import NAME, ROOT, SUBNET, with_clusters
from verl_mux.coordinator.bus.members import UID_VARIABLE
from verl_mux.launcher import run_file
from verl_mux.launcher.run_processes import JobProcess

LIMIT_S = 400
SERVER = f"http://{SUBNET}.254:20002"


class RayJob:
    """A job in a run of its own on this machine. `nodes`: (name, host, gpu_ids), the training node first."""

    def __init__(self, folder: Path, nodes: Sequence[tuple[str, str, list[int]]], *driver: str) -> None:
        self.out, self.log, self._driver = folder / "out.json", folder / "job.log", driver
        folder.mkdir()
        given = [{"name": name, "host": host, "gpu_ids": gpus} for name, host, gpus in nodes]
        names = {"train": [nodes[0][0]], "rollout": [name for name, _, _ in nodes[1:]] or [nodes[0][0]]}
        run = {
            "dir": str(folder),
            "bind": f"tcp://{SUBNET}.254:5600",
            "coordinator": {"pools": {"all": {"nodes": given}}},
            "environment": {"PYTHONPATH": str(ROOT), "RAY_enable_metrics_collection": "0"},
            "jobs": {"job": {"nodes": names}},
        }
        file = folder / "run.yaml"
        file.write_text(yaml.safe_dump(run))
        start = [sys.executable, "-m", "tests.hosts.ray_job", str(file), str(self.out), *driver]
        words = with_clusters(file, NAME, start, "--ray", "--num-cpus=4 --object-store-memory=80000000")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=log, cwd=ROOT)

    def result(self) -> dict:
        """What the driver found."""
        deadline = time.monotonic() + LIMIT_S
        while not self.out.exists():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.2)
        return json.loads(self.out.read_text())

    def carriers(self, here: bool = False) -> list[psutil.Process]:
        """The job's processes on its hosts, which this machine sees too, or those of this machine (`here`): the marked ones, and
        its clusters' own."""
        uid, token = json.loads(self.out.read_text())["uid"], str(self.out.parent / "ray_token")
        found = []
        for process in psutil.process_iter():
            try:
                environment = process.environ()
                ours = environment.get(UID_VARIABLE) == uid or environment.get("RAY_AUTH_TOKEN_PATH") == token
                if ours and here == (os.readlink(f"/proc/{process.pid}/ns/net") == os.readlink("/proc/self/ns/net")):
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def wait_until_gone(self) -> None:
        deadline = time.monotonic() + 60
        while self.carriers():
            assert time.monotonic() < deadline, self.carriers()
            time.sleep(0.2)


def start(file: str, out: str, *driver: str) -> int:
    """Run the stand-in in the place of verl. Returns its exit code."""
    run = run_file.read(Path(file), more={"submit": SERVER})
    job = JobProcess("job", run.jobs["job"], run, run.bind)
    job._command = [sys.executable, "-m", "verl_mux.warm.submitted", SERVER, "tests.hosts.ray_driver", out, *driver]
    job.start()
    try:
        code = job._process.wait()
    finally:
        job.sweep()
    print((Path(file).parent / "job" / "job.log").read_text())
    return code


if __name__ == "__main__":
    sys.exit(start(*sys.argv[1:]))
