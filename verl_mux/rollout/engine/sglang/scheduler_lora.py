"""A LoRA adapter inside SGLang's scheduler processes: its slots sleep with the weights, and it is loaded from the host's region.

Runs in the schedulers of engines that our server launched; hooked by plugin.py around SGLang's own functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl_mux.memory.tags import WEIGHTS

# Of a request: in place of tensors it has the body of region_weights.py.
LORA_FORMAT = "verl_mux"


def register(registry: Any, kinds: Any) -> None:
    registry.register("sglang.srt.model_executor.model_runner.ModelRunner.init_lora_manager", init_lora_manager, kinds.AROUND)
    registry.register("sglang.srt.managers.tp_worker.BaseTpWorker.load_lora_adapter_from_tensors", load, kinds.AROUND)


def init_lora_manager(original: Callable, runner: Any) -> Any:
    """SGLang makes the slots of adapters outside of every tag: they would stay on the device."""
    backup = runner.server_args.enable_weights_cpu_backup
    with runner.memory_saver_adapter.region(WEIGHTS, enable_cpu_backup=backup):
        return original(runner)


def load(original: Callable, worker: Any, request: Any) -> Any:
    if request.load_format != LORA_FORMAT:
        return original(worker, request)
    from sglang.srt.distributed.parallel_state import get_tensor_model_parallel_rank

    from verl_mux.rollout.engine.region_weights import tensors

    lying = tensors(request.serialized_tensors, get_tensor_model_parallel_rank(), worker.model_runner.model)
    own = {name: tensor.clone() for name, tensor in lying}  # SGLang keeps them, and the region is the next sync's
    return worker.model_runner.load_lora_adapter_from_tensors(request.to_ref(), own, request.config_dict)
