"""`python -m verl.trainer.main_ppo` finds our keys without a flag, verl's own stay what they are, and bad keys end it at once."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.config.warm_main_ppo import ROOT, MainPpo
from verl_mux.config import schema
from verl_mux.config.job_checks import check

DEFAULTS = OmegaConf.to_container(OmegaConf.load(Path(schema.__file__).parent / "mux" / "default.yaml"))


@pytest.fixture(scope="module")
def main_ppo(tmp_path_factory):
    with MainPpo(tmp_path_factory.mktemp("main_ppo"), "trainer.v1.trainer_mode=mux_separate") as started:
        yield started


def composed(main_ppo, *arguments: str):
    """The config of a real command line, as `--cfg job` prints it."""
    result = main_ppo("--cfg", "job", *arguments, cwd=ROOT, HYDRA_FULL_ERROR="1")
    assert result.returncode == 0, result.stderr[-2000:]
    return OmegaConf.create(result.stdout)


@pytest.fixture(scope="module")
def with_the_group(main_ppo):
    """Stock command line plus `+mux=default`."""
    return composed(main_ppo, "+mux=default", "mux.seed=7")


@pytest.fixture(scope="module")
def with_our_primary(main_ppo):
    """The six keys that turn a stock command into ours."""
    ours = ["trainer.v1.trainer_mode=mux_separate", "mux.job=math", "mux.nodes.rollout=[r0,r1]", "mux.seed=7"]
    return composed(main_ppo, "--config-name", "mux_ppo_trainer", *ours)


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
    assert check(with_our_primary).job == "math"


class TestRefused:
    """One line on stderr, exit code 2, and no Ray."""

    MODE = ["--config-name", "mux_ppo_trainer", "trainer.v1.trainer_mode=mux_separate", "actor_rollout_ref.rollout.name=sglang"]
    POOL = [f"actor_rollout_ref.rollout.{key}=1" for key in ("nnodes", "n_gpus_per_node", "tensor_model_parallel_size")]

    def refused(self, main_ppo, tmp_path, *keys: str) -> str:
        arguments = [*self.MODE, *self.POOL, f"hydra.run.dir={tmp_path / 'hydra'}", *keys]
        result = main_ppo(*arguments, cwd=tmp_path, RAY_TMPDIR=str(tmp_path / "ray"))
        ours = [line for line in result.stderr.splitlines() if line.startswith("verl-mux: ")]
        assert result.returncode == 2 and len(ours) == 1, result.stderr[-2000:]
        assert "Traceback" not in result.stderr and not (tmp_path / "ray").exists()
        return ours[0]

    def test_an_unknown_key(self, main_ppo, tmp_path):
        text = self.refused(main_ppo, tmp_path, "+mux.nodes.rolout=[r0]")
        assert text == "verl-mux: unknown key mux.nodes.rolout; allowed here: rollout, train"
