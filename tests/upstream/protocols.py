"""What verl and SGLang do with the names that we rely on: one function a protocol, which asserts it.

They run in the probe's process, with both packages imported as a job imports them. Where a protocol cannot be called without a
running engine, its source is read: `steps_of` holds the order of what it does. The end-to-end tests see the rest happen:

- weights by update_weights_from_disk, sleep and wake by tag, the gate of the launch: tests/e2e/test_multiplexed_run.py
- aborts, segments, priorities, cached tokens in the log: tests/e2e/test_rollout_control.py
- verl's own modes with our adapter and trigger: tests/e2e/test_stock_mode.py; checkpoints: tests/e2e/test_alone_and_resumed.py
- weights over CUDA IPC by update_weights_from_tensor: no test yet; it needs a GPU
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import inspect
import shlex
import sys
import types
from pathlib import Path
from types import SimpleNamespace

from tests.upstream.probe import is_here

# What config/completion.py gives the engine, with SGLang's own default.
SERVER_ARGUMENTS = {
    "sleep_on_idle": False, "enable_priority_scheduling": False, "disable_priority_preemption": False,
    "default_priority_value": None, "schedule_low_priority_values_first": False,  # so a higher value goes first
    "schedule_policy": "fcfs", "enable_memory_saver": False, "enable_weights_cpu_backup": False,
    "disable_piecewise_cuda_graph": False, "enforce_piecewise_cuda_graph": False,
}  # fmt: skip


def defaults(kind: type) -> dict:
    """{field: default} of a dataclass; required ones have dataclasses.MISSING."""
    return {field.name: field.default for field in dataclasses.fields(kind)}


def steps_of(function, *texts: str) -> None:
    """Assert that the function's source has these texts, in this order."""
    source = inspect.getsource(inspect.unwrap(function))
    at = -1
    for text in texts:
        at = source.find(text, at + 1)
        assert at >= 0, f"{function.__qualname__}: {text!r} is not there, or earlier than what went before"


def fsdp_leaves_a_shard_alone_whose_padded_rows_are_in_the_same_memory():
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    steps_of(
        FSDPParam.reset_sharded_param,
        "same_local_tensor = (", "self._sharded_param_data.untyped_storage().data_ptr()", "not same_local_tensor", "new_zeros(",
    )  # fmt: skip
    steps_of(FSDPParam.all_gather_inputs.fget, "self._sharded_param_data")
    steps_of(FSDPModule._apply, "self.reshard()", "super()._apply(", "_fsdp_param_group", ".fsdp_params", "reset_sharded_param()")


def verls_engine_offloads_by_two_functions_of_its_module():
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    steps_of(FSDPEngine.to, "offload_fsdp_model_to_cpu(self.module)", "offload_fsdp_optimizer(self.optimizer)")
    steps_of(FSDPEngine.initialize, "_build_model_optimizer()", "self.to(")
    steps_of(
        FSDPEngine.load_checkpoint, "load_checkpoint(", "offload_fsdp_model_to_cpu(self.module)", "offload_fsdp_optimizer("
    )  # fmt: skip


def server_args_are_a_dataclass_and_verl_reads_them_as_one():
    from sglang.srt.server_args import ServerArgs
    from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer

    assert dataclasses.is_dataclass(ServerArgs)
    found = defaults(ServerArgs)
    assert {name: found[name] for name in SERVER_ARGUMENTS} == SERVER_ARGUMENTS
    steps_of(SGLangHttpServer.launch_server, "**engine_kwargs", "dataclasses.fields(ServerArgs)", "ServerArgs(**args)")


def a_schedulers_command_line_says_that_it_is_one():
    from sglang.srt.managers.scheduler import configure_scheduler_process

    from verl_mux.rollout.engine.sglang.sglang_record import RECORD

    steps_of(configure_scheduler_process, f'setproctitle.setproctitle(f"{RECORD.scheduler_title}')


