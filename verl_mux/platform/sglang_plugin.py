"""Entry point `sglang.srt.plugins`: SGLang calls this in the engine's and in each scheduler's process.

The hooks are active only in an engine that one of our servers has launched (VERL_MUX_ENGINE is set for it).
"""

from __future__ import annotations

import multiprocessing
import os

ENGINE_MARK = "VERL_MUX_ENGINE"
SEEDED_VARIABLE = "VERL_MUX_SEEDED_SAMPLING"


def register() -> None:
    """Hook SGLang's memory saver (bytes and seconds per tag, a saver for the CPU), its launch and, on request, its sampler."""
    if os.environ.get(ENGINE_MARK) != "1":
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from verl_mux.memory.sglang_adapter import create_adapter

    HookRegistry.register(
        "sglang.srt.utils.torch_memory_saver_adapter.TorchMemorySaverAdapter.create", create_adapter, HookType.AROUND
    )
    if multiprocessing.parent_process() is None:
        return
    from verl_mux.rollout.launch_gate import wait_at_gate

    HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner.load_model", wait_at_gate, HookType.BEFORE)
    if os.environ.get(SEEDED_VARIABLE) == "1":
        from verl_mux.rollout import seeded_sampling

        seeded_sampling.register(HookRegistry, HookType)
