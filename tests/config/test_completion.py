"""What our trainer modes, and verl's own where there is no GPU, make of verl's config."""

from pathlib import Path

import pytest
import verl
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.utils.config import omega_conf_to_dataclass

from verl_mux.config.completion import complete, complete_stock_cpu, judge, logged_keys
from verl_mux.config.schema import MuxConfig, SyncConfig
from verl_mux.errors import UserError

CONFIGS = Path(verl.__file__).parent / "trainer" / "config"


def composed(*overrides):
    with initialize_config_dir(str(CONFIGS), version_base=None):
        return compose("ppo_trainer", ["actor_rollout_ref.rollout.name=sglang", *overrides])


def completed(*overrides):
    complete_stock_cpu(config := composed(*overrides))
    return config


def test_the_engine_runs_without_a_gpu_and_keeps_its_memory():
    config = completed("trainer.v1.trainer_mode=sync")
    rollout = config.actor_rollout_ref.rollout
    assert (config.trainer.device, rollout.engine_kwargs.sglang.device) == ("cpu", "cpu")
    assert not rollout.free_cache_engine and not rollout.engine_kwargs.sglang.enable_memory_saver
    assert rollout.checkpoint_engine.backend == "naive"


@pytest.mark.parametrize(("given", "used"), [("naive", "mux"), ("nccl", "nccl")])
def test_a_trainer_apart_from_its_engine_hands_weights_over_without_gpus(given, used):
    config = completed("trainer.v1.trainer_mode=separate_async", f"actor_rollout_ref.rollout.checkpoint_engine.backend={given}")
    assert config.actor_rollout_ref.rollout.checkpoint_engine.backend == used


def multiplexed(*overrides, cpu=False, **sync):
    """For our trainer mode."""
    complete(config := composed("trainer.v1.trainer_mode=mux_separate", *overrides), MuxConfig(sync=SyncConfig(**sync)), cpu)
    return config


def test_a_jobs_engines_sleep_and_its_samples_wait_for_leases():
    config = multiplexed()
    assert config.actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes == 2048  # verl's own
    assert config.actor_rollout_ref.rollout.free_cache_engine is True
    assert config.trainer.v1.sampler.custom_sampler.name == "MuxReplayBuffer"


