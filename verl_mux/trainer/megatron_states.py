"""Where the states of verl's Megatron engines lie while they sleep: in places of this process's arena of host memory.

Runs in training workers; called by workers.py before verl's own call, which pins a block for each, rounded up to a power of two,
unless it has one or lies on the host already. The way back is verl's. Touches buffers and optimizers, and host memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from verl_mux.memory.arena import Arena

# Of what an optimizer keeps of a parameter, what verl moves.
_MOVED = ("exp_avg", "exp_avg_sq", "master_param")


@torch.no_grad()
def give_places(stages: Sequence[Any], optimizer: Any, arena: Arena) -> None:
    """stages: of this rank's part of the model; those that only look on have no buffers. Copies to the host run on: synchronize.
    Raises RuntimeError: no host memory can be pinned."""
    buffers = [it for stage in stages for it in (*_list(stage, "buffers"), *_list(stage, "expert_parallel_buffers"))]
    for number, buffer in enumerate(buffers):
        data, name = buffer.param_data, (id(stages), "buffer", number)
        if getattr(data, "cpu_data", None) is None and data.untyped_storage().nbytes():
            data.cpu_data = arena.hold({name: data})[name]
            buffer.param_data_size = data.untyped_storage().nbytes() // data.itemsize
    for number, one in enumerate(getattr(optimizer, "chained_optimizers", [optimizer])):
        copies = {(id(optimizer), number, at): it for at, it in enumerate(_tensors(_list(one, "shard_fp32_from_float16_groups")))}
        for name, held in arena.hold({name: it.data for name, it in copies.items()}).items():
            copies[name].data = held
        inner = getattr(one, "optimizer", None)
        if inner is None or hasattr(inner, "sub_optimizers"):  # Megatron's own way of states on the host
            continue
        for at, kept in enumerate(inner.state.values()):
            moved = {(id(optimizer), number, at, key): kept[key] for key in _MOVED if key in kept}
            kept.update({name[-1]: held for name, held in arena.hold(moved).items()})


def _list(of: Any, name: str) -> Iterable[Any]:
    """An attribute, where it is a list: torch's modules have a method `buffers`."""
    found = getattr(of, name, ())
    return found if isinstance(found, list) else ()


def _tensors(groups: Iterable[Any]) -> Iterator[torch.Tensor]:
    for it in groups:
        if isinstance(it, torch.Tensor):
            yield it
        elif it is not None:
            yield from _tensors(it)
