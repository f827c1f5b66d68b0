"""A job does not join a Ray cluster in which another one runs."""

from __future__ import annotations

import subprocess
import sys

import pytest
from omegaconf import OmegaConf

ray = pytest.importorskip("ray")

from verl_mux.config import ray_cluster  # noqa: E402
from verl_mux.errors import UserError  # noqa: E402

# Another job: its cluster, its name there, and, when it is told to, where TransferQueue's controller would be.
OTHER = """
import ray, sys
from omegaconf import OmegaConf
from verl_mux.config import ray_cluster
ray.init(address="local", num_cpus=2, object_store_memory=80_000_000, include_dashboard=False)
address = ray.get_runtime_context().gcs_address
@ray.remote(num_cpus=0)
class Controller:
    def up(self): return True
print(address, flush=True)
for line in sys.stdin:
    held = Controller.options(name="TransferQueueController", namespace="transfer_queue").remote()
    print(ray.get(held.up.remote()), flush=True)
"""


def _config(address: str | None):
    return OmegaConf.create({"ray_kwargs": {"ray_init": {"address": address}}})


def test_a_ray_instance_of_its_own_is_nobody_elses():
    ray_cluster.claim(_config("local"), "mine")
    assert not ray.is_initialized()


@pytest.mark.e2e
def test_a_cluster_with_another_jobs_controller_is_refused_by_that_jobs_name():
    with subprocess.Popen([sys.executable, "-c", OTHER], stdin=-1, stdout=-1, text=True) as other:
        try:
            address = other.stdout.readline().strip()
            ray_cluster.claim(_config(address), "first")
            assert not ray.is_initialized()
            other.stdin.write("\n")
            other.stdin.flush()
            assert other.stdout.readline() == "True\n"
            with pytest.raises(UserError, match=f"the Ray cluster at {address} is first's, .* start one for job second"):
                ray_cluster.claim(_config(address), "second")
            assert not ray.is_initialized()
        finally:
            other.kill()
