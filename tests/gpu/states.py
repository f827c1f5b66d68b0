"""States of a training rank that can sleep, as verl's FSDP engine has them, on either bed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from verl_mux.trainer.fsdp_states import local
from verl_mux.trainer.workers import DeviceStates, host_copy
from verl_mux_cpu.cpu_saver import cpu_memory_saver

WIDTH, LAYERS = 512, 4
# On a GPU: 2.4 GB with Adam's moments, beside which a workspace of cuBLAS is little.
CUDA_WIDTH, CUDA_LAYERS = 4096, 12


def made(role: str, device: str) -> tuple[Any, Callable[[], list[torch.Tensor]], Callable[[], int]]:
    """`device` "cuda" (FSDP2 over one rank, whose group is there) or "cpu". Returns the states after one step of Adam, what gives
    their tensors as the host has them while they sleep, and the bytes on the device."""
    torch.manual_seed(0)
    width, layers = (CUDA_WIDTH, CUDA_LAYERS) if device == "cuda" else (WIDTH, LAYERS)
    module = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers))).to(device)
    if device == "cuda":
        from torch.distributed.fsdp import fully_shard

        for layer in module:
            fully_shard(layer)
        fully_shard(module)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(4, width, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    config = SimpleNamespace(forward_only=False, offload_policy=False)
    engine = SimpleNamespace(module=module, optimizer=optimizer, engine_config=config)

    def copies() -> list[torch.Tensor]:
        return [host_copy(local(tensor).detach()) for tensor in tensors(engine)]

    def device_bytes() -> int:
        if device == "cuda":
            return torch.cuda.memory_allocated()
        return sum(
            held for key, held in cpu_memory_saver.mapped_bytes().items() if key in ((role, "params"), (role, "optimizer"))
        )

    states = DeviceStates(role, engine)
    if device == "cpu":  # they join the saver with their first sleep
        states.sleep()
        states.wake()
    return states, copies, device_bytes


def tensors(engine: Any) -> list[torch.Tensor]:
    moments = [value for state in engine.optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    return [*engine.module.parameters(), *moments]