def weights_from_disk_are_asked_for_and_answered():
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput, UpdateWeightFromDiskReqOutput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    asked = defaults(UpdateWeightFromDiskReqInput)
    assert (asked["load_format"], asked["flush_cache"], asked["abort_all_requests"]) == (None, True, False)
    assert list(defaults(UpdateWeightFromDiskReqOutput))[-3:] == ["success", "message", "num_paused_requests"]
    assert list(inspect.signature(TokenizerManager.update_weights_from_disk).parameters) == ["self", "obj", "request"]
    steps = ("model_update_lock", "_wait_for_model_update_from_disk", "return success, message")
    steps_of(TokenizerManager.update_weights_from_disk, *steps)


def a_loader_of_ours_gets_what_rides_in_a_request_in_the_place_of_tensors():
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.model_executor import model_runner
    from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer
    from verl.workers.rollout.sglang_rollout.http_server_engine import AsyncHttpServerAdapter

    steps_of(AsyncHttpServerAdapter.update_weights_from_tensor, "serialized_named_tensors", '"load_format": load_format')
    steps_of(SGLangHttpServer.launch_server, 'engine_kwargs.pop("custom_weight_loader"', '"custom_weight_loader"')
    steps_of(TpModelWorker.update_weights_from_tensor, "deserialize", "serialized_named_tensors[self.tp_rank]", "load_format")
    steps_of(
        model_runner.ModelRunner.update_weights_from_tensor,
        "_unwrap_tensor", "load_format in self.server_args.custom_weight_loader", "dynamic_import(load_format)",
        "custom_loader(self.model, named_tensors)",
    )  # fmt: skip
    steps_of(model_runner._unwrap_tensor, "isinstance(tensor, LocalSerializedTensor)", "return tensor.to(device)")


def weights_from_tensors_need_no_opening_and_closing():
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput, UpdateWeightsFromTensorReqOutput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from verl.workers.rollout.sglang_rollout.sglang_rollout import ServerAdapter

    asked = defaults(UpdateWeightsFromTensorReqInput)
    assert asked["serialized_named_tensors"] is dataclasses.MISSING
    assert (asked["load_format"], asked["flush_cache"]) == (None, True)
    assert list(defaults(UpdateWeightsFromTensorReqOutput))[-2:] == ["success", "message"]
    # Later ones refuse tensors outside begin_weight_update ... end_weight_update.
    assert not hasattr(TokenizerManager, "begin_weight_update")
    assert inspect.iscoroutinefunction(ServerAdapter.update_weights)


def an_abort_is_ignored_before_the_request_is_known():
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    sent = []
    manager = SimpleNamespace(
        rid_to_state={"known": None}, enable_metrics=False, send_to_scheduler=SimpleNamespace(send_pyobj=sent.append)
    )
    TokenizerManager.abort_request(manager, rid="unknown")
    assert sent == []
    TokenizerManager.abort_request(manager, rid="known")
    assert [(request.rid, request.abort_all) for request in sent] == [("known", False)]


def an_abort_in_the_scheduler_takes_every_request_whose_id_begins_so():
    # A running one keeps the tokens it has; one that the scheduler has not received is nowhere to be found.
    from sglang.srt.managers.scheduler import Scheduler

    steps_of(
        Scheduler.abort_request, "req.rid.startswith(recv_req.rid)", "self.waiting_queue.pop", "self.running_batch", "to_finish"
    )


def a_request_aborted_in_the_queue_keeps_its_name():
    # One that runs loses it with its last tokens.
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    steps_of(TokenizerManager._handle_abort_req, "self.rid_to_state[recv_obj.rid]", "state.finished = True", "state.event.set()")
    assert "del self.rid_to_state" not in inspect.getsource(TokenizerManager._handle_abort_req)
    steps_of(TokenizerManager._handle_batch_output, "del self.rid_to_state[rid]")


