"""verl's own trainer modes on the CPU platform: their rollout workers hand weights over our way.

Imported after `verl.workers.rollout.base`. verl's adapter sends device handles, which tensors in host memory do not have.
"""

import os

from verl.workers.rollout.base import _ROLLOUT_REGISTRY

# verl's adapter builds SGLang's server arguments in the trainer's process, and SGLang looks for a device there.
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
_ROLLOUT_REGISTRY["sglang", "async"] = "verl_mux.rollout.stock_server_adapter.CpuServerAdapter"
