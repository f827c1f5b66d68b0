"""SGLang on verl's CPU platform: its servers' environment, and our way for the weights.

Imported after `verl.workers.rollout.base` (see plugin.py). Runs in every process that imports that module.
"""

import os

from verl.workers.rollout.base import _ROLLOUT_REGISTRY

from verl_mux_cpu.verl_cpu import CpuPlatform

_VARIABLE = "SGLANG_USE_CPU_ENGINE"

CpuPlatform.engine_environment[_VARIABLE] = "1"
# verl's adapter builds SGLang's server arguments in the worker's process, and SGLang looks for a device there.
os.environ.setdefault(_VARIABLE, "1")
_ROLLOUT_REGISTRY["sglang", "async"] = "verl_mux_cpu.cpu_server_adapter.CpuServerAdapter"
