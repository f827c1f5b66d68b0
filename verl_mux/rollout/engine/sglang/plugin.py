"""SGLang's entry point, which it calls in every process that imports it: most of these are not ours."""

from __future__ import annotations

import multiprocessing
import os

from verl_mux.platform.choose import cpu_part
from verl_mux.warm import engine_processes

# Of SGLang's class Engine: what starts its processes.
STARTERS = ("_launch_scheduler_processes", "_launch_detokenizer_subprocesses")
ENGINE_MARK = "VERL_MUX_ENGINE"
SEEDED_VARIABLE = "VERL_MUX_SEEDED_SAMPLING"


def register() -> None:
    """`sglang.srt.plugins`: hook the memory saver (bytes per tag), the launch, sleep and wake, what the
    scheduler counts and, on request, the sampler.

    Only in the processes of an engine that one of our servers has launched (VERL_MUX_ENGINE is set for it).
    """
    if os.environ.get(ENGINE_MARK) != "1":
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from verl_mux.rollout.engine.sglang import scheduler_log, scheduler_lora, scheduler_memory

    saver = "sglang.srt.utils.torch_memory_saver_adapter.TorchMemorySaverAdapter.create"
    HookRegistry.register(saver, scheduler_memory.create_adapter, HookType.AROUND)
    if multiprocessing.parent_process() is None:
        for name in STARTERS if engine_processes.is_ready() else ():
            HookRegistry.register(
                f"sglang.srt.entrypoints.engine.Engine.{name}", engine_processes.start_as_forks, HookType.AROUND
            )
        return
    scheduler_memory.register(HookRegistry, HookType)
    scheduler_lora.register(HookRegistry, HookType)
    scheduler_log.register(HookRegistry, HookType)
    if os.environ.get(SEEDED_VARIABLE) == "1":
        cpu_part("seeded_sampling")(HookRegistry, HookType)
