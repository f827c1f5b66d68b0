"""Which verl we work with, and the names of it that we override, patch or find by name. An engine's are in its record.

Data, read by `verl-mux doctor` and by `tests/upstream`. The tests resolve each name, and each one that our modules import, and
test the protocols behind them: a bump of a package that takes one away or changes what it does fails there, by name.
"""

from __future__ import annotations

from typing import NamedTuple

# What pyproject's extra `engine` asks for.
SUPPORTED = {"verl": ">=0.9.1,<0.10"}
# What was tested together: requirements/lock.txt.
TESTED = {"verl": "0.9.1", "torch": "2.11.0", "ray": "2.60.0", "transformers": "5.9.0"}


class Symbol(NamedTuple):
    """A dotted name, and why we need it."""

    name: str
    why: str


# Owner -> its names, separated by spaces -> why we need them.
_NAMES = {
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer": {
        "_setup": "our modes add the rollout pool after it",
        "fit": "wrapped: event log for verl's own modes, where the keys ask for it",
        "_compute_advantage _compute_old_log_prob _update_actor": "timed in the event log",
        "_validate": "timed in the event log of verl's own modes",
        "_init_resource_pool_mgr": "the place to put our worker classes",
        "_build_replay_buffer": "makes our replay buffer, a custom sampler, which waits on completions",
        "_submit_batch_to_rollout": "order of submission, for repeatable batches",
        "_compute_ref_log_prob _compute_values _update_critic": "timed in the event log, under the lease",
        "_save_checkpoint": "timed in the event log; a job that moves saves by it",
        "_shutdown_dump_executor": "a job that moves leaves fit between two steps",
        "_compute_metrics": "our metrics join verl's",
        "_consume_sync_metrics": "a sync's figures join the step's metrics",
        "_init_dataloader": "the step's prompts are drawn from it",
        "_next_train_batch": "draws prompts, over-sampled or not",
        "_load_checkpoint": "the rollout's pools come back with it",
        "_reissue_inflight_prompts": "left-over prompts wait for a lease",
        "_resolve_filter_groups_metric": "groups are filtered under the training trigger too",
        "_add_batch_to_generate": "replaced: as many prompts as were taken",
    },
    "verl.trainer.ppo.v1.replay_buffer.ReplayBufferAsync": {
        "_wait_for_next_poll": "replaced by waiting on completions",
        "_materialize_batch": "sorted into submission order",
        "_sync_metadata_from_transfer_queue": "read before a batch is made",
        "_clear_groups": "forgets prompt groups that were given up",
        "_select_prompt_uids": "those that were drawn first",
        "_dapo_filtered_keys": "which complete groups have no signal, and the value that all of one have",
    },
    "verl.trainer.ppo.v1.agent_loop_tq.AgentLoopWorkerTQ": {
        "__ray_metadata__.modified_class._run_prompt": "a prompt group's task",
        "__ray_metadata__": "the class under the Ray actor, to subclass it",
        "__ray_metadata__.modified_class.__ray_ready__": "what every Ray actor answers: is it alive",
    },
    "verl.workers.rollout.llm_server.LLMServerClient": {
        "_vllm_request_id": "our name for a request in the engine",
        "_acquire_server": "which server has a request",
        "_release_server": "a request cut off before it reached its server",
    },
    "verl.experimental.agent_loop": {
        "AgentLoopWorker._run_agent_loop": "one span and one seed per request; makes its loop without Hydra",
        "AgentLoopWorker._compute_score AgentLoopWorker._agent_loop_postprocess": "timed per request",
        "tool_agent_loop.ToolAgentLoop._call_tool": "timed per tool call",
    },
    "verl.workers.engine.fsdp.transformer_impl": {
        "FSDPEngine.is_param_offload_enabled": "is _is_offload_param, which we set",
        "FSDPEngine.is_optimizer_offload_enabled": "is _is_offload_optimizer, which we set",
        "FSDPEngineWithLMHead FSDPEngineWithValueHead": "registered for device cpu",
        "offload_fsdp_model_to_cpu offload_fsdp_optimizer": "replaced on a GPU: into our arena",
    },
    "verl.workers.engine.megatron.transformer_impl": {
        "MegatronEngine.is_param_offload_enabled": "is _is_offload_param, which we set",
        "MegatronEngine.is_optimizer_offload_enabled": "is _is_offload_optimizer, which we set",
        "offload_megatron_model_to_cpu offload_megatron_optimizer": "leave what has a place in our arena where it is",
        "MegatronEngine._build_tf_config": "on the CPU the bridge that it makes gets other layers",
        "MegatronEngineWithLMHead MegatronEngineWithValueHead": "registered for device cpu",
    },
    "verl": {
        "workers.rollout.replica.RolloutReplica.get_ray_class_with_init_args": "our checkpoint engine worker",
        "workers.rollout.replica.RolloutReplica.init_colocated": "launches a replica on a pool that we made",
        "workers.rollout.replica.RolloutReplica.rollout_worker_use_gpu": "a pool of ours asks Ray for no GPU",
        "checkpoint_engine.base.CheckpointEngineRegistry._registry": "which of verl's engines could be imported",
        "checkpoint_engine.base.CheckpointEngineRegistry._import_errors": "what the others lack",
        "workers.engine_workers.ActorRolloutRefWorker.update_weights": "overridden: host shards instead of full tensors",
        "workers.engine.base.BaseEngineCtx._context_switch": "moves nothing while our workers have loaded the states",
        "workers.engine.base.EngineRegistry._engines": "is a CPU engine registered already",
        "workers.rollout.llm_server.LLMServerManager._initialize_llm_servers": "rollout_replica_class is read there",
        "single_controller.ray.base.RayResourcePool.get_placement_groups": "replaced: bundles on their node's Ray node, no GPU",
        "single_controller.ray.base.RayClassWithInitArgs.__call__": "a worker is shown the GPU of its bundle",
        "single_controller.ray.base.ResourcePoolManager.create_resource_pool": "its pools are replaced by placed ones",
        "single_controller.ray.base.sort_placement_group_by_node_ip": "the order of ranks, which ours must agree with",
        "checkpoint_engine.base.CheckpointEngineManager.build_process_group": "called once, not at every sync",
        "plugin.platform.platform_manager.PlatformRegistry": "platform cpu",
        "utils.distributed.initialize_global_process_group_ray": "wrapped: gloo alone on platform cpu",
        "workers.rollout.base._ROLLOUT_REGISTRY": "verl's own modes on the CPU: another way for the weights",
        "utils.model.load_valuehead_model": "replaced on a CPU: it loads a critic with flash-attn alone",
        "utils.config.validate_config": "our keys are checked with verl's, before Ray starts",
    },
    "torch.distributed.fsdp": {
        "FSDPModule._get_fsdp_state": "its parameter group has FSDP's record of each sharded parameter",
        "_fully_shard._fsdp_param.FSDPParam.reset_sharded_param": "pads a shard unless `_sharded_param_data` is its memory",
    },
    "torch._C": {"_host_emptyCache": "what FSDP pinned before it came into our arena goes back to the host"},
    "multiprocessing.forkserver": {
        "socket": "set: its server takes connections of its own user alone",
        "_forkserver._forkserver_address _forkserver._forkserver_alive_fd": "set: its server is a fork of ours",
        "_forkserver._forkserver_pid": "set with them",
    },
    "ray": {
        "_private.state.available_resources_per_node": "has Ray given GPUs of a node to a job that takes no turns",
        "runtime_context.RuntimeContext.get_accelerator_ids": "says which GPU a worker is shown, to which Ray gave none",
    },
    "transfer_queue": {
        "interface.TransferQueueController interface._TQ_CONTROLLER": "found by its name: one in each job's own namespace",
        "interface._init_from_existing": "replaced by a look into the job's own namespace",
        "storage.simple_storage.SimpleStorageUnit": "found by its name: a rollout waits for a dead one",
    },
}
VERL = tuple(
    Symbol(f"{owner}.{name}", why)
    for owner, reasons in _NAMES.items()
    for names, why in reasons.items()
    for name in names.split()
)
