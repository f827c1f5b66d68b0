"""vLLM's CPU platform with a sleep mode; by the entry point `vllm.platform_plugins`, which vLLM asks before its own platforms.

Runs in every process that imports vLLM, where the CPU platform is wanted; called by vLLM.
"""

from __future__ import annotations

from vllm.platforms.cpu import CpuPlatform

from verl_mux.rollout.engine.vllm.vllm_record import RECORD


class SleepingCpuPlatform(CpuPlatform):
    """Workers are ours, since vLLM's own ones for the CPU do not sleep."""

    worker = "verl_mux_cpu.vllm_cpu_worker.MuxCpuWorker"

    def is_sleep_mode_available(self) -> bool:
        return True

    @classmethod
    def check_and_update_config(cls, vllm_config) -> None:
        if vllm_config.parallel_config.worker_cls in ("auto", RECORD.arguments["worker_cls"]):
            vllm_config.parallel_config.worker_cls = cls.worker
        super().check_and_update_config(vllm_config)
