"""Hands the weights of a sync from rollout workers to the engine beside them: by naming where in the host's memory they lie.

    batches of the checkpoint engine --> all ranks of the engine have it --> the first one asks the engine --> `tensors`

A batch without tensors shows an engine the memory, which it then maps and pins, asleep too: the first time that takes long.

`load` runs in rollout workers, called by each engine's own `load_weights`. `tensors` runs in each process of an engine that holds
weights: its parameters copy out of the full tensors the part that is theirs. No tensor leaves the region on the worker's side, so
nothing of a worker's lies on the device.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Any

import msgspec
import torch

from verl_mux.memory.arena import pin
from verl_mux.sync.engine import Batch, aside
from verl_mux.sync.export import tensor_at
from verl_mux.sync.layout import NAME, Entry, Held, Region, SyncError


class Place(msgspec.Struct, frozen=True):
    """The region of a host: open file `fd` of process `pid` there."""

    pid: int
    fd: int
    nbytes: int


class Mapped(msgspec.Struct, frozen=True):
    """What an engine is asked to load. places: of each rank of the engine; offsets: of each entry."""

    places: list[Place]
    entries: list[Entry]
    offsets: list[int]


# ---------------------------------------------------------------- in rollout workers


async def load(
    batches: AsyncGenerator[Batch, None], group: Any, hand: Callable[[Batch, list[Place]], Awaitable[Any]] | None
) -> None:
    """Go through all of `batches` with the other workers of this engine.

    group: torch's, of these workers. hand: at the first of them, has the engine load a batch from where it lies at each rank.

    Raises:
        SyncError: the sync failed, here or at another rank of this engine.
    """
    ranks = _Ranks(group)
    try:
        async for batch in batches:
            places = await aside(ranks.exchange, Place(os.getpid(), batch.region.fd, batch.region.nbytes))
            if hand is not None:
                await hand(batch, places)
        await aside(ranks.exchange, None)
    except Exception as error:
        # The others wait for this rank.
        await aside(ranks.leave, error)
        raise
    finally:
        await batches.aclose()


def body(batch: Batch, places: list[Place]) -> str:
    """What `tensors` reads at an engine whose ranks find the batch at `places`."""
    of = slice(batch.first, batch.last)
    return msgspec.json.encode(Mapped(places, batch.layout.entries[of], batch.layout.offsets[of])).decode()


class _Ranks:
    """The workers of one engine, which go through its batches together."""

    def __init__(self, group: Any) -> None:
        self._group, self._count = group, torch.distributed.get_world_size(group)
        self._left = False

    def exchange(self, place: Place | None) -> list[Place]:
        """Where the batch lies at each rank, once it is there at all of them. Raises SyncError: one of them has failed."""
        places = self._gather(place)
        if failed := next((it for it in places if isinstance(it, str)), None):
            self._left = True
            raise SyncError(f"another worker of this engine failed: {failed}")
        return places

    def leave(self, error: Exception) -> None:
        """Fail at the others too, when they come to the next batch."""
        if not self._left:
            self._left = True
            with contextlib.suppress(RuntimeError):  # one of them is gone, which the others notice by themselves
                self._gather(f"{type(error).__name__}: {error}")

    def _gather(self, said: Any) -> list[Any]:
        everyone = [said] * self._count
        if self._count > 1:
            torch.distributed.all_gather_object(everyone, said, group=self._group)
        return everyone


# ---------------------------------------------------------------- in the engine's processes


class _Mapping(Held):
    """The region that this process has mapped, over syncs; pinned where there is a GPU, which then copies from it at once."""

    _pinned = 0

    def of_place(self, place: Place) -> Region:
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
        last, region = self._region, self.mapped(fd, place.nbytes)
        if region is not last and torch.cuda.is_available() and region.nbytes:
            address = torch.frombuffer(region.view, dtype=torch.uint8).data_ptr()
            pin(address, region.nbytes, "weights")
            self._pinned = address
        return region

    def close(self) -> None:
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pinned)
            self._pinned = 0
        super().close()


_mapping = _Mapping()


def tensors(body: str, rank: int, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, full tensor) of what `body` made, for this rank of the engine, which loads it into `model`. Raises RuntimeError: the
    region cannot be mapped or pinned."""
    asked = msgspec.json.decode(body, type=Mapped)
    region, params = _mapping.of_place(asked.places[rank]), dict(model.named_parameters())
    for entry, offset in zip(asked.entries, asked.offsets, strict=True):
        tensor, param = tensor_at(region.view, entry, offset), params.get(entry.name)
        # A part of each row: out of host memory one thread would collect it; out of the device's own a kernel does.
        by_columns = param is not None and param.dim() == len(entry.shape) == 2 and param.shape[1] < entry.shape[1]
        yield entry.name, tensor.to(param.device) if by_columns and param is not None else tensor