def sleep_and_wake_take_tags_and_an_idle_engine():
    from sglang.srt import constants
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    from verl_mux.memory.tags import TAGS

    assert set(TAGS) <= set(constants.GPU_MEMORY_ALL_TYPES)
    for asked in (ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput):
        assert defaults(asked)["tags"] is None
    for method in (TokenizerManager.release_memory_occupation, TokenizerManager.resume_memory_occupation):
        assert list(inspect.signature(method).parameters) == ["self", "obj", "request"]
        # The answers that it does not look at.
        steps_of(method, "auto_create_handle_loop()", f"{method.__name__}_communicator(obj)")
    steps_of(
        Scheduler.release_memory_occupation,
        "is_fully_idle()", "pause(GPU_MEMORY_TYPE_KV_CACHE)", "flush_cache", "_export_static_state",
        "pause(GPU_MEMORY_TYPE_WEIGHTS)",
    )  # fmt: skip
    steps_of(
        Scheduler.resume_memory_occupation, "offload_tags.remove", "resume(GPU_MEMORY_TYPE_WEIGHTS)", "_import_static_state",
        "del self.stashed_model_static_state",
    )  # fmt: skip


def a_request_carries_a_priority_and_its_answer_the_cached_tokens():
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    assert defaults(GenerateReqInput)["priority"] is None
    assert inspect.isasyncgenfunction(TokenizerManager.generate_request)
    assert list(inspect.signature(TokenizerManager.generate_request).parameters)[:2] == ["self", "obj"]
    steps_of(TokenizerManager._handle_batch_output, "meta_info", '"cached_tokens": recv_obj.cached_tokens')


def a_scheduler_tells_of_its_queue_and_its_counters():
    # What rollout/engine/sglang/scheduler_log.py reads in its hooks.
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_runtime_checker_mixin import PoolStats
    from sglang.srt.mem_cache.base_prefix_cache import EvictResult
    from sglang.srt.mem_cache.radix_cache import RadixCache
    from sglang.srt.observability.req_time_stats import SchedulerReqTimeStats

    assert list(inspect.signature(Scheduler.get_new_batch_prefill).parameters) == ["self"]
    prefill, decode = (
        list(inspect.signature(inspect.unwrap(method)).parameters)
        for method in (Scheduler.report_prefill_stats, Scheduler.report_decode_stats)
    )
    assert prefill[:3] == ["self", "batch", "prefill_stats"]
    assert decode == ["self", "can_run_cuda_graph", "running_batch", "num_correct_drafts"]
    steps_of(Scheduler.process_batch_result_decode, "self.report_decode_stats(", "running_batch=batch", "num_correct_drafts=")
    steps_of(Scheduler.process_batch_result_prefill, "self.report_prefill_stats(", "batch=batch", "prefill_stats=")
    steps_of(Scheduler.update_running_batch, "retracted_reqs, new_token_ratio, reqs_to_abort = batch.retract_decode(")
    steps_of(Scheduler.update_running_batch, "_add_request_to_queue(req, is_retracted=True)")
    steps_of(Scheduler._add_request_to_queue, "set_wait_queue_entry_time()")
    assert list(inspect.signature(ScheduleBatch.retract_decode).parameters)[0] == "self"
    assert inspect.signature(RadixCache.evict).return_annotation in (EvictResult, "EvictResult")
    assert defaults(EvictResult)["num_tokens_evicted"] == 0
    assert hasattr(PoolStats, "get_kv_token_stats")
    found = defaults(SchedulerReqTimeStats)
    for name in ("wait_queue_entry_time", "forward_entry_time", "prefill_finished_time", "completion_time"):
        assert found[name] == 0.0


def a_requests_times_come_with_its_last_tokens():
    # Without SGLang's metrics they are sent empty: ours go along, under a key that it does not take for a time.
    import pickle

    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.observability.req_time_stats import SchedulerReqTimeStats

    from verl_mux.rollout.engine.sglang.manager import TIMES

    assert SchedulerReqTimeStats().__getstate__() == {}
    assert not TIMES.endswith("time")
    stats = SchedulerReqTimeStats()
    stats.__setstate__({TIMES: {"queue_sec": 0.5}})
    assert getattr(stats, TIMES) == {"queue_sec": 0.5} and pickle.loads(pickle.dumps(SchedulerReqTimeStats())) is not None
    assert list(inspect.signature(TokenizerManager._handle_batch_output).parameters) == ["self", "recv_obj"]
    steps_of(TokenizerManager.handle_loop, "self._handle_batch_output(recv_obj)")
    steps_of(
        TokenizerManager._handle_batch_output,
        "recv_obj.rids", '"id": rid', "recv_obj.finished_reasons[i]", '"num_retractions": recv_obj.retraction_counts[i]',
    )  # fmt: skip
    steps_of(TokenizerManager._calculate_spec_decoding_metrics, "spec_num_correct_drafts", "spec_num_proposed_drafts")


