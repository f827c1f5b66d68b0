"""Every verl and SGLang name that we rely on is there and takes what we hand it, and what we rely on is what they do.

One process imports them all; so this is one file.
"""

import json
from pathlib import Path

import pytest

from tests.upstream.probe import SERVER, is_here
from tests.upstream.protocols import PROTOCOLS
from verl_mux import upstream
from verl_mux.platform.choose import accelerator_present
from verl_mux.rollout.engine.record import installed

TRAINER = "verl.trainer.ppo.v1.trainer_base.PPOTrainer"
BUFFER = "verl.trainer.ppo.v1.replay_buffer.ReplayBufferAsync"
LOOP = "verl.trainer.ppo.v1.agent_loop_tq"
ENGINE = "verl.checkpoint_engine.base"
SGLANG_SERVER = "verl.workers.rollout.sglang_rollout.async_sglang_server"

UPDATES = "sglang.srt.managers.scheduler_update_weights_mixin.SchedulerUpdateWeightsMixin"

SYMBOLS = [*filter(lambda it: is_here(it.name), upstream.VERL), *(it for engine in installed() for it in engine.symbols)]

_ALONE = (
    "init prepare_step on_step_begin on_step_end on_sample_end on_validate_begin on_validate_end "
    "get_llm_client get_reward_handles _setup _init_resource_pool_mgr _build_replay_buffer "
    "_rollout_server_managers _get_n_gpus_for_throughput _save_checkpoint"
)
_PASSES = (
    "_balance_batch _compute_old_log_prob _compute_advantage _compute_ref_log_prob _compute_values _update_critic _update_actor"
)

# Parameters that our overrides take, our calls name, or our hooks rely on.
SIGNATURES = {
    f"{UPDATES}.release_memory_occupation": ["self", "recv_req"],
    f"{UPDATES}.resume_memory_occupation": ["self", "recv_req"],
    "sglang.srt.model_executor.model_runner.ModelRunner.initialize": ["self", "pre_model_load_memory"],
    "sglang.srt.utils.common.get_available_gpu_memory": ["device", "gpu_id", "distributed", "empty_cache", "cpu_group"],
    f"{TRAINER}.__init__": ["self", "config"],
    **dict.fromkeys([f"{TRAINER}.{name}" for name in _ALONE.split()], ["self"]),
    f"{TRAINER}.fit": ["self", "agent_loop_manager"],
    f"{TRAINER}._submit_batch_to_rollout": ["self", "batch"],
    **dict.fromkeys([f"{TRAINER}.{name}" for name in _PASSES.split()], ["self", "batch", "metrics"]),
    f"{TRAINER}._compute_metrics": ["self", "batch", "metrics", "timing_raw", "global_steps", "epoch"],
    f"{BUFFER}.__init__": [
        "trainer_mode", "trainer_config", "max_off_policy_threshold", "max_off_policy_strategy", "sampler_kwargs", "refill_fn",
    ],
    f"{BUFFER}._wait_for_next_poll": ["self", "partition_id", "last_debug_time"],
    f"{BUFFER}._select_prompt_uids": ["self", "partition_id", "sampleable_keys", "batch_size"],
    f"{BUFFER}._materialize_batch": ["self", "partition_id", "selected_prompt_uids", "partition_snapshot"],
    f"{LOOP}.AgentLoopManagerTQ._init_agent_loop_workers": ["self"],
    "verl.experimental.agent_loop.AgentLoopWorker._run_agent_loop": ["self", "sampling_params", "trajectory"],
    "verl.workers.engine_workers.ActorRolloutRefWorker.__init__": ["self", "config", "role"],
    "verl.workers.engine_workers.ActorRolloutRefWorker.update_weights": ["self", "global_steps", "mode"],
    f"{ENGINE}.CheckpointEngineWorker.__init__": ["self", "rollout_config", "model_config", "kwargs"],
    f"{ENGINE}.CheckpointEngineWorker.update_weights": ["self", "global_steps"],
    f"{ENGINE}.CheckpointEngineManager.__init__": ["self", "config", "actor_wg", "replicas"],
    f"{ENGINE}.CheckpointEngineManager.build_process_group": ["self", "rollout"],
    f"{ENGINE}.CheckpointEngine.build_topology": ["actor_wg_world_size", "rollout_world_size", "metadata"],
    f"{ENGINE}.CheckpointEngine.send_weights": ["self", "weights", "global_steps"],
    f"{ENGINE}.CheckpointEngine.receive_weights": ["self", "global_steps"],
    f"{ENGINE}.CheckpointEngine.prepare": ["self"],
    f"{ENGINE}.CheckpointEngine.finalize": ["self"],
    f"{SGLANG_SERVER}.SGLangHttpServer.generate": ["self", "prompt_ids", "sampling_params", "request_id"],
    f"{SGLANG_SERVER}.SGLangHttpServer.sleep": ["self"],
    f"{SGLANG_SERVER}.SGLangHttpServer.wake_up": ["self"],
    f"{SGLANG_SERVER}.SGLangReplica.launch_servers": ["self"],
    "verl.workers.rollout.replica.RolloutReplica.init_standalone": ["self"],
    "verl.workers.rollout.replica.RolloutReplica.init_colocated": ["self", "resource_pool"],
    "verl.workers.rollout.replica.RolloutReplica.get_ray_class_with_init_args": ["self"],
    "verl.single_controller.ray.base.RayResourcePool.__init__": [
        "process_on_nodes", "use_gpu", "name_prefix", "max_colocate_count", "accelerator_type",
    ],
    "verl.single_controller.ray.base.RayResourcePool.get_placement_groups": ["self", "strategy", "name", "device_name"],
    "verl.single_controller.ray.base.RayClassWithInitArgs.__call__": ["self", "placement_group", "placement_group_bundle_idx"],
    "verl.single_controller.ray.base.ResourcePoolManager": ["resource_pool_spec", "mapping"],
    "verl.utils.fs.copy_to_local": ["src", "use_shm"],
    "verl.workers.rollout.sglang_rollout.sglang_rollout.ServerAdapter.__init__": [
        "self", "config", "model_config", "device_mesh", "replica_rank",
    ],
    "verl.workers.rollout.sglang_rollout.sglang_rollout.ServerAdapter.update_weights": ["self", "weights", "global_steps"],
    "verl.workers.rollout.llm_server.LLMServerManager.__init__": ["self", "config"],
    "verl.utils.model.convert_weight_keys": ["state_dict", "model"],
    "verl.utils.config.validate_config": ["config"],
    "sglang.srt.plugins.hook_registry.HookRegistry.register": ["target", "hook", "hook_type"],
    "sglang.srt.utils.torch_memory_saver_adapter.TorchMemorySaverAdapter.create": ["enable"],
    "sglang.srt.utils.torch_memory_saver_adapter.TorchMemorySaverAdapter.region": ["self", "tag", "enable_cpu_backup"],
    "sglang.srt.utils.torch_memory_saver_adapter.TorchMemorySaverAdapter.pause": ["self", "tag"],
    "sglang.srt.utils.torch_memory_saver_adapter.TorchMemorySaverAdapter.resume": ["self", "tag"],
    "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch": ["batch", "vocab_size"],
    "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo": ["sampling_seed"],
    "sglang.srt.sampling.sampling_params.SamplingParams": ["sampling_seed"],
    "sglang.srt.layers.sampler.sampling_from_probs_torch": ["probs", "sampling_seed", "positions"],
    "sglang.srt.managers.io_struct.ReleaseMemoryOccupationReqInput": ["tags"],
    "sglang.srt.managers.io_struct.ResumeMemoryOccupationReqInput": ["tags"],
    "sglang.srt.managers.io_struct.UpdateWeightFromDiskReqInput": ["model_path", "load_format", "flush_cache"],
}  # fmt: skip


