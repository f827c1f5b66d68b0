"""What contradicts a trainer mode, would keep device memory asleep or lose weights, or makes no sense under mux.rollout, is
refused by name before Ray starts."""

from __future__ import annotations

import dataclasses
import json

import pytest
from omegaconf import OmegaConf

from tests.config.test_schema import refusal, verl_config
from verl_mux.config import job_checks, preflight
from verl_mux.config.job_checks import check, model_config, refused_surroundings, sliding_window
from verl_mux.config.rollout_checks import Surroundings, refused_rollout
from verl_mux.config.schema import RolloutConfig, convert, raise_first
from verl_mux.errors import UserError
from verl_mux.rollout.control.oversampling import LagLimit
from verl_mux.rollout.control.segments import SegmentLimits


def check_surroundings(config) -> None:
    raise_first(refused_surroundings(config, model_config(config)))


REF, MODEL = "actor_rollout_ref", "actor_rollout_ref__model"
SGLANG = f"{REF}__rollout__engine_kwargs__sglang"


def vllm(**given):
    return {f"{REF}__rollout__name": "vllm", f"{REF}__rollout__engine_kwargs__vllm": given}


def own(role, **given):
    """A reward model or teachers on GPUs of their own."""
    keys = {"nnodes": 1, "n_gpus_per_node": 2, **given}
    if role == "reward":
        model = {"enable": True, "enable_resource_pool": True, **keys}
        return {"reward": {"reward_model": model, "custom_reward_function": {"path": "judge.py"}}}
    return {"distillation": {"enabled": True, **keys}}


def megatron(**given):
    return {f"{REF}__actor__strategy": "megatron", f"{REF}__actor__megatron": given}