def a_hook_gets_its_arguments_in_the_order_of_its_type():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    module = types.ModuleType("verl_mux_hooked")
    module.double = lambda number: 2 * number
    module.triple = lambda number: 3 * number
    module.halve = lambda number: number / 2
    sys.modules[module.__name__] = module
    before = []
    hooks, patched = dict(HookRegistry._hooks), set(HookRegistry._patched)
    try:
        HookRegistry._hooks.clear()
        HookRegistry.register("verl_mux_hooked.double", lambda original, number: original(number) + 1, HookType.AROUND)
        HookRegistry.register("verl_mux_hooked.triple", lambda *args, **kwargs: before.append((args, kwargs)), HookType.BEFORE)
        HookRegistry.register("verl_mux_hooked.halve", lambda result, number: (result, number), HookType.AFTER)
        HookRegistry.apply_hooks()
    finally:
        HookRegistry._hooks.clear()
        HookRegistry._hooks.update(hooks)
        HookRegistry._patched.clear()
        HookRegistry._patched.update(patched)
    assert module.double(2) == 5
    assert (module.triple(2), before) == (6, [((2,), {})])
    assert module.halve(4) == (2, 4)


def a_batch_is_registered_before_it_is_handed_to_the_agent_loops():
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    submits = "self._submit_batch_to_rollout(batch)"
    handed = ("tq.kv_batch_put", "agent_loop_manager.generate_sequences(batch)", "return len(batch)")
    steps_of(PPOTrainer._submit_batch_to_rollout, *handed)
    steps_of(PPOTrainer._add_batch_to_generate, "self._next_train_batch()", submits)
    steps_of(PPOTrainer._add_prompts_to_generate, "self._next_train_batch(num_prompts)", f"return {submits}")


def a_trainer_is_set_up_in_this_order():
    # Our init lease is taken before the first worker loads a model: the critic, then the actor.
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    steps_of(PPOTrainer.init, "self._setup()", "self.on_init_end()")
    steps_of(
        PPOTrainer._setup,
        "self._init_resource_pool_mgr()", "self.critic_wg = all_wg", "self.critic_wg.reset()", "self.actor_rollout_wg = all_wg",
        "self.actor_rollout_wg.init_model()", "self.reward_loop_manager = ", '"_enable_hybrid_replicas"',
        "self.llm_server_manager", 'backend = "naive"', "self.checkpoint_manager", "sleep_replicas()", "self._load_checkpoint()",
    )  # fmt: skip


def the_replay_buffer_polls_then_makes_a_batch():
    from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    made_with = ("custom_sampler", "load_extern_type", "sampler_kwargs", "refill_fn=self._add_prompts_to_generate")
    steps_of(PPOTrainer._build_replay_buffer, *made_with)
    steps_of(ReplayBufferAsync._wait_for_next_poll, "time.sleep(self.poll_interval)", "return last_debug_time")
    steps_of(ReplayBufferAsync._materialize_batch, "tq.kv_clear", 'key.split("_")[0]', "KVBatchMeta(")
    steps_of(
        ReplayBufferAsync.wait_for_sampleable,
        "_sync_metadata_from_transfer_queue()", "_evict_terminal_groups(", "self.refill_fn(", "_wait_for_next_poll(",
    )  # fmt: skip
    steps_of(ReplayBufferAsync.sample, "self.wait_for_sampleable(", "self._select_prompt_uids(", "self._materialize_batch(")


