"""vLLM, as verl 0.9 serves it: its record. Read in every process, so it imports no vLLM; pure."""

from __future__ import annotations

from collections.abc import Iterator

from verl_mux.rollout.engine.record import NO_DRAFTS, NO_SCALES, Arguments, EngineRecord
from verl_mux.rollout.engine.vllm import CONTEXTS
from verl_mux.upstream import Symbol

_SERVER = "verl.workers.rollout.vllm_rollout"
WORKER = "verl_mux.rollout.engine.vllm.vllm_worker.MuxWorker"
_WORKER = "vllm.v1.worker.gpu_worker.Worker"

SYMBOLS = (
    Symbol(f"{_SERVER}.vllm_async_server.vLLMHttpServer", "subclassed: tagged sleep and wake"),
    Symbol(f"{_SERVER}.vllm_async_server.vLLMReplica", "subclassed: our server class"),
    Symbol(f"{_SERVER}.utils.vLLMColocateWorkerExtension._update_weights", "loads a batch of a sync"),
    Symbol(f"{_SERVER}.utils.vLLMColocateWorkerExtension._iter_all_models_with_config", "what is done after a sync"),
    Symbol("vllm.v1.engine.async_llm.AsyncLLM.abort", "takes the names that we gave"),
    Symbol("vllm.v1.engine.async_llm.AsyncLLM.pause_generation", "nothing is scheduled while the engine sleeps"),
    Symbol("vllm.v1.engine.async_llm.AsyncLLM.generate", "wrapped: priorities, and why a response ended"),
    Symbol("vllm.v1.engine.core_client.DPLBAsyncMPClient.call_utility_async", "answers for the first engine core alone"),
    Symbol("vllm.v1.engine.core_client.AsyncMPClient._call_utility_async", "asks one engine core"),
    *(Symbol(name, "replaced: its processes are forks") for name in CONTEXTS),
    Symbol("vllm.v1.engine.core_client.VLLM_ENGINE_READY_TIMEOUT_S", "set: a launch waits for its init lease"),
    Symbol("vllm.v1.engine.output_processor.OutputProcessor.process_outputs", "wrapped: what happened to requests"),
    Symbol("vllm.v1.metrics.loggers.StatLoggerManager.record", "wrapped: the engine's counters"),
    Symbol("vllm.v1.metrics.stats.RequestStateStats", "a request's times"),
    Symbol(f"{_WORKER}.init_device", "overridden: a joining job waits for its init lease here"),
    Symbol(f"{_WORKER}.load_model", "overridden: says why it failed"),
    Symbol(f"{_WORKER}.determine_available_memory", "overridden: says why it failed"),
    Symbol(f"{_WORKER}.initialize_from_config", "overridden: says why it failed"),
    Symbol(f"{_WORKER}._maybe_get_memory_pool_context", "overridden: bytes by tag"),
    Symbol(f"{_WORKER}.sleep", "overridden: tag by tag, and without a look at the whole device's memory"),
    Symbol(f"{_WORKER}.wake_up", "overridden, as sleep"),
    Symbol("vllm.v1.worker.gpu_model_runner.GPUModelRunner.post_kv_cache_wake_up", "after the KV cache is back"),
    Symbol(f"{_WORKER}.remove_lora", "the last adapter goes"),
    Symbol("vllm.lora.model_manager.LoRAModelManager.set_adapter_mapping", "not skipped after a sleep"),
    Symbol(f"{_SERVER}.utils.VLLM_LORA_INT_ID", "by which verl's requests ask for the adapter"),
    Symbol("vllm.device_allocator.cumem.CuMemAllocator.use_memory_pool", "allocations by tag, on CUDA"),
    Symbol("vllm.device_allocator.cumem.unmap_and_release", "sleep of one tag"),
    Symbol("vllm.device_allocator.cumem.create_and_map", "wake of one tag"),
)


def priority_arguments(given: Arguments) -> Arguments:
    """The user's own choice of another policy stands."""
    return {} if given.get("scheduling_policy", "priority") != "priority" else {"scheduling_policy": "priority"}


def refused_arguments(given: Arguments) -> Iterator[tuple[str, str, str]]:
    """Quantized weights, drafts other than n-grams, which need no model, memory that cannot sleep, another worker."""
    if given.get(name := "quantization"):
        yield name, NO_SCALES, "null"
    if "quantization_config" in str(given.get(name := "hf_overrides")):
        yield name, f"of its quantization_config, {NO_SCALES}", "none of that"
    drafts = str(given.get(name := "speculative_config") or "ngram")  # a mapping, or JSON of one
    if "ngram" not in drafts:
        yield name, NO_DRAFTS, "method ngram, null"
    if given.get(name := "enable_sleep_mode") is False:
        yield name, "a sleeping engine would keep all its memory", "True"
    if given.get(name := "worker_cls") not in (None, WORKER):
        yield name, "its memory sleeps and wakes by the tags of another class", WORKER


RECORD = EngineRecord(
    name="vllm",
    # Its workers' methods that ours override change with each minor version.
    supported={"vllm": "==0.24.0"},
    tested={"vllm": "0.24.0"},
    prefill="max_num_batched_tokens",
    cache_bytes="kv_cache_memory_bytes",
    share_of_all=True,
    graphs_sleep=False,  # their pools are in torch's own allocator
    preload=("vllm.v1.worker.gpu_worker", "vllm.entrypoints.openai.api_server", "vllm.v1.core.sched.scheduler"),
    symbols=SYMBOLS,
    seed="seed",
    server="verl_mux.rollout.engine.vllm.vllm_server.MuxVllmHttpServer",
    scheduler_title="VLLM::EngineCore",
    load_weights="verl_mux.rollout.engine.vllm.vllm_weights.load",
    adapter="verl_mux.rollout.engine.vllm.vllm_weights.Adapter",
    arguments={
        "worker_cls": WORKER,
        # Above verl's own key: without it nothing can leave a GPU.
        "enable_sleep_mode": True,
        # The times of a request come with its answer only where vLLM keeps statistics.
        "disable_log_stats": False,
    },
    priority_arguments=priority_arguments,
    refused_arguments=refused_arguments,
    # verl's own modes on a CPU: the class that the platform names by itself.
    stock_cpu_arguments={"worker_cls": "auto"},
)
