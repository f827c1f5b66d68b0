"""A Ray cluster over three hosts, started by the recipe, with a stand-in for verl's driver."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Iterator

import pytest

from tests.hosts.conftest import HOSTS, Bed
from tests.hosts.ray_job import LIMIT_S, RayJob

pytestmark = pytest.mark.e2e
NODES = [("t0", "hostb", [1]), ("r0", "hosta", [0]), ("r1", "hostb", [0])]


@pytest.fixture(scope="module")
def job(bed, tmp_path_factory) -> Iterator[RayJob]:
    """One whose driver has looked around, and waits."""
    started = RayJob(tmp_path_factory.mktemp("job") / "one", NODES, "wait")
    yield started
    if started.process.poll() is None:
        _end(started, signal.SIGKILL)


def test_each_node_is_on_its_host_with_the_jobs_mark(job):
    found = job.result()
    uid = found["uid"]
    assert found["nodes"] == {"mux_t0": ["hostb", uid], "mux_r0": ["hosta", uid], "mux_r1": ["hostb", uid]}
    assert found["gpus"] == 3


def test_the_driver_runs_on_the_machine_of_the_head(job):
    assert job.result()["host"] == socket.gethostname()


def test_a_job_whose_clusters_lose_their_starter_leaves_nothing_on_its_hosts(job, bed):
    assert job.carriers()
    _end(job, signal.SIGKILL)
    _nothing_is_left(job, bed)


# Half a minute each, in `make test-hosts`: an end that the starter itself cleans up after.
@pytest.mark.hosts
@pytest.mark.parametrize(("driver", "number"), [("wait", signal.SIGINT), ("end", None)])
def test_nothing_is_left_of_a_job_that_ended(bed, tmp_path, driver, number):
    job = RayJob(tmp_path / "ended", NODES[:2], driver)
    job.result()
    if number:
        _end(job, number)
    else:
        assert job.process.wait(LIMIT_S) == 0, job.log.read_text()
    _nothing_is_left(job, bed)


def _end(job: RayJob, number: signal.Signals) -> None:
    job.process.send_signal(number)
    job.wait_until_gone()
    for process in job.carriers(here=True):  # the driver, which SIGKILL of its starter leaves waiting here
        process.kill()


def _nothing_is_left(job: RayJob, bed: Bed) -> None:
    job.wait_until_gone()
    for host in HOSTS:
        assert subprocess.run([*bed.enter(host), "ls", "/dev/shm"], capture_output=True, text=True, check=True).stdout == ""