def a_sync_goes_through_the_checkpoint_engine_in_this_order():
    from verl.checkpoint_engine.base import CheckpointEngineManager

    steps_of(
        CheckpointEngineManager.update_weights,
        "abort_replicas()", "RayWorkerGroup(worker_handles=workers", "release_kv_cache_replicas()",
        "build_process_group(rollout)", "actor_wg.update_weights(global_steps=global_steps, mode=self.backend)",
        "rollout.update_weights(global_steps=global_steps)",
        '"finalize"', "resume_kv_cache_replicas()", "resume_generation_replicas()",
    )  # fmt: skip
    steps_of(CheckpointEngineManager.build_process_group, '"prepare"', "backend_cls.build_topology(", '"init_process_group"')


def the_agent_loop_manager_makes_its_workers_and_does_not_wait_for_samples():
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

    steps_of(AgentLoopManagerTQ.__init__, "self.agent_loop_workers_class = AgentLoopWorkerTQ", "super().__init__")
    steps_of(AgentLoopManagerTQ.create, "cls(*args, **kwargs)", "_init_agent_loop_workers()")
    chunks = ("prompts.chunk(len(self.agent_loop_workers))", "worker.generate_sequences.remote")
    steps_of(AgentLoopManagerTQ.generate_sequences, *chunks)
    worker = AgentLoopWorkerTQ.__ray_metadata__.modified_class
    steps_of(worker.generate_sequences, "asyncio.create_task", "_run_prompt")
    assert asyncio.iscoroutinefunction(worker._run_prompt)
    assert worker.__ray_ready__(None) is True  # as every actor answers


def attention_is_flash_attention_2_unless_a_key_says_otherwise():
    from transformers.modeling_flash_attention_utils import FLASH_ATTN_KERNEL_FALLBACK
    from verl.models.transformers.monkey_patch import apply_monkey_patch
    from verl.workers.config.model import HFModelConfig

    from verl_mux.platform.cuda_packages import FLASH_ATTENTION, SUBSTITUTE

    steps_of(HFModelConfig.__post_init__, f'override_config.get("attn_implementation", "{FLASH_ATTENTION}")')
    assert FLASH_ATTN_KERNEL_FALLBACK[FLASH_ATTENTION] == SUBSTITUTE
    # Why sdpa does not go with sequences that ranks share.
    steps_of(apply_monkey_patch, "ulysses_sp_size > 1", "flash_attention._flash_attention_forward = _ulysses_flash")


def the_doctors_command_compiles_what_an_engine_of_verls_does():
    from sglang.bench_one_batch import BenchArgs, ServerArgs

    from verl_mux.launcher.doctor_gpu import kernels

    words = shlex.split(kernels(built=0).advice.partition("`")[2].rstrip("`"))
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    BenchArgs.add_cli_args(parser)
    given = parser.parse_args(words[3:])
    assert (given.load_format, given.attention_backend) == ("dummy", "flashinfer")


def the_actors_of_transfer_queue_are_found_by_their_names():
    from transfer_queue import interface
    from transfer_queue.storage.bootstrap import simple_storage_bootstrap

    steps_of(interface.init, 'name="TransferQueueController"', 'namespace="transfer_queue"')
    steps_of(interface._maybe_create_tq_client, "_init_from_existing()")
    steps_of(simple_storage_bootstrap.initialize_simple_storage, '"name": f"TransferQueueStorageUnit#{storage_unit_rank}"')


def storage_units_of_transfer_queue_are_pinned_to_nodes_that_offer_a_resource():
    from transfer_queue.utils import common

    steps_of(common.get_node_round_robin_scheduling_strategies, 'node.get("Resources", {}).get(required_node_resource, 0) > 0')


