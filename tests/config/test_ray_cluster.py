"""A job does not join a Ray cluster in which another one runs."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys

import pytest

pytest.importorskip("ray")

# Another job: its cluster, its name there, and, when it is told to, where TransferQueue's controller would be.
OTHER = """
import ray, sys
from omegaconf import OmegaConf
from verl_mux.config import preflight
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


# A job's preflight, as far as it concerns that.
CLAIM = """
import ray, sys
from omegaconf import OmegaConf
from verl_mux.config import preflight
from verl_mux.errors import UserError
try:
    preflight.claim_cluster(OmegaConf.create({"ray_kwargs": {"ray_init": {"address": sys.argv[1]}}}), sys.argv[2])
    print("taken")
except UserError as error:
    print(error)
assert not ray.is_initialized()
"""


def test_a_ray_instance_of_its_own_is_nobody_elses(python):
    assert python("-c", CLAIM, "local", "mine").stdout == "taken\n"


@pytest.mark.e2e
def test_a_cluster_with_another_jobs_controller_is_refused_by_that_jobs_name(python):
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    command = [sys.executable, "-c", OTHER]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env={**os.environ, **token}) as other:
        try:
            address = other.stdout.readline().strip()
            assert python("-c", CLAIM, address, "first", **token).stdout == "taken\n"
            other.stdin.write("\n")
            other.stdin.flush()
            assert other.stdout.readline() == "True\n"
            told = python("-c", CLAIM, address, "second", **token).stdout
            assert told.startswith(f"the Ray cluster at {address} is first's, ") and "start one for job second" in told
        finally:
            other.kill()
