"""vLLM's CPU worker with our memory saver, the ledger's device, and one seed per request.

Runs in vLLM's worker processes, which make the class; named by vllm_platform.py.
"""

from __future__ import annotations

import torch
import xxhash

from vllm.v1.worker.cpu_worker import CPUWorker  # isort: skip  # vLLM's own is the first import of its CPU path
from vllm import _custom_ops

from verl_mux.platform.charges import has_budget
from verl_mux.rollout.engine.vllm.vllm_worker import TaggedWorker
from verl_mux_cpu import device_ledger
from verl_mux_cpu.cpu_engine import SavingAdapter


class MuxCpuWorker(TaggedWorker, CPUWorker):
    """Host memory is the device."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._saver = SavingAdapter(self._report)
        # It would pack each linear weight into a handle and leave an empty tensor, which can be neither updated nor given back.
        _custom_ops._supports_onednn = False

    def determine_available_memory(self) -> int:
        """On a device with a budget, vLLM's share is one of the budget, of which the weights and charges are gone already."""
        if not has_budget() or self.cache_config.kv_cache_memory_bytes:
            return super().determine_available_memory()
        self.model_runner.warming_up_model()
        size, free = device_ledger.budget(), device_ledger.free()
        return max(free - round(size * (1.0 - self.cache_config.gpu_memory_utilization)), 0)

    def sample_tokens(self, *args, **kwargs):
        """A request with a seed draws each token by (seed, position), so that one that is cut and goes on draws the same ones."""
        batch, requests = self.model_runner.input_batch, self.model_runner.requests
        for at in batch.generators:
            request = requests[batch.req_ids[at]]
            drawn = f"{request.sampling_params.seed}/{request.num_tokens}".encode()
            batch.generators[at] = _Generator().manual_seed(xxhash.xxh32_intdigest(drawn))
        return super().sample_tokens(*args, **kwargs)


class _Generator(torch.Generator):
    """vLLM turns a generator back by its offset, which the CPU's have not, after a part of a prompt that draws nothing."""

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None:
        pass
