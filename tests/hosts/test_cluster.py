"""A job's Ray cluster on three hosts, with a stand-in for verl's driver."""

from __future__ import annotations

import signal
import subprocess

import pytest

from tests.hosts.conftest import HOSTS
from tests.hosts.ray_job import LIMIT_S, RayJob
from verl_mux.coordinator.core.settings import Node
from verl_mux.launcher.host_parts import uid_on_hosts

pytestmark = pytest.mark.e2e
NODES = [Node(name="t0", host="hostb", gpu_ids=[1]), Node(name="r0", host="hosta"), Node(name="r1", host="hostb", gpu_ids=[0])]


@pytest.fixture(scope="module")
def job(bed, tmp_path_factory) -> RayJob:
    """One that has ended well."""
    done = RayJob(tmp_path_factory.mktemp("job") / "one", NODES)
    assert done.process.wait(LIMIT_S) == 0, done.log.read_text()
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
    job = RayJob(tmp_path / "killed", NODES[:2], "wait")
    try:
        job.result()
        assert job.carriers()
    finally:
        job.process.kill()
    job.wait_until_gone()


def test_ctrl_c_ends_it_everywhere(bed, tmp_path):
    job = RayJob(tmp_path / "stopped", NODES[:1], "wait")
    try:
        job.result()
        job.process.send_signal(signal.SIGINT)
        assert job.process.wait(60) == 128 + signal.SIGINT, job.log.read_text()
    finally:
        job.process.kill()
    assert job.carriers() == []


@pytest.mark.hosts  # forty seconds; in `make test-hosts`
def test_two_that_start_at_the_same_moment_have_a_cluster_each(bed, tmp_path):
    jobs = [RayJob(tmp_path / name, NODES[:2]) for name in ("one", "two")]
    for job in jobs:
        assert job.process.wait(LIMIT_S) == 0, job.log.read_text()
    for job in jobs:
        told = job.result()
        assert told["alone"] and told["owner"] == told["uid"] == uid_on_hosts(job.mark)
