"""SGLang, as verl 0.9 serves it: its record. Read in every process, so it imports no SGLang; pure."""

from __future__ import annotations

from collections.abc import Iterator

from verl_mux.rollout.engine.record import NO_DRAFTS, NO_SCALES, Arguments, EngineRecord
from verl_mux.rollout.engine.sglang.plugin import STARTERS
from verl_mux.upstream import Symbol

_UPDATES = "sglang.srt.managers.scheduler_update_weights_mixin.SchedulerUpdateWeightsMixin"
_SERVER = "verl.workers.rollout.sglang_rollout"

_KERNELS = ("build_jit_specs", "gen_batch_decode_module", "gen_batch_prefill_module", "sampling.gen_sampling_module")

SYMBOLS = (
    Symbol(f"{_SERVER}.async_sglang_server.SGLangHttpServer", "subclassed: tagged sleep and wake"),
    Symbol(f"{_SERVER}.async_sglang_server.SGLangReplica", "subclassed: our server class"),
    Symbol(f"{_SERVER}.sglang_rollout.ServerAdapter._init_server_adapter", "finds the server"),
    Symbol(f"{_SERVER}.http_server_engine.AsyncHttpServerAdapter._make_async_request", "where the weights of a sync lie"),
    Symbol(f"{_SERVER}.http_server_engine.AsyncHttpServerAdapter.flush_cache", "after a sync"),
    Symbol("sglang.srt.managers.io_struct.UpdateWeightsFromTensorReqInput", "where the weights of a sync lie"),
    Symbol("sglang.srt.utils.MultiprocessingSerializer.serialize", "what SGLang reads in it"),
    Symbol("sglang.srt.model_executor.model_runner.ModelRunner.update_weights_from_tensor", "calls our custom_weight_loader"),
    Symbol("sglang.srt.distributed.parallel_state.get_tensor_model_parallel_rank", "which rank loads"),
    Symbol("sglang.srt.plugins.hook_registry.HookRegistry.register", "SGLang's own plugin door"),
    Symbol("sglang.srt.utils.torch_memory_saver_adapter.TorchMemorySaverAdapter.create", "hooked: bytes per tag"),
    Symbol(
        "sglang.srt.model_executor.model_runner.ModelRunner.initialize", "hooked: a joining job waits for its init lease here"
    ),
    Symbol("sglang.srt.utils.common.get_available_gpu_memory", "hooked: the device with a budget; asked again behind the gate"),
    Symbol(f"{_UPDATES}.release_memory_occupation", "hooked: idempotent, and an answer where it would end the process"),
    Symbol(f"{_UPDATES}.resume_memory_occupation", "hooked: idempotent, and an answer where it would end the process"),
    *(Symbol(f"sglang.srt.entrypoints.engine.Engine.{name}", "hooked: its processes are forks") for name in STARTERS),
    Symbol("sglang.srt.managers.scheduler.Scheduler.is_fully_idle", "whether memory may go"),
    Symbol("sglang.srt.distributed.parallel_state.get_world_group", "free memory is the least of all ranks"),
    Symbol(
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch", "hooked on CPU: one seed per request"
    ),
    *(Symbol(f"flashinfer.jit.{name}", "compiled before the gate") for name in _KERNELS),
    Symbol("flashinfer.utils.determine_attention_backend", "which kernel its `auto` is"),
    Symbol("sglang.srt.layers.attention.flashinfer_backend.should_use_tensor_core", "whether decoding has kernels of its own"),
    Symbol("sglang.srt.configs.model_config.ModelConfig._get_hf_eos_token_id", "whether an aborted response had ended"),
    Symbol("sglang.srt.layers.sampler.sampling_from_probs_torch", "hooked on CPU: one seed per request"),
    Symbol("sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill", "hooked: how long requests waited"),
    Symbol("sglang.srt.managers.scheduler.Scheduler.report_prefill_stats", "hooked: the engine's counters"),
    Symbol("sglang.srt.managers.scheduler.Scheduler.report_decode_stats", "hooked: the engine's counters"),
    Symbol("sglang.srt.managers.scheduler.Scheduler.get_pool_stats", "how full the KV cache is"),
    Symbol("sglang.srt.managers.schedule_batch.ScheduleBatch.retract_decode", "hooked: requests thrown out"),
    Symbol("sglang.srt.mem_cache.radix_cache.RadixCache.evict", "hooked: tokens dropped from the prefix cache"),
    Symbol("sglang.srt.observability.req_time_stats.SchedulerReqTimeStats.__getstate__", "hooked: a request's times"),
    Symbol("sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_batch_output", "wrapped: a request's times"),
    Symbol("sglang.srt.managers.io_struct.ReleaseMemoryOccupationReqInput", "sleep"),
    Symbol("sglang.srt.managers.io_struct.ResumeMemoryOccupationReqInput", "wake"),
    Symbol("sglang.srt.model_executor.model_runner.ModelRunner.init_lora_manager", "hooked: an adapter's slots sleep"),
    Symbol("sglang.srt.managers.tp_worker.BaseTpWorker.load_lora_adapter_from_tensors", "hooked: where an adapter lies"),
    Symbol("sglang.srt.model_executor.model_runner.ModelRunner.load_lora_adapter_from_tensors", "loads an adapter"),
    Symbol("sglang.srt.managers.tokenizer_manager.TokenizerManager.load_lora_adapter_from_tensors", "a new adapter"),
    Symbol("sglang.srt.managers.tokenizer_manager.TokenizerManager.unload_lora_adapter", "the last adapter goes"),
    Symbol("sglang.srt.lora.lora_registry.LoRARegistry.release", "of a request that was aborted in the queue"),
    Symbol("sglang.srt.lora.lora_registry.LoRARegistry.get_all_adapters", "is an adapter loaded"),
    Symbol(f"{_SERVER}.utils.SGLANG_LORA_NAME", "by which verl's requests ask for the adapter"),
    Symbol("sglang.srt.managers.io_struct.UpdateWeightFromDiskReqInput", "weights on CPU, from shared memory"),
)