SIGNATURES = {name: parameters for name, parameters in SIGNATURES.items() if is_here(name)}
# verl's replica of an engine, and on the CPU the module of its rollout worker's adapter.
OF_ENGINES = {
    "sglang": ("SGLangReplica", "verl_mux_cpu.cpu_server_adapter"),
    "vllm": ("vLLMReplica", "verl.workers.rollout.vllm_rollout.vllm_rollout"),
}


@pytest.fixture(scope="module")
def probe(python) -> dict:
    """What a process that imports verl and SGLang as a job does found of them."""
    result = python(
        "-m", "tests.upstream.probe", "trainer.v1.trainer_mode=mux_separate",
        cwd=Path(__file__).parents[2], timeout=300, VERL_PLATFORM="cpu" if accelerator_present() else None,
        RAY_ADDRESS=None,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("symbol", SYMBOLS, ids=lambda symbol: symbol.name)
def test_a_name_in_the_list_is_there(probe, symbol):
    assert "missing" not in probe["names"][symbol.name], f"needed because: {symbol.why}"


def test_every_name_that_our_modules_import_is_there(probe):
    assert {name: found["missing"] for name, found in probe["names"].items() if "missing" in found} == {}


@pytest.mark.parametrize("name", SIGNATURES)
def test_it_takes_what_we_hand_it(probe, name):
    found = probe["names"][name]
    assert "missing" not in found, found
    assert set(SIGNATURES[name]) <= set(found["parameters"])


def test_names_are_listed_once_and_say_why():
    assert len({symbol.name for symbol in SYMBOLS}) == len(SYMBOLS)
    assert all(symbol.why for symbol in SYMBOLS)


def test_what_a_job_makes_of_an_engine_where_there_is_no_accelerator(probe):
    assert (probe["variable"], probe["platform"]) == ("cpu", "cpu")
    for name, found in probe["engines"].items():
        replica, adapter = OF_ENGINES[name]
        assert found["replica"] == [f"Mux{replica}", "MuxReplica", replica] and not found["abstract"]
        assert found["server"] == SERVER
        # The third of four replicas of one GPU, on two nodes.
        assert found["node"] == "r1"
        assert found["adapter"] == adapter


@pytest.mark.parametrize("name", PROTOCOLS)
def test_what_we_rely_on_is_what_they_do(probe, name):
    assert probe["protocols"][name] is None, probe["protocols"][name]