def veomni(**given):
    return {f"{REF}__actor__strategy": "veomni", f"{REF}__actor__veomni": given}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trainer__v1__trainer_mode": "mux_seperate"}, ["mux_seperate is unknown", "mux_separate, mux_colocate"]),
        ({"actor_rollout_ref__rollout__name": "trtllm"}, ["rollout.name=sglang or vllm", "given trtllm"]),
        ({"actor_rollout_ref__rollout__nnodes": 0}, ["rollout.nnodes is 0; a number of 1", "needs a rollout pool"]),
        ({"actor_rollout_ref__rollout__n_gpus_per_node": 0}, ["n_gpus_per_node is 0; a number of 1", "needs a rollout pool"]),
        ({"actor_rollout_ref__rollout__n_gpus_per_node": 3}, ["3 rollout GPUs", "replicas of 2 GPUs", "multiple"]),
        ({"algorithm__filter_groups": {"enable": True}}, ["filter_groups.metric is None; needed: reward, or a key"]),
        (
            {"algorithm__filter_groups": {"enable": True, "metric": "acc", "max_inflight_gen_batches": 0}},
            ["filter_groups.max_inflight_gen_batches is 0; a number of 1 or more"],
        ),
        (
            {"reward": {"reward_model": {"enable": True}}},
            ["reward.reward_model.enable=True", "do not cover it; reward.reward_model.en"],
        ),
        (
            {"reward__reward_model": {"enable": True, "enable_resource_pool": True, "nnodes": 1, "n_gpus_per_node": 1}},
            ["without reward.custom_reward_function.path", "needed: a function that asks"],
        ),
        (own("reward", nnodes=0), ["reward.reward_model.nnodes is 0; a number of 1 or more is needed"]),
        (own("distillation"), ["distillation.enabled=True does not go with", "rollout.name=sglang", "allowed: vllm"]),
        (own("distillation", n_gpus_per_node=None), ["distillation.n_gpus_per_node is None; a number of 1 or more"]),
        ({"trainer__v1__mux_separate": {"parameter_sync_step": 4}}, ["mux_separate.parameter_sync_step is 4", "on-policy"]),
        ({f"{REF}__rollout__quantization": "fp8"}, ["rollout.quantization=fp8 is not supported"]),
        ({f"{SGLANG}__quantization": "fp8"}, ["engine_kwargs.sglang.quantization=fp8 is not supported"]),
        ({f"{SGLANG}__torchao_config": "int8wo"}, ["engine_kwargs.sglang.torchao_config=int8wo is not supported"]),
        (
            {f"{SGLANG}__json_model_override_args": '{"quantization_config": {}}'},
            ["of its quantization_config, its scales"],
        ),
        ({f"{SGLANG}__speculative_algorithm": "EAGLE"}, ["speculative_algorithm=EAGLE is not supported"]),
        ({f"{SGLANG}__speculative_algorithm": "STANDALONE"}, ["allowed: NGRAM, null"]),
        ({f"{MODEL}__mtp": {"enable": True, "enable_rollout": True}}, ["model.mtp.enable_rollout=True is not supported"]),
        (
            {f"{SGLANG}__enable_memory_saver": False},
            ["enable_memory_saver=False is not", "would keep all"],
        ),
        (vllm(quantization="fp8"), ["engine_kwargs.vllm.quantization=fp8 is not supported"]),
        (vllm(hf_overrides={"quantization_config": {}}), ["vllm.hf_overrides=", "of its quantization_config, its scales"]),
        (vllm(speculative_config='{"method": "eagle"}'), ["nothing brings a draft model back", "allowed: method ngram, null"]),
        (vllm(enable_sleep_mode=False), ["enable_sleep_mode=False is not", "would keep all"]),
        (vllm(worker_cls="mine.Worker"), ["worker_cls=mine.Worker is not", "allowed: verl_mux.rollout.engine.vllm"]),
        ({f"{REF}__rollout__checkpoint_engine": {"backend": "nccl"}}, ["checkpoint_engine.backend is 'nccl'", "set mux"]),
        ({"trainer__use_v1": False}, ["trainer.use_v1=False starts verl's legacy trainer"]),
        ({"trainer__nnodes": ""}, ["trainer.nnodes is ''; a number of 1 or more is needed"]),
        ({f"{MODEL}__lora__rank": 8}, ["model.lora.rank=8: verl's trainer", "reads actor_rollout_ref.model.lora_rank; set that"]),
        (megatron() | {f"{MODEL}__lora_rank": 8}, ["model.lora_rank=8: verl's", "reads actor_rollout_ref.model.lora.rank; set"]),
        (megatron(vanilla_mbridge=True) | {f"{MODEL}__lora__rank": 8}, ["model.lora.rank with", "exports adapters; allowed:"]),
        (
            {f"{MODEL}__lora_adapter_path": "a"},
            ["lora_adapter_path=a: verl trains no adapter", "set actor_rollout_ref.model.lora_r"],
        ),
        (
            {f"{MODEL}__lora_rank": 8, "mux__device__sleep_level": 2},
            ["mux.device.sleep_level=2: an engine that serves an adapter keeps", "or actor_rollout_ref.model.lora.merge=true"],
        ),
        (
            {f"{MODEL}__lora_rank": 8, f"{REF}__rollout__data_parallel_size": 2},
            ["data_parallel_size=2 is not supported", "SGLang then takes no new adapter"],
        ),
        ({f"{REF}__actor__strategy": "megatron"}, ["strategy=megatron lacks Megatron's keys", "set model_engine=megatron"]),
        (megatron() | {f"{REF}__actor___target_": "verl.workers.config.FSDPActorConfig"}, ["set model_engine=megatron"]),
        (megatron(dynamic_context_parallel=True), ["megatron.dynamic_context_parallel=True is not supported", "allowed: False"]),
        (megatron(use_megatron_fsdp=True), ["use_megatron_fsdp=True", "no job has shown that its states leave the device"]),
        (megatron(use_distributed_optimizer=False), ["moves the distributed optimizer's states alone; allowed: True"]),
        (megatron() | {f"{REF}__actor__optim__optimizer": "muon"}, ["optim.optimizer=muon", "moves Adam's", "allowed: adam"]),
        (veomni(enable_fsdp_offload=True), ["actor.veomni.enable_fsdp_offload=True", "no job has shown", "allowed: False"]),
        ({f"{REF}__actor__strategy": "torchtitan"}, ["no job has shown", "allowed: fsdp, fsdp2, megatron, veomni"]),
        ({f"{REF}__ref__strategy": "fsdp_turbo"}, ["actor_rollout_ref.ref.strategy=fsdp_turbo"]),
        ({"critic__strategy": "torchtitan", "algorithm__adv_estimator": "gae"}, ["critic.strategy=torchtitan"]),
    ],
)
def test_it_is_refused_by_name(changes, words):
    text = refusal(verl_config({}, **changes), check)
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm__filter_groups": {"enable": True, "metric": "reward", "max_num_gen_batches": 10}},
        own("reward"),
        {**own("distillation"), **vllm()},
        {f"{MODEL}__lora": {"rank": 8, "merge": True}},
        {f"{MODEL}__lora_rank": 8, f"{MODEL}__lora_adapter_path": "a"},
        megatron(vanilla_mbridge=False) | {f"{MODEL}__lora__rank": 8},
        {f"{SGLANG}__speculative_algorithm": "NGRAM"},
        {f"{SGLANG}__json_model_override_args": '{"rope_theta": 10000}'},
        vllm(speculative_config={"method": "ngram"}, kv_cache_dtype="fp8"),
        {f"{MODEL}__mtp": {"enable": True, "enable_rollout": False}},
        {f"{REF}__actor__strategy": "fsdp"},
        {"critic__strategy": "torchtitan", "algorithm__adv_estimator": "grpo"},
        veomni(enable_fsdp_offload=False),
        megatron(use_distributed_optimizer=True, tensor_model_parallel_size=2) | {f"{REF}__actor__optim__optimizer": "adam"},
    ],
)
def test_what_is_right_passes(changes):
    assert check(verl_config({}, **changes)) is not None


