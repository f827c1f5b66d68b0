"""What an engine of the bed imports, once for all of them (see Forked)."""

import os

os.environ |= {"VERL_PLATFORM": "cpu", "SGLANG_USE_CPU_ENGINE": "1"}

import sglang.srt.managers.io_struct
import sglang.srt.managers.scheduler_update_weights_mixin
import torch.distributed

from verl_mux.rollout.engine.sglang import scheduler_memory

__all__ = ["scheduler_memory", "sglang", "torch"]