def priority_arguments(given: Arguments) -> Arguments:
    """SGLang takes priorities with these two policies only; the user's own choice of another one stands."""
    if given.get("schedule_policy", "fcfs") not in ("fcfs", "lof"):
        return {}
    return {
        "enable_priority_scheduling": True,
        # A request that runs already goes on: what it would lose outweighs what a better order wins.
        "disable_priority_preemption": True,
        "default_priority_value": 0,
    }


def prefill_graphs(given: Arguments) -> bool:
    """They are on where the user says so, by one of two arguments (see `arguments` below)."""
    return bool(given.get("enforce_piecewise_cuda_graph")) or given.get("disable_piecewise_cuda_graph") is False


def refused_arguments(given: Arguments) -> Iterator[tuple[str, str, str]]:
    """Quantized weights, drafts other than n-grams, which need no model of their own, and memory that cannot sleep."""
    for name in ("quantization", "modelopt_quant", "torchao_config", "rl_quant_profile"):
        if given.get(name):
            yield name, NO_SCALES, "null"
    if "quantization_config" in str(given.get(name := "json_model_override_args")):
        yield name, f"of its quantization_config, {NO_SCALES}", "none of that"
    if given.get(name := "speculative_algorithm") not in (None, "NGRAM"):
        yield name, NO_DRAFTS, "NGRAM, null"
    if given.get(name := "enable_memory_saver") is False:
        yield name, "a sleeping engine would keep all its memory", "True"


RECORD = EngineRecord(
    name="sglang",
    other_names=("qwen2_vl", "qwen2_5_vl"),  # the first sync would end its scheduler: KeyError: model.visual.blocks.0.mlp...
    # verl 0.9 reads SGLang's ServerArgs as a dataclass, which later ones are not.
    supported={"sglang": "==0.5.12"},
    tested={"sglang": "0.5.12"},
    prefill="engine_kwargs.sglang.chunked_prefill_size",
    cache_tokens="max_total_tokens",
    share_of_all=False,
    graphs_sleep=True,
    preload=("sglang.srt.entrypoints.http_server", "sglang.srt.managers.scheduler"),
    symbols=SYMBOLS,
    seed="sampling_seed",
    server="verl_mux.rollout.engine.sglang.server.MuxSGLangHttpServer",
    scheduler_title="sglang::scheduler",
    load_weights="verl_mux.rollout.engine.sglang.sglang_weights.load",
    arguments={
        # An idle scheduler that spins takes CPU time from the job that has the lease.
        "sleep_on_idle": True,
        # Graphs of prefills have no tag, so they would stay on the GPU; and to compile and capture them takes minutes.
        "disable_piecewise_cuda_graph": True,
        "custom_weight_loader": ["verl_mux.rollout.engine.sglang.sglang_weights.load_in_engine"],
    },
    # Slots of adapters on the GPU, of which SGLang has eight by default: the trainer's, and none's.
    lora_arguments={"max_loras_per_batch": 2},
    priority_arguments=priority_arguments,
    prefill_graphs=prefill_graphs,
    refused_arguments=refused_arguments,
    no_teacher="verl 0.9.1 sends it `detokenize` with each request, which SGLang 0.5.12 refuses, in verl's own modes too",
    no_windows="SGLang 0.5.12 keeps its KV cache on the device while it sleeps",
    cpu_arguments={
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "lora_backend": "torch_native",
        "disable_overlap_schedule": True,
    },
    stock_cpu_arguments={"enable_memory_saver": False},
)