NUMBERS = [*job_checks._GPUS, *job_checks._PARALLEL, *job_checks._POOL, *job_checks._OPTIONAL]
NO_NUMBERS = ["8", "8.0", "eight", "", 8.0, True, -5, 2**31, 10**40, [], [8], {"a": 1}]


@pytest.mark.parametrize("mode", job_checks.MODES)
@pytest.mark.parametrize("key", NUMBERS)
def test_what_is_no_number_is_one_line_that_names_the_key(key, mode):
    for given in [*NO_NUMBERS, None, 0]:
        config = verl_config({}, trainer__v1__trainer_mode=mode)
        OmegaConf.update(config, key, given, force_add=True)
        if (
            (key == "trainer.save_freq" and given in (0, -5))
            or (key.endswith("num_cpus") and given == 0)
            or given is None
            and key in job_checks._OPTIONAL
        ):
            assert check(config) is not None
        elif key not in job_checks._POOL or mode == "mux_separate":
            assert refusal(config, check).startswith(f"{key} is "), given
        list(job_checks.refused(config))  # the others are looked for all the same


def test_of_verls_own_modes_the_keys_that_mux_reads_are_numbers_too():
    config = verl_config({"rollout": {"trigger": {"n_min": 2}}}, trainer__v1__trainer_mode="colocate_async")
    OmegaConf.update(config, "data.train_batch_size", "8", force_add=True)
    assert refusal(config, preflight.complete_stock_mode) == "data.train_batch_size is '8'; a number of 0 or more is needed"


