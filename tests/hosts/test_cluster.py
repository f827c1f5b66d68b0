"""A job's Ray cluster on three hosts, with a stand-in for verl's driver."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from uuid import uuid4

import msgspec
import psutil
import pytest

from tests.hosts.conftest import HOSTS, SUBNET, via
from verl_mux.coordinator.bus.members import UID_VARIABLE
from verl_mux.coordinator.core.settings import Node
from verl_mux.launcher.cluster import layout
from verl_mux.launcher.cluster.layout import ClusterSpec, RayOptions
from verl_mux.launcher.cluster.mark import uid_on_hosts
from verl_mux.launcher.cluster.reach import HostSpec

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]
_LIMIT_S = 400
NODES = [Node(name="t0", host="hostb", gpu_ids=[1]), Node(name="r0", host="hosta"), Node(name="r1", host="hostb", gpu_ids=[0])]


class Job:
    """A job's process on this machine, as `verl-mux run` starts it."""

    def __init__(self, folder: Path, nodes: list[Node], *driver: str) -> None:
        hosts = {host: HostSpec(via=via(host)) for host in HOSTS}
        ray = RayOptions(num_cpus=4, object_store_memory=80_000_000)
        spec = ClusterSpec(parts=layout.parts(nodes, hosts), folder=str(folder), towards=f"{SUBNET}.254", ray=ray)
        self.mark, self.out, self.log = uuid4().hex, folder / "out.json", folder / "job.log"
        folder.mkdir()
        environment = {**os.environ, UID_VARIABLE: self.mark, "PYTHONPATH": str(ROOT), "RAY_enable_metrics_collection": "0"}
        command = [sys.executable, "-m", "verl_mux.launcher.cluster", msgspec.json.encode(spec).decode()]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "tests.hosts.ray_driver", str(self.out), *driver], stdout=log, stderr=log, env=environment
            )

    def result(self) -> dict:
        """What the driver found."""
        deadline = time.monotonic() + _LIMIT_S
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


@pytest.fixture(scope="module")
def job(bed, tmp_path_factory) -> Job:
    """One that has ended well."""
    done = Job(tmp_path_factory.mktemp("job") / "one", NODES)
    assert done.process.wait(_LIMIT_S) == 0, done.log.read_text()
    return done


def test_each_node_is_on_its_host_with_its_gpus_and_the_jobs_mark(job):
    found, uid = job.result(), uid_on_hosts(job.mark)
    assert found["nodes"] == {"mux_t0": ["hostb", uid, "1"], "mux_r0": ["hosta", uid, "0"], "mux_r1": ["hostb", uid, "0"]}
    assert found["gpus"] == 3


def test_the_driver_runs_on_the_host_of_the_first_training_node(job):
    assert job.result()["host"] == "hostb"


def test_nothing_is_left_of_a_job_that_ended(job, bed):
    assert job.carriers() == []
    for host in HOSTS:
        left = subprocess.run([*bed.enter(host), "ls", "/tmp"], capture_output=True, text=True, check=True).stdout
        assert "verl_mux_" not in left


def test_a_job_whose_process_here_is_killed_leaves_nothing_on_its_hosts(bed, tmp_path):
    job = Job(tmp_path / "killed", NODES[:2], "wait")
    try:
        job.result()
        assert job.carriers()
    finally:
        job.process.kill()
    job.wait_until_gone()


def test_ctrl_c_ends_it_everywhere(bed, tmp_path):
    job = Job(tmp_path / "stopped", NODES[:1], "wait")
    try:
        job.result()
        job.process.send_signal(signal.SIGINT)
        assert job.process.wait(60) == 128 + signal.SIGINT, job.log.read_text()
    finally:
        job.process.kill()
    assert job.carriers() == []
