"""recipes/verl_examples: our keys behind those of one of verl's scripts pass our check, for every accepted kind of script."""

import os
import subprocess
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

from verl_mux.config import search_path  # noqa: F401  (registers at import)
from verl_mux.config.job_checks import check
from verl_mux.memory.model_files import local_model_config

RECIPES = Path(__file__).parents[2] / "recipes"
SWITCH = RECIPES / "verl_examples" / "switch.sh"
# As run_qwen3_8b_fsdp.sh and run_qwen3_8b_megatron.sh give them, as far as they bear on ours.
GIVEN = [
    "algorithm.adv_estimator=grpo", "data.train_batch_size=1024", "data.max_response_length=2048",
    "actor_rollout_ref.actor.use_dynamic_bsz=True", "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    "actor_rollout_ref.rollout.n=5", "trainer.n_gpus_per_node=8", "trainer.nnodes=1", "trainer.experiment_name=qwen3_8b",
]  # fmt: skip
TRAINING = {"fsdp": [], "megatron": ["model_engine=megatron", "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"]}


def switched(tmp_path: Path, *words: str, **variables: str) -> list[str]:
    """What a script of verl's hands to verl's trainer."""
    script = tmp_path / "run.sh"
    given = " ".join(f"'{word}'" for word in words)
    script.write_text(f'printf \'%s\\n\' {given} "actor_rollout_ref.rollout.name=${{INFER_BACKEND:-vllm}}" "$@"\n')
    environment = {**os.environ, "JOB": "math", **variables}
    return subprocess.run(
        ["bash", SWITCH, script, "data.seed=3"], capture_output=True, text=True, env=environment, timeout=60, check=True
    ).stdout.splitlines()


@pytest.mark.parametrize("training", TRAINING)
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_every_kind_of_script_is_accepted_with_our_keys_behind_its_own(tmp_path, engine, training):
    words = switched(tmp_path, *GIVEN, *TRAINING[training], INFER_BACKEND=engine, COORDINATOR="tcp://10.0.0.1:5570")
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", words)
    mux = check(config)
    assert (mux.job, mux.coordinator, mux.nodes.train) == ("math", "tcp://10.0.0.1:5570", ["train0"])
    assert (config.actor_rollout_ref.rollout.name, config.data.seed, mux.keys) == (engine, 3, None)


def test_without_a_name_it_says_what_is_missing(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "JOB"}
    result = subprocess.run(["bash", SWITCH, "x"], capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert result.returncode and "JOB: name of this job" in result.stderr


@pytest.mark.parametrize("folder", sorted((RECIPES / "models").iterdir()), ids=lambda folder: folder.name)
def test_recipes_bring_their_models_sizes(folder):
    assert {"model_type", "hidden_size", "num_hidden_layers", "vocab_size"} <= {*local_model_config(str(folder))}
