"""The first GPU recipe's script composes through verl's own entry point; test_certificates.py checks what it composes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

SCRIPT = Path(__file__).parents[2] / "recipes" / "two_7b_grpo" / "run_qwen_7b_fsdp2.sh"


def run_script(tmp_path: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    """The recipe's script with this interpreter as `python`."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **variables}
    for name in {"JOB", "TRAIN_FILES", "VAL_FILES", "VERL_PLATFORM"} - set(variables):
        environment.pop(name, None)
    return subprocess.run(
        ["bash", SCRIPT, *arguments], capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=300, check=False
    )


def test_the_scripts_variables_and_arguments_arrive(tmp_path):
    given = {"JOB": "code", "TRAIN_FILES": "code.parquet", "VAL_FILES": "code_val.parquet"}
    result = run_script(tmp_path, "trainer.total_training_steps=9", "--cfg", "job", **given)
    assert result.returncode == 0, result.stderr[-2000:]
    config = OmegaConf.create(result.stdout)
    assert (config.mux.job, config.data.train_files, config.trainer.total_training_steps) == ("code", "code.parquet", 9)
    assert config.mux.coordinator.startswith("tcp://")


@pytest.mark.parametrize("missing", ["JOB", "TRAIN_FILES", "VAL_FILES"])
def test_the_script_says_which_variable_is_missing(tmp_path, missing):
    given = {name: "x" for name in ("JOB", "TRAIN_FILES", "VAL_FILES") if name != missing}
    result = run_script(tmp_path, **given)
    assert result.returncode != 0 and missing in result.stderr
