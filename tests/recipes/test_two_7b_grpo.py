"""The first GPU recipe composes through verl's own entry point, and fits the pools that it is shipped with."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl_mux.config.job_checks import check
from verl_mux.coordinator.config import read_config

RECIPE = Path(__file__).parents[2] / "recipes" / "two_7b_grpo"
SCRIPT = RECIPE / "run_qwen_7b_fsdp2.sh"


def run_script(tmp_path: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    """The recipe's script with this interpreter as `python`."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **variables}
    for name in {"JOB", "TRAIN_FILES", "VAL_FILES", "VERL_PLATFORM"} - set(variables):
        environment.pop(name, None)
    return subprocess.run(
        ["bash", SCRIPT, *arguments], capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=300, check=False
    )


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    given = {"JOB": "code", "TRAIN_FILES": "code.parquet", "VAL_FILES": "code_val.parquet"}
    result = run_script(tmp_path_factory.mktemp("recipe"), "trainer.total_training_steps=9", "--cfg", "job", **given)
    assert result.returncode == 0, result.stderr[-2000:]
    return OmegaConf.create(result.stdout)


def test_the_scripts_variables_and_arguments_arrive(config):
    assert (config.mux.job, config.data.train_files, config.trainer.total_training_steps) == ("code", "code.parquet", 9)


def test_the_keys_pass_our_check(config):
    mux = check(config)
    assert mux is not None and mux.coordinator.startswith("tcp://")


def test_its_nodes_are_in_the_pools_file_and_have_its_gpus(config):
    pools = read_config(RECIPE / "pools.yaml")
    sides = {"rollout": config.actor_rollout_ref.rollout.n_gpus_per_node, "train": config.trainer.n_gpus_per_node}
    for side, gpus in sides.items():
        for name in config.mux.nodes[side]:
            assert pools.node(name).gpus >= gpus


@pytest.mark.parametrize("missing", ["JOB", "TRAIN_FILES", "VAL_FILES"])
def test_the_script_says_which_variable_is_missing(tmp_path, missing):
    given = {name: "x" for name in ("JOB", "TRAIN_FILES", "VAL_FILES") if name != missing}
    result = run_script(tmp_path, **given)
    assert result.returncode != 0 and missing in result.stderr
