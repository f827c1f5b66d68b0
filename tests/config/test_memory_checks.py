"""What would keep device memory asleep, or lose weights, is refused by name before Ray starts."""

import json

import pytest
from omegaconf import OmegaConf

from tests.config.test_schema import refusal, verl_config
from verl_mux.config.memory_checks import check_surroundings, sliding_window
from verl_mux.config.schema import check

REF, MODEL = "actor_rollout_ref", "actor_rollout_ref__model"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({f"{REF}__rollout__quantization": "fp8"}, "rollout.quantization=fp8 is not supported"),
        ({f"{REF}__rollout__engine_kwargs__sglang__enable_memory_saver": False}, "enable_memory_saver=False: a sleeping engine"),
        ({f"{MODEL}__lora_rank": 8}, "model.lora_rank=8 needs actor_rollout_ref.model.lora.merge=true"),
        ({f"{MODEL}__lora__rank": 8}, "model.lora.rank=8 needs"),
        ({f"{MODEL}__lora_adapter_path": "a"}, "model.lora_adapter_path=a needs"),
        ({f"{REF}__actor__strategy": "megatron"}, "actor_rollout_ref.actor.strategy=megatron is not supported"),
        ({f"{REF}__actor__strategy": "veomni"}, "allowed: fsdp, fsdp2"),
        ({f"{REF}__ref__strategy": "torchtitan"}, "actor_rollout_ref.ref.strategy=torchtitan"),
        ({"critic__strategy": "megatron", "algorithm__adv_estimator": "gae"}, "critic.strategy=megatron"),
    ],
)
def test_it_is_refused_by_name(changes, words):
    assert words in refusal(verl_config({}, **changes), check)


@pytest.mark.parametrize(
    "changes",
    [
        {f"{MODEL}__lora": {"rank": 8, "merge": True}},
        {f"{REF}__actor__strategy": "fsdp"},
        {"critic__strategy": "megatron", "algorithm__adv_estimator": "grpo"},
    ],
)
def test_what_is_right_passes(changes):
    assert check(verl_config({}, **changes)) is not None


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_are_refused_under_both_names(monkeypatch, variable):
    monkeypatch.setenv(variable, "max_split_size_mb:64,expandable_segments: True")
    assert "frees nothing with expandable segments" in refusal(verl_config({}), check_surroundings)


def test_a_model_with_sliding_windows_is_refused(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps({"layer_types": ["full_attention", "sliding_attention"]}))
    config = OmegaConf.merge(verl_config({}), {"actor_rollout_ref": {"model": {"path": str(tmp_path)}}})
    assert "sliding-window attention (layer_types)" in refusal(config, check_surroundings)
    (tmp_path / "config.json").write_text(json.dumps({"sliding_window": 4096, "use_sliding_window": False}))
    check_surroundings(config)


def test_windows_are_known_by_either_key():
    assert sliding_window({"sliding_window": 4096, "use_sliding_window": True}) == "use_sliding_window"
    assert sliding_window({"text_config": {"layer_types": ["chunked_attention"]}}) == "layer_types"
    assert sliding_window({"layer_types": ["full_attention"], "sliding_window": None}) is None
