"""How the states of verl's FSDP2 engines leave the device: into their places in this process's arena of host memory.

Runs in training workers; called by verl in the place of its own functions, and by workers.py; touches an engine's module and
optimizer, and host memory. The way back is verl's.

verl makes a pinned copy of each tensor that runs on, and FSDP reads it at once where it pads the shard of a rank that has fewer
rows than others: it would keep, as the parameter, what lay there before. Here every copy is complete before FSDP sees one, and
what FSDP has padded on the device is copied as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.distributed.fsdp import FSDPModule
from verl.utils.device import get_device_name, get_torch_device
from verl.workers.engine.fsdp import transformer_impl

from verl_mux.memory.arena import Arena

# Of all engines of this process.
_arena = Arena("training states")


def take_over() -> None:
    """On a GPU, in the place of those that verl calls as an engine moves, and after a set-up and a checkpoint that was loaded."""
    if get_device_name() != "cpu":
        transformer_impl.offload_fsdp_model_to_cpu = offload_model
        transformer_impl.offload_fsdp_optimizer = offload_optimizer


@torch.no_grad()
def offload_model(model: torch.nn.Module, empty_cache: bool = True) -> None:
    """Parameters, gradients and buffers. Raises RuntimeError: no host memory for them can be pinned."""
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # so that the model's parameters are the sharded ones
    copies = _copies(model, of_model(model))
    for shard in _shards(model):
        # FSDP pads what it is given unless this is the same memory.
        shard._sharded_param_data = copies[id(shard.sharded_param)]
    model._apply(lambda tensor: _like(tensor, copies[id(tensor)]))
    if empty_cache:
        get_torch_device().empty_cache()


@torch.no_grad()
def offload_optimizer(optimizer: Any) -> None:
    """Raises RuntimeError: no host memory for it can be pinned."""
    copies = _copies(optimizer, of_optimizer(optimizer))
    for kept in _kept_by(optimizer):
        kept.update({name: _like(it, copies[id(it)]) for name, it in kept.items() if id(it) in copies})


class State(NamedTuple):
    """`tensor`: as the model or the optimizer has it. `part`: this rank's; of a parameter that FSDP shards with padding, flat."""

    name: tuple[Any, ...]
    tensor: torch.Tensor
    part: torch.Tensor


def of_model(model: torch.nn.Module) -> Iterator[State]:
    padded = {id(shard.sharded_param): shard._sharded_param_data for shard in _shards(model)}
    for name, param in model.named_parameters():
        yield State(("parameter", name), param, padded.get(id(param), local(param)))
        if param.grad is not None:
            yield State(("gradient", name), param.grad, local(param.grad))
    for name, buffer in model.named_buffers():
        yield State(("buffer", name), buffer, local(buffer))


def of_optimizer(optimizer: Any) -> Iterator[State]:
    for number, kept in enumerate(_kept_by(optimizer)):
        for name, it in kept.items():
            if isinstance(it, torch.Tensor):
                yield State((number, name), it, local(it))


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _copies(owner: object, states: Iterator[State]) -> dict[int, torch.Tensor]:
    """Complete copies of the parts, by the id of the tensor."""
    tensors = {(id(owner), *it.name): it for it in states}
    held = _arena.hold({name: it.part for name, it in tensors.items()})
    get_torch_device().synchronize()
    return {id(it.tensor): held[name] for name, it in tensors.items()}


def _kept_by(optimizer: Any) -> list[dict[str, Any]]:
    """What the optimizer keeps of each parameter."""
    return [optimizer.state.get(param, {}) for group in optimizer.param_groups for param in group["params"]]


def _shards(model: torch.nn.Module) -> Iterator[Any]:
    """FSDP's own record of each parameter that it shards."""
    for part in model.modules():
        if isinstance(part, FSDPModule) and (group := part._get_fsdp_state()._fsdp_param_group):
            yield from group.fsdp_params


def _like(tensor: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    """What `tensor` is, with this rank's part in `copy`, which may have padding behind it."""
    part = local(tensor)
    data = copy.view(-1)[: part.numel()].view(part.shape)
    if part is tensor:
        return data
    _, context = tensor.__tensor_flatten__()
    return type(tensor).__tensor_unflatten__({"_local_tensor": data}, context, tensor.size(), tensor.stride())
