"""SGLang's LoRA layers without a GPU: they pin what goes to one, which torch refuses where there is none.

Imported after SGLang's LoRA backend for the CPU (see plugin.py). Runs in schedulers that serve an adapter.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.lora import layers
from sglang.srt.lora.backend import torch_backend


class _Unpinned:
    """torch, but for pinned memory."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, *args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return torch.tensor(*args, **kwargs)

    def zeros(self, *args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*args, **kwargs)


layers.torch = torch_backend.torch = _Unpinned()
torch.Tensor.pin_memory = lambda self, *_: self