def test_between_phases_all_states_are_on_the_host_in_shards_that_a_sync_can_send():
    config = multiplexed(*(f"{role}.strategy=fsdp" for role in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")))
    actor, ref = config.actor_rollout_ref.actor, config.actor_rollout_ref.ref
    assert (actor.strategy, ref.strategy, config.critic.strategy) == ("fsdp2", "fsdp2", "fsdp2")
    for engine in (actor.fsdp_config, ref.fsdp_config, config.critic.fsdp):
        assert engine.param_offload and engine.optimizer_offload


@pytest.mark.parametrize("cpu", [True, False])
def test_megatron_stays_megatron_with_its_states_on_the_host_and_on_a_cpu_the_bridge_that_runs_there(cpu):
    config = multiplexed("model_engine=megatron", cpu=cpu)
    for role in (config.actor_rollout_ref.actor, config.actor_rollout_ref.ref, config.critic):
        assert (role.strategy, role.megatron.vanilla_mbridge) == ("megatron", cpu)
        assert role.megatron.param_offload and role.megatron.optimizer_offload
    assert config.actor_rollout_ref.model.use_remove_padding is not cpu


def test_a_job_on_megatron_is_accepted_and_new():
    found = judged(
        "model_engine=megatron", "algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"
    )
    assert found["accepted"] and by_key(found["untried"])["actor_rollout_ref.actor.strategy"]["given"] == "megatron"
    assert by_key(found["changes"])["actor_rollout_ref.actor.megatron.param_offload"]["to"] is True


def test_the_event_log_records_what_steers_a_rollout_and_nothing_else():
    rollout = {"oversample": {"rate": 0.5}, "segments": {"segment_length": None}, "max_lag": 2, "tail": "none"}
    trainer = {"v1": {"trainer_mode": "mux_separate", "sampler": {"max_off_policy_threshold": 8}}}
    model = {"model": {"path": "secret"}, "rollout": {"n": 4}}
    assert logged_keys(OmegaConf.create({"trainer": trainer, "actor_rollout_ref": model, "mux": {"rollout": rollout}})) == [
        "trainer.v1.trainer_mode=mux_separate", "trainer.v1.sampler.max_off_policy_threshold=8", "actor_rollout_ref.rollout.n=4",
        "mux.rollout.oversample.rate=0.5", "mux.rollout.max_lag=2", "mux.rollout.tail=none",
    ]  # fmt: skip


BACKEND = "actor_rollout_ref.rollout.checkpoint_engine.backend"


def synced(*overrides, **sync):
    return multiplexed(*overrides, cpu=True, **sync).actor_rollout_ref.rollout.checkpoint_engine


@pytest.mark.parametrize("given", [(), (f"{BACKEND}=mux",)])
def test_the_sync_gets_the_keys(given):
    engine = synced(*given, timeout_s=7.0, interface="eth1")
    assert engine.backend == "mux"
    assert engine.engine_kwargs.mux == {"verify": True, "timeout_s": 7.0, "interface": "eth1", "transport": "sockets"}


def test_verl_makes_the_engine_of_them_on_both_sides():
    given = omega_conf_to_dataclass(synced(timeout_s=7.0))
    for side in ({"is_master": True}, {}):
        engine = CheckpointEngineRegistry.new(given.backend, bucket_size=1 << 20, **side, **given.engine_kwargs["mux"])
        assert engine._settings.timeout_s == 7.0


# ---------------------------------------------------------------- judging a config that was composed elsewhere

MODE, ROLLOUT = "trainer.v1.trainer_mode", "actor_rollout_ref.rollout"


def judged(*overrides):
    """Of a config as `--cfg job` prints it: plain YAML, interpolations as they stand."""
    given = OmegaConf.create(OmegaConf.to_yaml(composed(*overrides)))
    found, before = judge(given, "FILE"), OmegaConf.to_yaml(given)
    assert OmegaConf.to_yaml(given) == before
    return found


def by_key(entries):
    return {entry["key"]: entry for entry in entries}


def test_a_job_of_verls_own_mode_is_accepted_and_each_change_is_named():
    found = judged("algorithm.adv_estimator=grpo", "actor_rollout_ref.model.path=/nowhere/model", "trainer.nnodes=2")
    assert (found["accepted"], found["refusals"]) == (True, [])
    changes = by_key(found["changes"])
    assert changes["actor_rollout_ref.actor.strategy"] == {
        "key": "actor_rollout_ref.actor.strategy", "given": "fsdp", "to": "fsdp2", "reason": "verl_mux sets it",
    }  # fmt: skip
    yours = {key: (entry["given"], entry["to"]) for key, entry in changes.items() if entry["reason"] == "you set it"}
    assert yours == {MODE: ("sync", "mux_separate"), f"{ROLLOUT}.nnodes": (0, 2)}
    assert changes[f"{ROLLOUT}.engine_kwargs.sglang.sleep_on_idle"]["to"] is True
    new = by_key(found["untried"])
    assert new["trainer.nnodes"]["given"] == 2 and "algorithm.adv_estimator" not in new
    assert "its config.json is not to be had here" in new["actor_rollout_ref.model.path"]["reason"]


def test_a_job_of_our_mode_has_no_key_that_its_user_must_change():
    found = judged(f"{MODE}=mux_colocate", "actor_rollout_ref.actor.strategy=fsdp2", "algorithm.adv_estimator=grpo_passk")
    assert found["accepted"] and {entry["reason"] for entry in found["changes"]} == {"verl_mux sets it"}
    assert by_key(found["untried"])["algorithm.adv_estimator"]["given"] == "grpo_passk"


def test_an_engine_that_serves_an_adapter_reads_its_base_weights_from_the_models_files():
    lora, load = "actor_rollout_ref.model.lora_rank=8", f"{ROLLOUT}.load_format"
    changed = by_key(judged(lora)["changes"])
    assert changed[load]["to"] == "auto"
    given = judged(lora, f"{load}=safetensors")
    assert given["accepted"] and load not in by_key(given["changes"])
    assert load not in by_key(judged(lora, "actor_rollout_ref.model.lora.merge=true")["changes"])


def test_what_stands_on_gpus_of_its_own_stays_awake_there():
    keys = ["reward.reward_model.enable=true", "reward.reward_model.enable_resource_pool=true", "reward.reward_model.nnodes=1"]
    keys += ["reward.custom_reward_function.path=judge.py", "reward.reward_model.rollout.name=sglang"]
    keys += ["distillation.enabled=true", "distillation.nnodes=1"]
    keys += [f"{ROLLOUT}.name=vllm"]
    found, plain = judged(*keys), judged()
    changed = by_key(found["changes"]).keys() - by_key(plain["changes"]).keys()
    engines = ("reward.reward_model.rollout", "distillation.teacher_models.teacher_model.inference")
    assert found["accepted"] and {f"{engine}.free_cache_engine" for engine in engines} <= changed
    on_cpu = by_key(judged(*keys, "trainer.device=cpu")["changes"])
    assert all(on_cpu[f"{engine}.engine_kwargs.sglang.device"]["to"] == "cpu" for engine in engines[:1])


def test_every_refusal_is_named_and_not_only_the_first():
    found = judged(
        f"{ROLLOUT}.name=trtllm", "model_engine=torchtitan", "reward.reward_model.enable=true",
        "actor_rollout_ref.model.lora_adapter_path=a", "trainer.n_gpus_per_node=3", "+mux.seeed=1", "+mux.rollout.tail=cut",
        "algorithm.adv_estimator=grpo",
    )  # fmt: skip
    roles = ("actor_rollout_ref.actor.strategy", "actor_rollout_ref.ref.strategy")
    named = {
        "mux.seeed": 1, "mux.rollout.tail": "cut", f"{ROLLOUT}.name": "trtllm", f"{ROLLOUT}.tensor_model_parallel_size": 2,
        "reward.reward_model.enable": True, "reward.custom_reward_function.path": None, **dict.fromkeys(roles, "torchtitan"),
        "actor_rollout_ref.model.lora_adapter_path": "a",
    }  # fmt: skip
    assert {entry["key"]: entry["given"] for entry in found["refusals"]} == named and not found["accepted"]
    assert all(entry["key"].rpartition(".")[2] in entry["reason"] for entry in found["refusals"][:3])
    assert MODE in by_key(found["changes"])


def test_a_models_own_config_says_what_is_new_about_it(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"n_routed_experts": 8, "vision_config": {"depth": 2}, "layer_types": ["sliding_attention"]}'
    )
    sglang, vllm = (judged(f"{ROLLOUT}.name={name}", f"actor_rollout_ref.model.path={tmp_path}") for name in ("sglang", "vllm"))
    assert "sliding-window attention" in by_key(sglang["refusals"])["actor_rollout_ref.model.path"]["reason"]
    assert vllm["accepted"]
    new = [entry["reason"] for entry in vllm["untried"] if entry["key"] == "actor_rollout_ref.model.path"]
    assert new == ["no job has run a model with images", "no job has run a model with experts"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"a": 1}, "FILE is no whole config of verl's: data is None"),
        ({"data": "${nothing}"}, "FILE: Interpolation key 'nothing'"),
    ],
)
def test_what_is_no_config_of_verls_is_one_line(given, said):
    with pytest.raises(UserError, match=f"^{said}"):
        judge(OmegaConf.create(given), "FILE")


def test_a_section_that_is_none_is_one_line():
    with pytest.raises(UserError, match="rollout.engine_kwargs.vllm is 3; keys are needed there"):
        judged(f"{ROLLOUT}.engine_kwargs.vllm=3")
