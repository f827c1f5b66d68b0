"""SGLang's entry points, which it calls in every process that imports it: most of these are not ours."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

ENGINE_MARK = "VERL_MUX_ENGINE"
SEEDED_VARIABLE = "VERL_MUX_SEEDED_SAMPLING"
DRAFTS_VARIABLE = "VERL_MUX_KEEP_DRAFTS"


def activate() -> None:
    """`sglang.srt.platforms`: make `sgl_kernel` importable where the CPU platform is wanted, before SGLang's first use of it.

    It declares no platform of its own: SGLang's base platform serves the CPU.
    """
    from verl_mux.platform.choose import cpu_platform_wanted

    if cpu_platform_wanted():
        from verl_mux.rollout.engine.sglang import kernel_placeholders

        kernel_placeholders.install()


def register() -> None:
    """`sglang.srt.plugins`: hook the memory saver (bytes per tag, a saver for the CPU), the launch, sleep and wake, what the
    scheduler counts and, on request, the sampler.

    Only in the processes of an engine that one of our servers has launched (VERL_MUX_ENGINE is set for it).
    """
    if os.environ.get(ENGINE_MARK) != "1":
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from verl_mux.rollout.engine.sglang.memory_saver import create_adapter

    HookRegistry.register(
        "sglang.srt.utils.torch_memory_saver_adapter.TorchMemorySaverAdapter.create", create_adapter, HookType.AROUND
    )
    if multiprocessing.parent_process() is None:
        return
    from verl_mux.rollout.engine.sglang import scheduler_log, scheduler_memory

    scheduler_memory.register(HookRegistry, HookType)
    scheduler_log.register(HookRegistry, HookType)
    if os.environ.get(SEEDED_VARIABLE) == "1":
        from verl_mux.rollout.engine.sglang import seeded_sampling

        seeded_sampling.register(HookRegistry, HookType)
    if os.environ.get(DRAFTS_VARIABLE) == "1":
        HookRegistry.register("sglang.srt.speculative.ngram_worker.NGRAMWorker.clear_cache_pool", _keep_drafts, HookType.REPLACE)


def _keep_drafts(worker: Any) -> None:
    """SGLang forgets its trie of drafts whenever the KV cache is flushed, which is after every sync. New weights write other
    tokens more or less often; a draft is verified by them all the same, and an epoch's prompts come again."""