@pytest.mark.parametrize("package", ["verl", "sglang"])
def test_another_version_of_verl_or_the_engine_is_untried_and_a_start_wants_a_word_for_it(monkeypatch, package):
    monkeypatch.setattr(job_checks, "version_of", lambda name: "99.1" if name == package else None)
    config = verl_config({})
    (refused,) = job_checks.refused_versions(config)
    assert str(refused).startswith(f"{package} 99.1 is untried, and installed here; tried: ")
    found = {key: (value, why) for key, value, why in job_checks.untried(config, {})}
    assert found[package][0] == "99.1" and job_checks.ANY_VERSION in found[package][1]
    monkeypatch.setenv(job_checks.ANY_VERSION, "1")
    assert not list(job_checks.refused_versions(config))


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_trainers_may_have_expandable_segments(monkeypatch, variable):
    monkeypatch.setenv(variable, "expandable_segments:True")
    check_surroundings(verl_config({}))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window attention (layer_types)"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "quantized (quantization_config): its scales do not survive a sleep",
        ),
        ({"text_config": {"compression_config": {"a": 1}}}, "is quantized (compression_config)"),
        ({"sliding_window": 4096, "use_sliding_window": False, "quantization_config": None}, None),
        ({"model_type": "qwen2_5_vl"}, "is a qwen2_5_vl model: sglang does not know its weights by verl's names"),
        ({"model_type": "qwen3_vl"}, None),
    ],
)
def test_a_model_whose_memory_would_stay_or_not_come_back_is_refused(tmp_path, model, said):
    (tmp_path / "config.json").write_text(json.dumps(model))
    config = OmegaConf.merge(verl_config({}), {"actor_rollout_ref": {"model": {"path": str(tmp_path)}}})
    if said is None:
        return check_surroundings(config)
    assert said in refusal(config, check_surroundings)


ATTENTION = f"{MODEL}__override_config"
SDPA = {"attn_implementation": "sdpa"}


@pytest.fixture
def gpu(monkeypatch):
    """A machine with a GPU whose packages are these; returns how often a hub was asked."""
    asked = []

    def made(flash=False, hub=False, cuda=(13, 0)):
        monkeypatch.delenv("VERL_PLATFORM", raising=False)
        for name, answer in {"accelerator_present": True, "torch_cuda": cuda, "has_flash_attention": flash}.items():
            monkeypatch.setattr(job_checks, name, lambda answer=answer: answer)
        monkeypatch.setattr(job_checks, "hub_has_flash_attention", lambda: asked.append(1) or hub)
        return asked

    return made


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ["model.override_config.attn_implementation=null, so flash_attention_2: it is not installed here", "or set +actor"]),
        ({ATTENTION: {"attn_implementation": "flash_attention_2"}}, ["attn_implementation=flash_attention_2: it is not"]),
        ({ATTENTION: SDPA, "critic": {"enable": True, "model": {}}}, ["critic.model.override_config.attn_implementation=null"]),
        ({ATTENTION: SDPA, "critic": {"enable": True, "model": {"override_config": SDPA}}}, ["verl loads no critic"]),
        ({f"{REF}__actor": {"fsdp_config": {"ulysses_sequence_parallel_size": 2}}},
         ["install flash-attn, sdpa does not go with ulysses_sequence_parallel_size=2"]),
    ],
)  # fmt: skip
def test_attention_that_no_package_and_no_hub_has_is_refused_before_anything_starts(gpu, changes, words):
    gpu()
    said = refusal(verl_config({}, **changes), check_surroundings)
    assert all(word in said for word in words), said


@pytest.mark.parametrize(
    ("packages", "changes", "questions"),
    [
        ({"flash": True}, {}, 0),
        ({"hub": True}, {}, 1),
        ({}, {ATTENTION: SDPA}, 0),
        ({"cuda": None}, {}, 0),
    ],
)
def test_attention_that_is_at_hand_passes_and_a_hub_is_asked_only_for_what_is_missing(gpu, packages, changes, questions):
    asked = gpu(**packages)
    check_surroundings(verl_config({}, **changes))
    assert len(asked) == questions


