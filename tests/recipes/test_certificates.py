"""Every recipe composes through verl's own config, passes our check, and its certificate fits the pools beside it."""

import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from tests.memory.certificate.models import QWEN3_8B, QWEN3_32B, QWEN25_7B
from verl_mux.config import search_path  # noqa: F401  (registers at import)
from verl_mux.config.job_checks import check
from verl_mux.coordinator.config import read_config
from verl_mux.launcher.plan_memory import certificate_of

RECIPES = Path(__file__).parents[2] / "recipes"
MODELS = {"Qwen/Qwen2.5-7B-Instruct": QWEN25_7B, "Qwen/Qwen3-32B": QWEN3_32B, "Qwen/Qwen3-8B": QWEN3_8B}
# Folder, and of each job that shares its pools: its config and its name.
SHARED = {
    "two_7b_grpo": [("qwen_7b_grpo", "math"), ("qwen_7b_grpo", "code")],
    "two_7b_colocated": [("colocated", "math"), ("colocated", "code")],
    "h20_h800": [("gsm8k", "gsm8k"), ("dapo_math", "dapo_math")],
    "one_32b": [("one_32b", "math32b")],
    "tools_and_short": [("tools", "tools"), ("short", "short")],
    "long_reasoning": [("reasoning", "reasoning")],
}


@pytest.fixture(scope="module", params=SHARED)
def recipe(request, tmp_path_factory):
    """The folder's name, and its composed configs as files, with models in the place of names on a hub."""
    files, at = [], tmp_path_factory.mktemp(request.param)
    for config, job in SHARED[request.param]:
        with initialize_config_dir(str(RECIPES / request.param), version_base=None):
            composed = compose(config, [f"mux.job={job}", "data.train_files=t.parquet", "data.val_files=v.parquet"])
        model = at / composed.actor_rollout_ref.model.path.replace("/", "_")
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(MODELS[composed.actor_rollout_ref.model.path]))
        composed.actor_rollout_ref.model.path = str(model)
        files.append(at / f"{job}.yaml")
        files[-1].write_text(OmegaConf.to_yaml(composed))
    return request.param, files


def test_its_keys_pass_our_check_and_its_nodes_have_its_gpus(recipe):
    folder, files = recipe
    pools = read_config(RECIPES / folder / "pools.yaml")
    for file in files:
        config = OmegaConf.load(file)
        mux = check(config)
        assert mux is not None
        for name in (*mux.nodes.rollout, *mux.nodes.train):
            assert pools.node(name).gpus >= config.trainer.n_gpus_per_node


def test_its_certificate_fits_and_says_of_what(recipe):
    folder, files = recipe
    found = certificate_of(files, RECIPES / folder / "pools.yaml", None)
    assert found.fits, found.why_not
    kinds = {phase: set(told.bytes) for gpu in found.gpus.values() for phase, told in gpu.phases.items()}
    assert {"weights", "kv_cache", "graphs", "activations", "others"} <= kinds["rollout"]
    assert {"weights", "gradients", "optimizer", "activations", "others"} <= kinds["train"] and "weights" in kinds["sync"]
    for file in files:
        config = OmegaConf.load(file)
        assert found.largest_gpu_memory_utilization[config.mux.job] >= config.actor_rollout_ref.rollout.gpu_memory_utilization
