"""Engines on verl's CPU platform: their servers' environment, and our way for the weights into SGLang.

Imported after `verl.workers.rollout.base` (see plugin.py). Runs in every process that imports that module.
"""

import os

from verl.workers.rollout.base import _ROLLOUT_REGISTRY

from verl_mux_cpu.verl_cpu import CpuPlatform

_VARIABLE = "SGLANG_USE_CPU_ENGINE"

CpuPlatform.engine_environment[_VARIABLE] = "1"
# vLLM would bind each worker to cores of its own choice.
CpuPlatform.engine_environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
# verl's adapter builds SGLang's server arguments in the worker's process, and SGLang looks for a device there.
os.environ.setdefault(_VARIABLE, "1")
_ROLLOUT_REGISTRY["sglang", "async"] = "verl_mux_cpu.cpu_server_adapter.CpuServerAdapter"
