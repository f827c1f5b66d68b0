"""Kernels that flashinfer compiles when they are first wanted, compiled before the launch gate instead: that takes minutes the
first time on a host, but no device memory, so no lease.

Runs in SGLang's scheduler processes; called by scheduler_memory.py. Touches flashinfer's cache on this host, under its locks.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

log = logging.getLogger(__name__)


def compile_kernels(runner: Any) -> None:
    """Of attention and sampling, as SGLang's backend will ask for them with this model. What cannot be compiled here is left to
    the engine, which says why."""
    asked, model = runner.server_args, runner.model_config
    if asked.attention_backend != "flashinfer" or asked.kv_cache_dtype != "auto" or model.sliding_window_size is not None:
        return
    try:
        from flashinfer.jit import build_jit_specs, gen_batch_decode_module, gen_batch_prefill_module
        from flashinfer.jit.sampling import gen_sampling_module
        from flashinfer.utils import determine_attention_backend
        from sglang.srt.layers.attention.flashinfer_backend import should_use_tensor_core

        dtype, heads = model.dtype, model.num_attention_heads // runner.tp_size
        # Of queries, of keys and values, of the output, of indices; heads, positions (none), no window, no cap of logits.
        of_all = (dtype, dtype, dtype, torch.int32, model.head_dim, model.v_head_dim, 0, False, False)
        auto = determine_attention_backend(torch.device(runner.device), 0, False, False, dtype, dtype)  # without a cached prefix
        specs = [gen_batch_prefill_module(backend, *of_all, False) for backend in dict.fromkeys(("fa2", auto))]
        if not should_use_tensor_core(dtype, heads, model.get_num_kv_heads(runner.tp_size)):
            specs.append(gen_batch_decode_module(*of_all))
        build_jit_specs([*specs, gen_sampling_module()])
    except Exception:
        log.warning("kernels could not be compiled before the launch gate", exc_info=True)