@pytest.mark.parametrize("role", ["actor_rollout_ref.actor", "actor_rollout_ref.ref"])
@pytest.mark.parametrize(("cpu", "kind", "said"), [
    (False, "sdpa", "it does not go with actor_rollout_ref.model.override_config.attn_implementation=sdpa"),
    (True, None, "a CPU has no flash-attn"),
    (False, "flash_attention_3", None),
    (False, None, None),
])  # fmt: skip
def test_sequences_are_shared_between_ranks_with_flash_attention_alone(gpu, monkeypatch, role, cpu, kind, said):
    gpu(flash=True)
    monkeypatch.setenv("VERL_PLATFORM", "cpu" if cpu else "cuda")
    config = verl_config({})
    OmegaConf.update(config, f"{role}.fsdp_config.ulysses_sequence_parallel_size", 2, force_add=True)
    OmegaConf.update(config, "actor_rollout_ref.model.override_config", {"attn_implementation": kind}, force_add=True)
    if said is None:
        return check_surroundings(config)
    assert f"{role}.fsdp_config.ulysses_sequence_parallel_size=2: {said}" in refusal(config, check_surroundings)


@pytest.mark.parametrize(("cpu", "given", "missing"), [
    (False, {}, "the package megatron.bridge is not installed here; install it, or use fsdp2"),
    (False, {"vanilla_mbridge": True}, "the package mbridge is not installed here"),
    (True, {}, "the package mbridge is not installed here"),
])  # fmt: skip
def test_megatron_needs_its_packages_and_no_flash_attention(gpu, monkeypatch, cpu, given, missing):
    gpu()
    monkeypatch.setenv("VERL_PLATFORM", "cpu" if cpu else "cuda")
    config = verl_config({}, **megatron(**given))
    monkeypatch.setattr(job_checks, "is_installed", lambda package: True)
    check_surroundings(config)
    monkeypatch.setattr(job_checks, "is_installed", lambda package: package == "megatron.core")
    assert missing in refusal(config, check_surroundings)


def test_a_package_below_one_that_is_not_installed_is_not_installed():
    assert not job_checks.is_installed("no_such_package.part") and job_checks.is_installed("importlib.util")


def test_a_machine_that_runs_its_jobs_on_the_cpu_needs_no_flash_attention(gpu, monkeypatch):
    gpu()
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    check_surroundings(verl_config({}))


def test_a_model_named_on_a_hub_is_looked_at_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    config = OmegaConf.merge(verl_config({}), {"actor_rollout_ref": {"model": {"path": "someone/windows"}}})
    check_surroundings(config)  # it cannot be fetched: its loader will report it
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


@pytest.mark.parametrize("mode", ["sync", "colocate_async", None])
def test_a_mode_that_is_not_ours_is_not_ours_to_check(mode):
    assert check(verl_config({"nonsense": 1}, trainer__v1__trainer_mode=mode)) is None


def test_ours_are_checked():
    assert check(verl_config({"seed": 2})).seed == 2
    assert check(verl_config({}, trainer__v1__trainer_mode="mux_colocate", actor_rollout_ref__rollout__nnodes=0)).job == "exp"
    assert "unknown key mux.nonsense" in refusal(verl_config({"nonsense": 1}), check)


def test_a_colocated_job_of_a_coordinator_names_the_same_nodes_twice():
    nodes = {"rollout": ["n0", "n1"], "train": ["n1", "n0"]}
    mux = {"coordinator": "tcp://127.0.0.1:5570", "nodes": nodes}
    assert check(verl_config(mux, trainer__v1__trainer_mode="mux_colocate")).nodes.train == ["n1", "n0"]
    nodes["train"] = ["n2"]
    text = refusal(verl_config(mux, trainer__v1__trainer_mode="mux_colocate"), check)
    assert "mux.nodes.rollout is ['n0', 'n1']" in text and "['n2']" in text


# ---------------------------------------------------------------- keys under mux.rollout


AROUND = Surroundings("mux_separate", train_batch_size=8, samples_per_group=4, max_response_length=1000, engine_requests=64)


def load(given, around) -> RolloutConfig:
    config = convert(given, RolloutConfig, "mux.rollout")
    raise_first(refused_rollout(config, around))
    return config


def around(**changes) -> Surroundings:
    return dataclasses.replace(AROUND, **changes)


GROWS = {"growth": {"own": ["r0"]}}


def test_nothing_given_is_the_default_and_every_part_is_off():
    config = load({}, AROUND)
    assert config == RolloutConfig() and config.segment_limits(1000) is None and not config.controlled


