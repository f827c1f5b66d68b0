"""Every name of verl and SGLang that we subclass, hook or rely on beyond their documented interfaces, in one list.

`tests/test_upstream.py` resolves each; a bump of either package that takes one away fails there, by name, and nowhere else.
"""

from __future__ import annotations

from typing import NamedTuple


class Symbol(NamedTuple):
    """A dotted name, and why we need it."""

    name: str
    why: str


VERL = (
    Symbol("verl.trainer.ppo.v1.trainer_base.PPOTrainer._setup", "our modes add the rollout pool after it"),
    Symbol(
        "verl.trainer.ppo.v1.trainer_base.PPOTrainer.fit", "wrapped: event log for verl's own modes, where the keys ask for it"
    ),
    Symbol("verl.trainer.ppo.v1.trainer_base.PPOTrainer._compute_advantage", "timed in the event log of verl's own modes"),
    Symbol("verl.trainer.ppo.v1.trainer_base.PPOTrainer._validate", "timed in the event log of verl's own modes"),
    Symbol("verl.trainer.ppo.v1.trainer_base.PPOTrainer._init_resource_pool_mgr", "the place to put our worker classes"),
    Symbol("verl.trainer.ppo.v1.trainer_base.PPOTrainer._build_replay_buffer", "our replay buffer waits on an event"),
    Symbol("verl.trainer.ppo.v1.trainer_base.PPOTrainer._submit_batch_to_rollout", "order of submission, for repeatable batches"),
    Symbol("verl.trainer.ppo.v1.trainer_base.PPOTrainer._compute_old_log_prob", "timed in the event log"),
    Symbol("verl.trainer.ppo.v1.trainer_base.PPOTrainer._update_actor", "timed in the event log"),
    Symbol("verl.trainer.ppo.v1.trainer_base.PPOTrainer._save_checkpoint", "timed in the event log"),
    Symbol("verl.trainer.ppo.v1.trainer_base.PPOTrainer._compute_metrics", "our metrics join verl's"),
    Symbol("verl.trainer.ppo.v1.trainer_base.PPOTrainer._consume_sync_metrics", "reads _pending_sync_metrics"),
    Symbol("verl.trainer.ppo.v1.replay_buffer.ReplayBufferAsync._wait_for_next_poll", "replaced by waiting on completions"),
    Symbol("verl.trainer.ppo.v1.replay_buffer.ReplayBufferAsync._materialize_batch", "sorted into submission order"),
    Symbol(
        "verl.trainer.ppo.v1.replay_buffer.ReplayBufferAsync._sync_metadata_from_transfer_queue", "read before a batch is made"
    ),
    Symbol("verl.trainer.ppo.v1.replay_buffer.ReplayBufferAsync._clear_groups", "forgets prompt groups that were given up"),
    Symbol("verl.trainer.ppo.v1.trainer_base.PPOTrainer._next_train_batch", "draws prompts, over-sampled or not"),
    Symbol("verl.trainer.ppo.v1.trainer_base.PPOTrainer._load_checkpoint", "the rollout's pools come back with it"),
    Symbol("verl.trainer.ppo.v1.trainer_base.PPOTrainer._reissue_inflight_prompts", "left-over prompts wait for a lease"),
    Symbol(
        "verl.trainer.ppo.v1.agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class._run_prompt", "a prompt group's task"
    ),
    Symbol("verl.workers.rollout.llm_server.LLMServerClient._vllm_request_id", "our name for a request in the engine"),
    Symbol("verl.workers.rollout.llm_server.LLMServerClient._acquire_server", "which server has a request"),
    Symbol("verl.workers.rollout.llm_server.LLMServerClient._release_server", "a request cut off before it reached its server"),
    Symbol(
        "verl.trainer.ppo.v1.agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__", "the class under the Ray actor, to subclass it"
    ),
    Symbol("verl.trainer.ppo.v1.agent_loop_tq.AgentLoopManagerTQ", "subclassed: our agent loop worker"),
    Symbol(
        "verl.experimental.agent_loop.AgentLoopWorker._run_agent_loop",
        "one span and one seed per request; makes its loop without Hydra",
    ),
    Symbol("verl.experimental.agent_loop.agent_loop.DictConfigWrap", "an agent loop's arguments, as verl gives them"),
    Symbol("verl.experimental.agent_loop.agent_loop.ToolListWrap", "an agent loop's arguments, as verl gives them"),
    Symbol("verl.utils.rollout_trace.rollout_trace_attr", "verl's trace around an agent loop"),
    Symbol("verl.experimental.agent_loop.AgentLoopWorker._compute_score", "timed per request"),
    Symbol("verl.experimental.agent_loop.AgentLoopWorker._agent_loop_postprocess", "timed per request"),
    Symbol("verl.experimental.agent_loop.agent_loop._agent_loop_registry", "our tool loop takes the place of tool_agent"),
    Symbol("verl.experimental.agent_loop.tool_agent_loop.ToolAgentLoop._call_tool", "timed per tool call"),
    Symbol("verl.workers.engine_workers.ActorRolloutRefWorker.update_weights", "overridden: host shards instead of full tensors"),
    Symbol("verl.workers.engine_workers.ActorRolloutRefWorker.actor_worker_cls", "the training worker class inside"),
    Symbol("verl.workers.engine_workers.TrainingWorker", "subclassed for the critic"),
    Symbol("verl.workers.engine.base.EngineRegistry._engines", "is a CPU engine registered already"),
    Symbol("verl.workers.engine.fsdp.transformer_impl.FSDPEngineWithLMHead", "registered for device cpu"),
    Symbol("verl.workers.engine.fsdp.transformer_impl.FSDPEngineWithValueHead", "registered for device cpu"),
    Symbol("verl.workers.engine.spec.ShardSpec.from_param", "where a DTensor's local shard lies in the full tensor"),
    Symbol("verl.utils.model.convert_weight_keys", "FSDP names to Hugging Face names"),
    Symbol("verl.workers.rollout.llm_server.LLMServerManager._initialize_llm_servers", "rollout_replica_class is read there"),
    Symbol("verl.workers.rollout.replica.RolloutReplica.get_ray_class_with_init_args", "our checkpoint engine worker"),
    Symbol("verl.workers.rollout.sglang_rollout.async_sglang_server.SGLangHttpServer", "subclassed: tagged sleep and wake"),
    Symbol("verl.workers.rollout.sglang_rollout.async_sglang_server.SGLangReplica", "subclassed: our server class"),
    Symbol("verl.workers.rollout.sglang_rollout.sglang_rollout.ServerAdapter._init_server_adapter", "finds the server"),
    Symbol("verl.checkpoint_engine.base.CheckpointEngineWorker", "subclassed: our server adapter"),
    Symbol("verl.checkpoint_engine.base.CheckpointEngineManager.build_process_group", "called once, not at every sync"),
    Symbol("verl.plugin.platform.platform_manager.PlatformRegistry", "platform cpu"),
    Symbol("verl.utils.distributed.initialize_global_process_group_ray", "wrapped: gloo alone on platform cpu"),
    Symbol("verl.workers.rollout.base._ROLLOUT_REGISTRY", "verl's own modes on the CPU: another way for the weights"),
    Symbol(
        "verl.workers.rollout.sglang_rollout.http_server_engine.AsyncHttpServerAdapter._make_async_request",
        "the engine loads weights from shared memory",
    ),
    Symbol("verl.trainer.ppo.v1.replay_buffer._accumulate_eviction_metrics", "the trigger waits in several goes"),
    Symbol("verl.trainer.ppo.v1.trainer_base.PPOTrainer._add_batch_to_generate", "replaced: as many prompts as were taken"),
    Symbol("verl.utils.config.validate_config", "our keys are checked with verl's, before Ray starts"),
)

SGLANG = (
    Symbol("sglang.srt.plugins.hook_registry.HookRegistry.register", "SGLang's own plugin door"),
    Symbol("sglang.srt.utils.torch_memory_saver_adapter.TorchMemorySaverAdapter.create", "hooked: bytes and seconds per tag"),
    Symbol(
        "sglang.srt.model_executor.model_runner.ModelRunner.load_model", "hooked: a joining job waits for its init lease here"
    ),
    Symbol(
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch", "hooked on CPU: one seed per request"
    ),
    Symbol("sglang.srt.configs.model_config.ModelConfig._get_hf_eos_token_id", "whether an aborted response had ended"),
    Symbol("sglang.srt.layers.sampler.sampling_from_probs_torch", "hooked on CPU: one seed per request"),
    Symbol("sglang.srt.managers.io_struct.ReleaseMemoryOccupationReqInput", "sleep"),
    Symbol("sglang.srt.managers.io_struct.ResumeMemoryOccupationReqInput", "wake"),
    Symbol("sglang.srt.managers.io_struct.UpdateWeightFromDiskReqInput", "weights on CPU, from shared memory"),
    Symbol("sglang.srt.managers.io_struct.GetWeightsByNameReqInput", "the test that weights arrived bit-equal"),
)