def ray_is_asked_for_as_many_cpus_as_a_start_says():
    from transfer_queue.controller import TransferQueueController
    from transfer_queue.storage.simple_storage import SimpleStorageUnit
    from verl.single_controller.ray.base import RayResourcePool, ResourcePoolManager
    from verl.workers.rollout.replica import RolloutReplica

    from verl_mux.config import preflight

    assert ResourcePoolManager.max_colocate_count == preflight._TRAIN_CPUS
    steps_of(RayResourcePool.get_placement_groups, 'bundle = {"CPU": self.max_colocate_count}')
    steps_of(RolloutReplica.init_standalone, f"max_colocate_count={preflight._ROLLOUT_CPUS}")
    assert [actor._default_options["num_cpus"] for actor in (TransferQueueController, SimpleStorageUnit)] == [1, 1]


def a_worker_gets_its_variables_and_its_bundle_from_the_class_that_verl_starts():
    from verl.single_controller.ray.base import RayClassWithInitArgs, RayWorkerGroup, split_resource_pool

    steps_of(
        RayWorkerGroup._create_worker, 'runtime_env = {"env_vars": env_vars}', 'update_options({"runtime_env": runtime_env',
        "placement_group=pg", "placement_group_bundle_idx=local_rank", "use_gpu=self.use_gpu",
    )  # fmt: skip
    steps_of(RayClassWithInitArgs.__call__, "options.update(self._options)", "if use_gpu:")
    steps_of(split_resource_pool, "use_gpu=resource_pool.use_gpu", "placement_groups=placement_groups")


def a_reward_that_fails_fails_its_prompt_and_others_are_drawn_for_it():
    # Why job_hosts.py is there.
    from verl.experimental.agent_loop import AgentLoopWorker
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
    from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    steps_of(PPOTrainer.get_reward_handles, "return self.reward_loop_manager.reward_loop_worker_handles")
    steps_of(AgentLoopWorker._compute_score, "random.choice(self.reward_loop_worker_handles)", "compute_score.remote(data)")
    steps_of(AgentLoopWorkerTQ.__ray_metadata__.modified_class._run_prompt, "if session_errors:", 'status = "failure"')
    steps_of(ReplayBufferAsync._terminal_eviction_reasons, "set(self.failure_keys[partition_id])")


def a_request_of_verls_vllm_server_goes_through_the_engines_own_generate():
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
    from vllm.v1.engine.async_llm import AsyncLLM

    steps_of(
        vLLMHttpServer.run_server, "AsyncLLM.from_vllm_config", '"monkey_patch_model"', "self.engine = engine_client",
    )  # fmt: skip
    steps_of(
        vLLMHttpServer.generate, "self.engine.generate(", "prompt=prompt", "request_id=request_id", "priority=priority",
        'stop_reason = "aborted"', 'finish_reason in ("stop", "length")',
    )  # fmt: skip
    assert list(inspect.signature(AsyncLLM.generate).parameters)[:4] == ["self", "prompt", "sampling_params", "request_id"]
    assert list(inspect.signature(AsyncLLM.abort).parameters)[:2] == ["self", "request_id"]


def what_vllms_engine_core_sends_goes_through_what_we_wrap():
    from vllm.v1.engine import EngineCoreEventType
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.stats import RequestStateStats

    from verl_mux.rollout.engine.vllm import vllm_calls

    steps_of(
        AsyncLLM._run_output_handler, "output_processor.process_outputs(", "logger_ref[0].record(",
        "engine_idx=outputs.engine_index", "scheduler_stats=outputs.scheduler_stats",
    )  # fmt: skip
    assert (EngineCoreEventType.SCHEDULED, EngineCoreEventType.PREEMPTED) == (vllm_calls._SCHEDULED, vllm_calls._PREEMPTED)
    assert {"queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts"} <= set(defaults(RequestStateStats))


def a_vllm_worker_that_raises_answers_and_lives():
    from vllm.v1.executor.multiproc_executor import WorkerProc

    steps_of(
        WorkerProc.worker_busy_loop, "try:", "output = func(*args, **kwargs)", "except Exception as e:", "self.handle_output(e)"
    )