def test_auto_order_follows_whether_the_tail_is_cut():
    auto = {"dispatch": {"order": "auto"}}
    assert load({}, AROUND).launch_order == "fifo"
    assert load(auto, AROUND).launch_order == "fifo"
    assert load({**auto, "segments": {"segment_length": 100}}, AROUND).launch_order == "sjf"
    assert load({"dispatch": {"order": "sjf"}}, AROUND).controlled


def test_segment_limits_fall_back_on_the_response_length():
    assert load({"segments": {"segment_length": 100}}, AROUND).segment_limits(1000) == SegmentLimits(100, 4, 1000)
    every = {"segment_length": 100, "max_segments": 2, "max_length": 500}
    assert load({"segments": every}, AROUND).segment_limits(1000) == SegmentLimits(100, 2, 500)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"oversample": {"rate": -0.1}}, "mux.rollout.oversample.rate=-0.1 is not possible; allowed: float, 0 or more"),
        ({"oversample": {"rate": 1.5}}, "would launch 80 responses and the engines hold 64 at once, so at most 1"),
        ({"oversample": {"rate": "much"}}, "mux.rollout.oversample.rate='much' is not possible; allowed: float"),
        ({"oversample": {"rate": float("nan")}}, "rate=nan is not possible; allowed: float"),
        ({"oversample": {"max_cuts": 1.5}}, "max_cuts=1.5 is not possible; allowed: int"),
        ({"oversample": {"ratio": 1}}, "unknown key mux.rollout.oversample.ratio; allowed here: rate, max_cuts"),
        ({"overSample": {}}, "unknown key mux.rollout.overSample; allowed here: oversample, max_lag"),
        ({"oversample": 3}, "mux.rollout.oversample is 3; it holds the keys rate, max_cuts"),
        ({"segments": {"segment_length": 2000}}, "segments.segment_length=2000 is not possible; allowed: 1 to 1000"),
        ({"segments": {"segment_length": 600, "max_length": 500}}, "allowed: 1 to 500, the maximum"),
        ({"segments": {"max_length": 2000}}, "1 to data.max_response_length=1000"),
        ({"segments": {"treatment": "tois"}}, "segments.treatment='tois' is not possible; allowed: tis, mask, pois"),
        ({"max_lag": 1}, "max_lag=1 is not possible; allowed: null where no response goes on under newer weights"),
        ({"max_lag": -1, "segments": {"segment_length": 9}}, "max_lag=-1 is not possible; allowed: int | None, 0 or more"),
        ({"max_lag_strategy": "stop"}, "max_lag_strategy='stop' is not possible; allowed: protect, wait, drop"),
        (
            {"segments": {"segment_length": 9}, "oversample": {"max_cuts": 1}},
            "oversample.max_cuts=1 is not possible; allowed: its default with mux.rollout.segments.segment_length",
        ),
        ({"tail": "cut"}, "mux.rollout.tail='cut' is not possible; allowed: none, defer"),
        ({"tail": "defer", "oversample": {"rate": 1}}, "tail=defer is not possible with mux.rollout.oversample.rate=1.0"),
        ({"dispatch": {"order": "lifo"}}, "dispatch.order='lifo' is not possible; allowed: fifo, sjf, auto"),
        ({"dispatch": {"predictor": "bert"}}, "dispatch.predictor=bert is not possible; allowed: default, fifo"),
        ({"migration": "perhaps"}, "migration='perhaps' is not possible; allowed: bool"),
        (
            {"migration": True, "oversample": {"rate": 0.5}},
            "mux.rollout.migration=True is not possible: over-sampling and segments cut the tail off",
        ),
        ({"trigger": {"n_min": 0}}, "trigger.n_min=0 is not possible; allowed: int | None, 1 or more"),
        ({"trigger": {"t_max_s": 0}}, "trigger.t_max_s=0 is not possible; allowed: float, above 0 seconds"),
        ({"trigger": {"entropy": [0.2, 0.1]}}, "entropy=[0.2, 0.1] is not possible; allowed: [low, high], 0 <= low < high"),
        ({"trigger": {"entropy": 3}}, "entropy=3 is not possible; allowed: tuple[float, float] | None"),
        ({"trigger": {"n_min": 4}}, "mux.rollout.trigger.n_min=4 does not go with trainer.v1.trainer_mode=mux_separate"),
    ],
)
def test_bad_values_are_refused_in_one_line(given, said):
    with pytest.raises(UserError) as error:
        load(given, AROUND)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("given", [{"tail": "defer"}, {"migration": True}])
