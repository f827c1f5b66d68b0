"""The doors verl and its engines come through: entry points `verl.plugins` (loaded, never called), `sglang.srt.platforms` and
`vllm.platform_plugins`.

Runs in every process that imports one of the three, so it imports nothing heavy; it does nothing where the CPU platform is not
wanted (verl_mux/platform/choose.py).
"""

from __future__ import annotations

import logging
import os

from verl_mux.platform.choose import cpu_platform_wanted
from verl_mux.post_import import after_import
from verl_mux_cpu import vllm_metadata

# Module of verl's or SGLang's -> ours, imported right after it; ours registers itself there at import.
REGISTRATIONS = {
    "verl.plugin.platform.platform_manager": "verl_mux_cpu.verl_cpu",
    "verl.utils.distributed": "verl_mux_cpu.verl_distributed",
    "verl.workers.engine": "verl_mux_cpu.verl_engine",
    "verl.workers.engine.megatron": "verl_mux_cpu.verl_megatron",
    "verl.workers.rollout.base": "verl_mux_cpu.on_cpu",
    "sglang.srt.lora.backend.torch_backend": "verl_mux_cpu.sglang_lora",
}

# With it SGLang takes the CPU for its device when it is imported; see on_cpu.py.
PRELOAD_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1"}

logger = logging.getLogger(__name__)


def take_cpu_platform() -> bool:
    """Make this process and its children use the CPU platform where it is wanted. Return whether."""
    wanted = cpu_platform_wanted()
    if wanted and not os.environ.get("VERL_PLATFORM"):
        logger.warning("no accelerator here: verl and its engine run on the CPU (set VERL_PLATFORM to choose another platform)")
    if wanted:
        os.environ["VERL_PLATFORM"] = "cpu"
    return wanted


def activate() -> None:
    """Make `sgl_kernel` importable before SGLang's first use of it. SGLang's base platform serves the CPU: none is declared."""
    if cpu_platform_wanted():
        from verl_mux_cpu import kernel_placeholders

        kernel_placeholders.install()


def vllm_platform() -> str | None:
    """The class of vLLM's platform; None: vLLM chooses."""
    if not cpu_platform_wanted():
        return None
    vllm_metadata.install()
    return "verl_mux_cpu.vllm_platform.SleepingCpuPlatform"


def has_bf16_products() -> bool:
    """Whether the CPU multiplies bf16 matrices itself (AVX512-BF16 or AMX); torch emulates it elsewhere, 30 times slower."""
    import torch

    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


if take_cpu_platform():
    vllm_metadata.install()
    for _upstream, _ours in REGISTRATIONS.items():
        after_import(_upstream, _ours)