def vllms_worker_takes_memory_by_tag_and_in_this_order():
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.gpu_worker import Worker

    steps_of(Worker.load_model, '_maybe_get_memory_pool_context(tag="weights")', "model_runner.load_model(")
    steps_of(Worker.initialize_from_config, '_maybe_get_memory_pool_context(tag="kv_cache")', "initialize_kv_cache(")
    steps_of(EngineCore._initialize_kv_caches, "determine_available_memory()", "initialize_from_config(")


def vllms_allocator_on_cuda_knows_the_tag_and_the_size_of_each_allocation():
    from vllm.device_allocator import AllocationData
    from vllm.device_allocator.cumem import CuMemAllocator

    assert {"handle", "tag"} <= set(defaults(AllocationData))
    steps_of(CuMemAllocator._python_malloc_callback, "self.pointer_to_data[py_d_mem]", "self.current_tag")
    steps_of(CuMemAllocator.wake_up, "self.pointer_to_data.items()", "create_and_map(handle)")


def on_a_cpu_vllm_packs_weights_unless_onednn_is_away():
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    steps_of(dispatch_cpu_unquantized_gemm, "ops._supports_onednn", "layer.weight = torch.nn.Parameter(", "functional.linear")
    steps_of(GPUModelRunner._bookkeeping_sync, "gen.set_offset(gen.get_offset() - 4)")


def verls_megatron_engine_moves_what_a_distributed_optimizer_has_and_nothing_else():
    from verl.utils import megatron_utils
    from verl.workers.engine.megatron.transformer_impl import MegatronEngine

    steps_of(
        MegatronEngine.to, "load_megatron_model_to_gpu(self.module, load_grad=grad)", "load_megatron_optimizer(self.optimizer)",
        "offload_megatron_model_to_cpu(self.module)", "offload_megatron_optimizer(self.optimizer)",
    )  # fmt: skip
    steps_of(
        megatron_utils.offload_megatron_model_to_cpu, "model_chunk.buffers, model_chunk.expert_parallel_buffers",
        "buffer.param_data.storage().resize_(0)", "buffer.grad_data.storage().resize_(0)",
    )  # fmt: skip
    steps_of(megatron_utils.offload_megatron_copy_params, '"shard_fp32_from_float16_groups"')
    steps_of(megatron_utils.offload_megatron_optimizer, 'v["exp_avg"]', 'v["exp_avg_sq"]')


def verls_veomni_engine_moves_its_states_and_exports_whole_tensors():
    """Its package is not in our lock, and the file imports it: so this is its text."""
    import verl

    text = (Path(verl.__file__).parent / "workers" / "engine" / "veomni" / "transformer_impl.py").read_text()
    steps = (
        "class VeOmniEngine(FSDPEngine)", "    def to(", "load_veomni_model_to_gpu(", "load_veomni_optimizer(",
        "offload_veomni_model_to_cpu(", "offload_veomni_optimizer(", "def get_per_tensor_param(self", ".full_tensor()",
        'backend=["veomni"], device=["cuda", "npu"]',
    )  # fmt: skip
    found = [text.find(step) for step in steps]
    assert found[0] >= 0 and all(text.find(step, at) > at for at, step in zip(found, steps[1:], strict=False))


def a_megatron_engine_zeroes_the_gradients_that_came_back_without_values():
    from verl.workers.engine.base import BaseEngine
    from verl.workers.engine.megatron.transformer_impl import MegatronEngine

    steps_of(BaseEngine.train_batch, "self.optimizer_zero_grad()", "self.forward_backward_batch(")
    steps_of(MegatronEngine.optimizer_zero_grad, "chunk.zero_grad_buffer()")


def only_fsdp_has_a_policy_by_which_it_moves_layers_itself():
    from verl.workers.config import FSDPEngineConfig, McoreEngineConfig

    assert "offload_policy" in defaults(FSDPEngineConfig) and "offload_policy" not in defaults(McoreEngineConfig)


