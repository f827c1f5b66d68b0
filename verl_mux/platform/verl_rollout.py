"""verl's own trainer modes on the CPU platform: their rollout workers hand weights over our way.

Imported after `verl.workers.rollout.base`. verl's adapter sends device handles, which tensors in host memory do not have.
"""

from verl.workers.rollout.base import _ROLLOUT_REGISTRY

_ROLLOUT_REGISTRY["sglang", "async"] = "verl_mux.rollout.stock_server_adapter.CpuServerAdapter"
