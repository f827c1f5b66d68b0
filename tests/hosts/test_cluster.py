"""A job's Ray cluster on three hosts, started by the recipe, with a stand-in for verl's driver."""

from __future__ import annotations

import signal
import socket
import subprocess

import pytest

from tests.hosts.conftest import HOSTS
from tests.hosts.ray_job import LIMIT_S, RayJob

pytestmark = pytest.mark.e2e
NODES = [("t0", "hostb", [1]), ("r0", "hosta", [0]), ("r1", "hostb", [0])]


@pytest.fixture(scope="module")
def job(bed, tmp_path_factory) -> RayJob:
    """One that has ended well."""
    done = RayJob(tmp_path_factory.mktemp("job") / "one", NODES, "end")
    assert done.process.wait(LIMIT_S) == 0, done.log.read_text()
    return done


def test_each_node_is_on_its_host_with_its_gpus_and_the_jobs_mark(job):
    found = job.result()
    uid = found["uid"]
    assert found["nodes"] == {"mux_t0": ["hostb", uid, "1"], "mux_r0": ["hosta", uid, "0"], "mux_r1": ["hostb", uid, "0"]}
    assert found["gpus"] == 3


def test_the_driver_runs_on_the_machine_of_the_launcher(job):
    assert job.result()["host"] == socket.gethostname()


def test_nothing_is_left_of_a_job_that_ended(job, bed):
    job.wait_until_gone()
    assert job.carriers(here=True) == []
    for host in HOSTS:
        left = subprocess.run([*bed.enter(host), "ls", "/dev/shm"], capture_output=True, text=True, check=True).stdout
        assert left == ""


# Half a minute each. A starter that is interrupted ends its clusters as one whose job has ended, which is seen above.
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.hosts), signal.SIGKILL])
def test_a_job_whose_clusters_lose_their_starter_leaves_nothing_on_its_hosts(bed, tmp_path, number):
    job = RayJob(tmp_path / "ended", NODES[:2], "wait")
    try:
        job.result()
        assert job.carriers()
    finally:
        job.process.send_signal(number)
    job.wait_until_gone()
    for process in job.carriers(here=True):  # the driver, which SIGKILL of its starter leaves waiting here
        process.kill()


@pytest.mark.hosts  # forty seconds; in `make test-hosts`
def test_two_that_start_at_the_same_moment_have_a_cluster_each(bed, tmp_path):
    jobs = [RayJob(tmp_path / str(number), NODES[:2], "end", number=number) for number in range(2)]
    for job in jobs:
        assert job.process.wait(LIMIT_S) == 0, job.log.read_text()
    for job in jobs:
        result = job.result()
        assert result["alone"] and result["owner"] == result["uid"]
