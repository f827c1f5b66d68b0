"""Loads weights inside SGLang's scheduler processes from the region of their host, which its rollout workers have filled.

SGLang's own door for it is `custom_weight_loader`. It calls `load` in every rank's process; a rank's parameters copy out of the
full tensors the part that is theirs, so that is all that goes to its device.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch

from verl_mux.sync.engine import tensor_at
from verl_mux.sync.layout import NAME, Entry, Region

LOADER = "verl_mux.rollout.engine.sglang.region_loader.load"


class Place(msgspec.Struct, frozen=True):
    """The region of a host: open file `fd` of process `pid` there."""

    pid: int
    fd: int
    nbytes: int


class Mapped(msgspec.Struct, frozen=True):
    """Rides in a request in the place of a tensor's name. places: of each rank of the engine; offsets: of each entry."""

    places: list[Place]
    entries: list[Entry]
    offsets: list[int]


class _Mapping:
    """The region that this process has mapped, over syncs; pinned where there is a GPU, which then copies from it at once."""

    def __init__(self) -> None:
        self._region: Region | None = None
        self._pinned = 0

    def of(self, place: Place) -> Region:
        """Raises RuntimeError: there is no such memory."""
        path = f"/proc/{place.pid}/fd/{place.fd}"
        try:
            # A client that reaches the engine's port can name any open file of this user.
            is_region = os.readlink(path).startswith(f"/memfd:{NAME}")
            fd = os.open(path, os.O_RDWR)
        except OSError as error:
            raise RuntimeError(f"the weights at {path} cannot be mapped: {error.strerror}") from None
        if not is_region or os.fstat(fd).st_size < place.nbytes:
            os.close(fd)
            raise RuntimeError(f"{path} is no memory of {place.nbytes} bytes of weights")
        if self._region is not None and os.path.sameopenfile(self._region.fd, fd):
            os.close(fd)
            return self._region
        self._let_go()
        self._region = Region(fd, place.nbytes)
        self._pin(self._region)
        return self._region

    def _pin(self, region: Region) -> None:
        if not torch.cuda.is_available() or not region.nbytes:
            return
        address = torch.frombuffer(region.view, dtype=torch.uint8).data_ptr()
        code = int(torch.cuda.cudart().cudaHostRegister(address, region.nbytes, 0))
        if code:
            raise RuntimeError(f"{region.nbytes} bytes of weights on this host cannot be pinned (CUDA error {code})")
        self._pinned = address

    def _let_go(self) -> None:
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pinned)
            self._pinned = 0
        if self._region is not None:
            self._region.close()
            self._region = None


_mapping = _Mapping()


def load(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """As SGLang calls it. Raises RuntimeError: the region cannot be mapped or pinned."""
    from sglang.srt.distributed.parallel_state import get_tensor_model_parallel_rank

    ((body, _),) = named_tensors
    model.load_weights(tensors(body, get_tensor_model_parallel_rank()))


def tensors(body: str, rank: int) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, full tensor) of what a request has in the place of a name, for this rank of the engine. Raises as `load`."""
    asked = msgspec.json.decode(body, type=Mapped)
    region = _mapping.of(asked.places[rank])
    for entry, offset in zip(asked.entries, asked.offsets, strict=True):
        yield entry.name, tensor_at(region.view, entry, offset)
