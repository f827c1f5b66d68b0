"""`python -m verl.trainer.main_ppo` finds our keys without a flag, and verl's own stay what they are."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl_mux.config import schema

ROOT = Path(__file__).parents[2]
DEFAULTS = OmegaConf.to_container(OmegaConf.load(Path(schema.__file__).parent / "mux" / "default.yaml"))


def composed(python, *arguments: str):
    """The config of a real command line, as `--cfg job` prints it."""
    result = python("-m", "verl.trainer.main_ppo", "--cfg", "job", *arguments, cwd=ROOT, timeout=300, HYDRA_FULL_ERROR="1")
    assert result.returncode == 0, result.stderr[-2000:]
    return OmegaConf.create(result.stdout)


@pytest.fixture(scope="module")
def with_the_group(python):
    """Stock command line plus `+mux=default`."""
    return composed(python, "+mux=default", "mux.seed=7")


@pytest.fixture(scope="module")
def with_our_primary(python):
    """The six keys that turn a stock command into ours."""
    ours = ["trainer.v1.trainer_mode=mux_separate", "mux.job=math", "mux.nodes.rollout=[r0,r1]", "mux.seed=7"]
    return composed(python, "--config-name", "mux_ppo_trainer", *ours)


def test_the_group_brings_our_defaults_in(with_the_group):
    assert OmegaConf.to_container(with_the_group.mux) == {**DEFAULTS, "seed": 7}
    assert with_the_group.trainer.v1.trainer_mode == "sync"


def test_the_primary_config_has_our_keys_without_a_plus(with_our_primary):
    nodes = {"rollout": ["r0", "r1"], "train": ["train0"]}
    assert OmegaConf.to_container(with_our_primary.mux) == {**DEFAULTS, "seed": 7, "job": "math", "nodes": nodes}
    assert with_our_primary.trainer.v1.trainer_mode == "mux_separate"


def test_both_are_verls_own_trainer_config_otherwise(with_the_group, with_our_primary):
    first, second = (OmegaConf.to_container(c) for c in (with_the_group, with_our_primary))
    for config in (first, second):
        del config["mux"]
        del config["trainer"]["v1"]["trainer_mode"]
    assert first == second
    assert {"actor_rollout_ref", "algorithm", "critic", "data", "trainer"} <= set(first)


def test_the_composed_keys_pass_the_check(with_our_primary):
    with_our_primary.actor_rollout_ref.rollout.nnodes = 1
    with_our_primary.actor_rollout_ref.rollout.name = "sglang"
    assert schema.check(with_our_primary).job == "math"