def mbridge_exports_full_tensors_of_its_layers_by_names_that_we_add_to():
    from mbridge.core.llm_bridge import LLMBridge

    steps_of(LLMBridge._weight_name_mapping_mcore_to_hf, "_weight_name_mapping_mlp(", "_weight_name_mapping_other(")
    steps_of(LLMBridge._model_provider, "self._get_transformer_layer_spec(vp_stage)", "self.has_vp_stage")
    assert isinstance(LLMBridge._OTHER_MAPPING, dict) and isinstance(LLMBridge._MLP_MAPPING, dict)
    steps_of(LLMBridge.load_weights, "_mcore_local_to_global(model)", "_weight_name_mapping_mcore_to_hf(")
    asked = "_mcore_local_to_global(model, consider_ep=False)"
    steps_of(LLMBridge.export_weights, asked, '".mlp.experts.linear_fc" in name', 'name.split(".weight")')


def an_adapter_that_is_not_merged_is_exported_alone_and_asked_for_by_verls_name():
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    steps_of(FSDPEngine.get_per_tensor_param, "base_sync_done=base_sync_done", "peft_config.to_dict()")
    steps_of(FSDPEngine.__init__, "self._is_lora = self.model_config.lora_rank > 0")


def sglang_serves_an_adapter_by_its_name_and_forgets_to_release_it_for_requests_aborted_in_the_queue():
    from sglang.srt.lora.lora_manager import LoRAManager
    from sglang.srt.managers.io_struct import LoadLoRAAdapterFromTensorsReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.model_executor.model_runner import ModelRunner
    from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer

    steps_of(SGLangHttpServer.generate, "if self.lora_as_adapter:", "generate_request.lora_path = SGLANG_LORA_NAME")
    steps_of(ModelRunner.initialize, "self.load_model()", "self.init_lora_manager()")
    steps_of(LoRAManager.load_lora_adapter_from_tensors, "LoRAConfig.from_dict(", "self.load_lora_weights_from_tensors(")
    assert {"serialized_tensors", "config_dict", "load_format"} <= set(defaults(LoadLoRAAdapterFromTensorsReqInput))
    steps_of(TokenizerManager._handle_batch_output, "del self.rid_to_state[rid]", "self.lora_registry.release(state.obj.lora_id)")
    assert "lora_registry" not in inspect.getsource(TokenizerManager._handle_abort_req)


def vllm_serves_an_adapter_in_slots_that_lie_with_the_weights():
    from verl.workers.rollout.vllm_rollout.utils import VLLM_LORA_INT_ID
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.v1.worker.gpu_worker import Worker

    steps_of(vLLMHttpServer.generate, "if self.lora_as_adapter:", "VLLM_LORA_INT_ID in await self.engine.list_loras()")
    assert VLLM_LORA_INT_ID == 123
    steps_of(LoRAModelManager.set_adapter_mapping, "self._last_mapping != mapping", "self._last_mapping = mapping")
    steps_of(BaseLinearLayerWithLoRA.create_lora_weights, "self.lora_a_stacked = tuple(", "self.lora_b_stacked = tuple(")
    steps_of(Worker.load_model, "_maybe_get_memory_pool_context(", "self.model_runner.load_model(")


def a_reward_model_on_its_own_pool_is_started_when_its_pool_is_asked_for_and_sleeps_unless_told_otherwise():
    from verl.experimental.reward_loop.reward_loop import RewardLoopManager
    from verl.experimental.reward_loop.reward_model import RewardModelManager
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    steps_of(
        PPOTrainer._setup,
        "self.actor_rollout_wg.init_model()", "get_resource_pool(Role.RewardModel)", "RewardLoopManager(",
        "get_resource_pool(Role.TeacherModel)", "MultiTeacherModelManager(", "self._load_checkpoint()",
    )  # fmt: skip
    steps_of(RewardModelManager.__init__, "self._initialize_llm_servers()", "free_cache_engine:", "self.sleep()")
    steps_of(RewardLoopManager.compute_rm_score, "self.reward_model_manager.wake_up()")


PROTOCOLS = {
    name: found
    for name, found in list(globals().items())
    if inspect.isfunction(found) and found.__module__ == __name__ and name not in ("defaults", "steps_of", "is_here")
    if all(is_here(it) for it in found.__code__.co_names)
}
