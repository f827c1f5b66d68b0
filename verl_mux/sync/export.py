"""What one trainer rank contributes to a sync, as byte ranges of full tensors on the host.

Two sources: the FSDP2 shards that the rank holds in host memory while it has no lease (no collective, no GPU), or, where the
engine's weights are not what it trains (merged LoRA, packed experts, QAT, Megatron), verl's own generator of full tensors. It
gathers on the device, so it is drained under the training lease, and each rank keeps a stripe of every tensor on the host.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from typing import NamedTuple

import torch

from verl_mux.sync.layout import Entry
from verl_mux.sync.sending import Part, Shard


class Range(NamedTuple):
    """Bytes [offset, offset + nbytes) of the full tensor `name` of `dtype`. `data`: contiguous host tensor of as many numbers,
    of `dtype` or of another floating point type, which is cast piece by piece as it is sent. `tied`: name of an earlier tensor
    that is the same one; then there is no data."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    data: torch.Tensor
    tied: str | None = None

    @property
    def nbytes(self) -> int:
        return self.data.numel() * self.dtype.itemsize

    def read(self, start: int, end: int) -> memoryview:
        """Of those bytes, counted from the range's first; a copy where they are cast, for as long as it is held."""
        flat, size = self.data.reshape(-1), self.dtype.itemsize
        if flat.dtype == self.dtype:
            return as_bytes(flat)[start:end]
        first = start // size
        return _cast(flat[first : -(-end // size)], self.dtype)[start - first * size : end - first * size]

    def into(self, start: int, view: memoryview) -> bool:
        """Fill `view` with those bytes from `start` on, cast on the way. False: the view cuts a number in two."""
        if start % self.dtype.itemsize or len(view) % self.dtype.itemsize:
            return False
        made = torch.frombuffer(view, dtype=self.dtype)
        made.copy_(self.data.reshape(-1)[start // self.dtype.itemsize :][: made.numel()])
        return True


# Memory that pieces were cast into and that is free again: to get new pages for each piece takes as long as to cast it.
_free: deque[torch.Tensor] = deque()
_NOTHING, _LARGE = torch.empty(0, dtype=torch.uint8), 1 << 20


def _cast(numbers: torch.Tensor, dtype: torch.dtype) -> memoryview:
    nbytes = numbers.numel() * dtype.itemsize
    if nbytes < _LARGE:
        return as_bytes(numbers.to(dtype))
    try:
        memory = _free.pop()
    except IndexError:
        memory = _NOTHING
    if memory.nbytes < nbytes:
        memory = torch.empty(nbytes, dtype=torch.uint8)
    made = memory[:nbytes]
    made.view(dtype).copy_(numbers)
    array = made.numpy()  # lives as long as any view of it
    weakref.finalize(array, _free.append, memory).atexit = False
    return memoryview(array)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes without a copy; it must be contiguous and on the host."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def tensor_at(view: memoryview, entry: Entry, offset: int) -> torch.Tensor:
    """A tensor where it lies in a region."""
    dtype = getattr(torch, entry.dtype)
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=dtype)
    count = entry.nbytes // dtype.itemsize
    return torch.frombuffer(view, dtype=dtype, count=count, offset=offset).reshape(entry.shape)


def shard_of(rank: int, ranges: Iterable[Range], piece_bytes: int) -> Shard:
    """What this rank sends, in the order in which engines get the tensors."""
    listed = list(ranges)
    index = {item.name: at for at, item in enumerate(listed)}
    entries = [_entry(item, index) for item in listed]
    parts = [Part(at, item.offset, item.nbytes, item.read, item.into) for at, item in enumerate(listed) if not item.tied]
    return Shard(rank, entries, parts, piece_bytes, made=any(item.data.dtype != item.dtype for item in listed))


def _entry(item: Range, index: dict[str, int]) -> Entry:
    dtype = str(item.dtype).removeprefix("torch.")
    tied = index[item.tied] if item.tied else -1
    return Entry(item.name, dtype, item.shape, prod(item.shape) * item.dtype.itemsize, tied)


def stripe(nbytes: int, rank: int, ranks: int, align: int = 16) -> tuple[int, int]:
    """Rank's byte range [start, end) of a tensor of `nbytes` that every rank holds whole; cuts are multiples of `align`."""
    units = -(-nbytes // align)
    start, end = (units * r // ranks * align for r in (rank, rank + 1))
    return min(start, nbytes), min(end, nbytes)


def _copied(_name: str, part: torch.Tensor) -> torch.Tensor:
    return part.to("cpu", copy=True)


def stripes(
    weights: Iterable[tuple[str, torch.Tensor]], rank: int, ranks: int, dtype: torch.dtype | None = None,
    keep: Callable[[str, torch.Tensor], torch.Tensor] = _copied,
) -> Iterator[Range]:  # fmt: skip
    """This rank's stripe of every full tensor, copied; drains `weights` on every rank, since producing them may be a collective.
    The caller may use their memory again for the next, or free it. A tied embedding comes twice from Megatron where the first and
    the last stage of its pipeline have it; once is enough.

    dtype: that engines hold floating point numbers in; None: as they come. keep: copies a part of the tensor of this name to the
    host; where its copies run on, synchronize before anything reads them.
    """
    seen: set[str] = set()
    for name, tensor in weights:
        if name in seen:
            continue
        seen.add(name)
        sent = dtype if dtype and tensor.is_floating_point() else tensor.dtype
        start, end = stripe(tensor.numel() * sent.itemsize, rank, ranks)
        part = tensor.detach().reshape(-1)[start // sent.itemsize : end // sent.itemsize]
        yield Range(name, sent, tuple(tensor.shape), start, keep(name, part.to(sent)))


def are_row_shards(module: object, quantized: bool = False) -> bool:
    """Whether the rollout's weights are this module's parameters, each sharded by rows or not at all.

    `quantized`: the engine trains with QAT, and exports something else than its parameters.
    """
    from torch.distributed.fsdp import FSDPModule

    if quantized or not isinstance(module, FSDPModule) or hasattr(module, "peft_config"):
        return False
    return not any(_leaves_otherwise(name, param) for name, param in module.named_parameters())


def _leaves_otherwise(name: str, param: torch.Tensor) -> bool:
    shards = [p for p in getattr(param, "placements", ()) if not p.is_replicate()]
    by_rows = len(shards) <= 1 and all(p.is_shard(0) for p in shards)
    # verl unpacks these into one tensor an expert, under the names that engines load.
    packed = param.dim() == 3 and name.endswith((".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"))
    return packed or not by_rows


def row_shards(
    params: Iterable[tuple[str, torch.Tensor, torch.Tensor]], dtype: torch.dtype, rank: int, tied: Mapping[str, str] | None = None
) -> Iterator[Range]:
    """This rank's rows of every FSDP2 parameter, for the rollout's dtype.

    Args:
        params: (name, parameter, its local shard on the host). Of ranks that hold the same rows (a parameter that is no
            DTensor, or is replicated over a dimension of the mesh) the first one sends them, the others nothing.
        tied: name -> an earlier name of the same parameter.

    Raises:
        ValueError: a parameter sharded on another dimension than its rows, or on two (tensor parallel training).
    """
    for name, param, local in params:
        first_row = _first_row(name, param, rank)
        other = (tied or {}).get(name)
        if first_row is None or other:
            first_row, local = 0, local.reshape(-1)[:0]
        sent = dtype if local.is_floating_point() else local.dtype
        row_bytes = sent.itemsize * prod(param.shape[1:])
        yield Range(name, sent, tuple(param.shape), first_row * row_bytes, local.detach().contiguous(), other)


def tied_names(module: torch.nn.Module, renamed: Callable[[dict], dict] = lambda names: names) -> dict[str, str]:
    """Name -> the first name of the same parameter, of those that have several. `renamed`: from the module's names as keys to
    those that the engine knows."""
    first: dict[int, str] = {}
    same = {name: first.setdefault(id(param), name) for name, param in module.named_parameters(remove_duplicate=False)}
    known = {old: new for new, old in renamed({name: name for name in same}).items()}
    return {known[name]: known[other] for name, other in same.items() if name != other}


def _first_row(name: str, param: torch.Tensor, rank: int) -> int | None:
    """First row of what this rank sends; None where another rank sends the same."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(param, DTensor):
        return 0 if rank == 0 else None
    shards = [p for p in param.placements if not p.is_replicate()]
    if len(shards) > 1 or any(not p.is_shard(0) for p in shards):
        raise ValueError(f"{name} has placements {param.placements}; the mux sync sends rows (dimension 0) only")
    at = param.device_mesh.get_coordinate()
    if any(p.is_replicate() and coordinate for p, coordinate in zip(param.placements, at, strict=True)):
        return None
    _, offsets = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    return offsets[0] if shards else 0
