"""What would keep device memory asleep, or lose weights, is refused by name before Ray starts."""

import json

import pytest
from omegaconf import OmegaConf

from tests.config.test_schema import refusal, verl_config
from verl_mux.config.job_checks import check, check_surroundings, sliding_window

REF, MODEL = "actor_rollout_ref", "actor_rollout_ref__model"
SGLANG = f"{REF}__rollout__engine_kwargs__sglang"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({f"{REF}__rollout__quantization": "fp8"}, "rollout.quantization=fp8 is not supported"),
        ({f"{SGLANG}__quantization": "fp8"}, "engine_kwargs.sglang.quantization=fp8 is not supported"),
        ({f"{SGLANG}__torchao_config": "int8wo"}, "engine_kwargs.sglang.torchao_config=int8wo is not supported"),
        ({f"{SGLANG}__json_model_override_args": '{"quantization_config": {}}'}, "override_args has a quantization_config"),
        ({f"{SGLANG}__speculative_algorithm": "EAGLE"}, "speculative_algorithm=EAGLE is not supported"),
        ({f"{SGLANG}__speculative_algorithm": "STANDALONE"}, "allowed: NGRAM, null"),
        ({f"{MODEL}__mtp": {"enable": True, "enable_rollout": True}}, "model.mtp.enable_rollout=True is not supported"),
        ({f"{SGLANG}__enable_memory_saver": False}, "enable_memory_saver=False: a sleeping engine"),
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
        {f"{SGLANG}__speculative_algorithm": "NGRAM"},
        {f"{SGLANG}__json_model_override_args": '{"rope_theta": 10000}'},
        {f"{MODEL}__mtp": {"enable": True, "enable_rollout": False}},
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


@pytest.mark.parametrize(
    "model", [{"quantization_config": {"quant_method": "fp8"}}, {"text_config": {"compression_config": {"a": 1}}}]
)
def test_a_model_whose_file_is_quantized_is_refused(tmp_path, model):
    (tmp_path / "config.json").write_text(json.dumps(model))
    config = OmegaConf.merge(verl_config({}), {"actor_rollout_ref": {"model": {"path": str(tmp_path)}}})
    assert "is quantized (" in (told := refusal(config, check_surroundings)) and "scales do not survive a sleep" in told
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": None}))
    check_surroundings(config)


def test_a_model_named_on_a_hub_is_looked_at_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    config = OmegaConf.merge(verl_config({}), {"actor_rollout_ref": {"model": {"path": "someone/windows"}}})
    check_surroundings(config)  # it cannot be fetched: whoever loads it will say so
    cached = tmp_path / "models--someone--windows"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("1" * 40)
    (cached / "snapshots" / ("1" * 40)).mkdir(parents=True)
    (cached / "snapshots" / ("1" * 40) / "config.json").write_text(json.dumps({"layer_types": ["sliding_attention"]}))
    assert "path=someone/windows has sliding-window attention (layer_types)" in refusal(config, check_surroundings)


def test_windows_are_known_by_either_key():
    assert sliding_window({"sliding_window": 4096, "use_sliding_window": True}) == "use_sliding_window"
    assert sliding_window({"text_config": {"layer_types": ["chunked_attention"]}}) == "layer_types"
    assert sliding_window({"layer_types": ["full_attention"], "sliding_window": None}) is None
