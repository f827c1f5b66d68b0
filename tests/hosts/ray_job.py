"""A job with a Ray cluster on the bed's hosts and a stand-in for verl's driver.

`python -m tests.hosts.ray_job PAIRS`: so many pairs, the two of each started at the same moment; prints how many had a port taken
from under them, and how many found themselves in a cluster that was not theirs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from uuid import uuid4

import msgspec
import psutil

from tests.hosts.conftest import HOSTS, NAME, SUBNET, Bed, via
from verl_mux.coordinator.bus.members import UID_VARIABLE
from verl_mux.coordinator.core.settings import Node
from verl_mux.launcher.host_parts import HostSpec, OnHosts, parts, uid_on_hosts
from verl_mux.launcher.host_setup import RayOptions

ROOT = Path(__file__).parents[2]
LIMIT_S = 400


class RayJob:
    """A job's process on this machine, as `verl-mux run` starts it."""

    def __init__(self, folder: Path, nodes: list[Node], *driver: str) -> None:
        hosts = {host: HostSpec(via=via(host)) for host in HOSTS}
        ray = RayOptions(num_cpus=4, object_store_memory=80_000_000)
        spec = OnHosts(parts=parts(nodes, hosts), folder=str(folder), towards=f"{SUBNET}.254", role="job", ray=ray)
        self.mark, self.out, self.log = uuid4().hex, folder / "out.json", folder / "job.log"
        folder.mkdir()
        environment = {**os.environ, UID_VARIABLE: self.mark, "PYTHONPATH": str(ROOT), "RAY_enable_metrics_collection": "0"}
        command = [sys.executable, "-m", "verl_mux.launcher.on_hosts", msgspec.json.encode(spec).decode()]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "tests.hosts.ray_driver", str(self.out), *driver], stdout=log, stderr=log, env=environment
            )

    def result(self) -> dict:
        """What the driver found."""
        deadline = time.monotonic() + LIMIT_S
        while not self.out.exists():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.2)
        return json.loads(self.out.read_text())

    def carriers(self) -> list[psutil.Process]:
        """All processes of the job on all hosts, which this machine sees too."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(UID_VARIABLE) == uid_on_hosts(self.mark):
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def wait_until_gone(self) -> None:
        deadline = time.monotonic() + 60
        while self.carriers():
            assert time.monotonic() < deadline, self.carriers()
            time.sleep(0.2)


def main() -> None:
    pairs, clashes, strangers, failed = int(sys.argv[1]), 0, 0, 0
    nodes = [Node(name="t0", host="hosta"), Node(name="r0", host="hostb")]
    with tempfile.TemporaryDirectory() as folder, Bed(NAME, SUBNET) as bed:
        bed.make(HOSTS[:2], shared=[folder])
        for pair in range(pairs):
            jobs = [RayJob(Path(folder) / f"{pair}{name}", nodes) for name in "ab"]
            for job in jobs:
                failed += job.process.wait(LIMIT_S) != 0
                clashes += "in use" in job.log.read_text()
                told = json.loads(job.out.read_text()) if job.out.exists() else None
                strangers += told is not None and not (told["alone"] and told["owner"] == uid_on_hosts(job.mark))
            so_far = {"pairs": pair + 1, "port_clashes": clashes, "in_a_strangers_cluster": strangers, "failed": failed}
            print(json.dumps(so_far), flush=True)


if __name__ == "__main__":
    main()