def test_what_plans_a_rollouts_end_does_not_go_with_groups_that_are_replaced(given):
    with pytest.raises(UserError, match=r"is not possible with algorithm.filter_groups.enable=True, which starts new prompts"):
        load(given, around(filters_groups=True, rollout_nodes=["r0", "r1"]))


@pytest.mark.parametrize(
    ("mode", "given", "said"),
    [
        ("colocate_async", {"oversample": {"rate": 0.5}}, "it cuts off and resumes unfinished responses already"),
        ("separate_async", {"segments": {"segment_length": 9}}, "it has no barrier whose tail could be cut off"),
        ("sync", {"oversample": {"rate": 1}}, "allowed trainer modes: mux_separate, mux_colocate"),
        ("mux_colocate", {"migration": True}, "allowed trainer modes: mux_separate"),
        ("sync", {"tail": "defer"}, "allowed trainer modes: mux_separate, mux_colocate"),
        ("sync", {"dispatch": {"order": "sjf"}}, "allowed trainer modes: mux_separate, mux_colocate"),
        ("colocate_async", {"dispatch": {"order": "auto"}}, "its trainer hands prompts out"),
        ("mux_colocate", GROWS, "trainer_mode=mux_colocate: only a rollout pool"),
        # Growth goes without another hand on the tail.
        ("mux_separate", {**GROWS, "oversample": {"rate": 0.5}}, "=['r0'] is not possible with mux.rollout.oversample.rate=0.5"),
        ("mux_separate", {**GROWS, "migration": True}, "is not possible with mux.rollout.migration=True"),
    ],
)
def test_what_makes_no_sense_in_a_trainer_mode_or_together_is_refused_by_name(mode, given, said):
    with pytest.raises(UserError) as error:
        load(given, around(trainer_mode=mode, engine_requests=None, rollout_nodes=["r0", "r1"]))
    assert said in str(error.value)


def test_migration_needs_a_second_rollout_node():
    for enough in (["r0", "r1"], ["auto"]):
        assert load({"migration": True}, around(rollout_nodes=enough)).controlled
    with pytest.raises(UserError, match="names one node; two or more are needed"):
        load({"migration": True}, around(rollout_nodes=["r0"]))


@pytest.mark.parametrize("own", [[], ["r2"], ["r0", "r1"], ["r0", "r2"]])
def test_a_rollout_that_grows_owns_some_of_its_nodes_and_not_all(own):
    two = around(rollout_nodes=["r0", "r1"])
    assert load({"growth": {"own": ["r1"]}}, two).controlled
    with pytest.raises(UserError, match=r"growth.own=.* allowed: some of mux.nodes.rollout=\['r0', 'r1'\], and not all"):
        load({"growth": {"own": own}}, two)
    with pytest.raises(UserError, match="allowed: null with one rollout node, or where the coordinator chooses them"):
        load(GROWS, around(rollout_nodes=["auto"]))


def test_the_limit_of_lag_is_the_keys_or_what_verls_threshold_leaves():
    cuts = {"oversample": {"rate": 0.5}}
    assert load(cuts, AROUND).lag_limit(8) == LagLimit(7, "protect")
    assert load(cuts, AROUND).lag_limit(None) is None
    assert load({**cuts, "max_lag": 1, "max_lag_strategy": "wait"}, AROUND).lag_limit(8) == LagLimit(1, "wait")
    assert load({}, AROUND).lag_limit(8) is None
