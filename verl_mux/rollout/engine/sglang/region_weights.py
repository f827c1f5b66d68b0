"""Hands the weights of a sync from rollout workers to the engine beside them: by naming where in the host's memory they lie.

    batches of the checkpoint engine --> all ranks of the engine have it --> the first one asks SGLang --> `load_in_engine`

`load` runs in rollout workers, called by rollout/engine/replica.py in the place of verl's adapter's update_weights, with that
adapter. `load_in_engine` runs in each of SGLang's scheduler processes, which call it as a `custom_weight_loader`: a rank's
parameters copy out of the full tensors the part that is theirs. No tensor leaves the region on the worker's side, so nothing of a
worker's lies on the device.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from verl_mux.sync.engine import Batch, aside, tensor_at
from verl_mux.sync.layout import NAME, Entry, Held, Region, SyncError

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

LOADER = "verl_mux.rollout.engine.sglang.region_weights.load_in_engine"


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


# ---------------------------------------------------------------- in rollout workers


async def load(adapter: Any, batches: AsyncGenerator[Batch, None], global_steps: int | None) -> None:
    """Load all of `batches` into the engine of verl's `adapter` and note their version.

    Raises:
        SyncError: the sync failed, here or at another rank of this engine.
    """
    await adapter._init_server_adapter()
    ranks = _Ranks(adapter)
    try:
        async for batch in batches:
            places = await aside(ranks.exchange, Place(os.getpid(), batch.region.fd, batch.region.nbytes))
            if adapter._engine is not None:
                await adapter._engine.update_weights_from_tensor(request(batch, places))
        await aside(ranks.exchange, None)
    except Exception as error:
        # The others wait for this rank.
        await aside(ranks.leave, error)
        raise
    finally:
        await batches.aclose()
    if adapter._engine is not None:
        await adapter._engine.flush_cache()
        if global_steps is not None:
            await adapter.server_actor.set_global_steps.remote(global_steps)


class _Ranks:
    """The workers of one engine, which go through its batches together."""

    def __init__(self, adapter: Any) -> None:
        self._group = adapter.device_mesh["infer_tp"].get_group()
        self._count = torch.distributed.get_world_size(self._group)
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


class _NoTensor:
    """SGLang takes names with tensors; all that we send is in the name."""

    def __reduce__(self) -> tuple[Any, tuple[int]]:
        return torch.zeros, (0,)


def request(batch: Batch, places: list[Place]) -> UpdateWeightsFromTensorReqInput:
    """To an engine whose ranks find the batch at `places`. Its cache stays as it is until it is flushed."""
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
    from sglang.srt.utils import MultiprocessingSerializer

    of = slice(batch.first, batch.last)
    mapped = Mapped(places, batch.layout.entries[of], batch.layout.offsets[of])
    body = MultiprocessingSerializer.serialize([(msgspec.json.encode(mapped).decode(), _NoTensor())])
    return UpdateWeightsFromTensorReqInput(serialized_named_tensors=[body] * len(places), load_format=LOADER, flush_cache=False)


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
            if code := int(torch.cuda.cudart().cudaHostRegister(address, region.nbytes, 0)):
                raise RuntimeError(f"{region.nbytes} bytes of weights on this host cannot be pinned (CUDA error {code})")
            self._pinned = address
        return region

    def close(self) -> None:
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pinned)
            self._pinned = 0
        super().close()


_mapping = _Mapping()


def load_in_engine(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """As SGLang calls it. Raises RuntimeError: the region cannot be mapped or pinned."""
    from sglang.srt.distributed.parallel_state import get_tensor_model_parallel_rank

    ((body, _),) = named_tensors
    model.load_weights(tensors(body, get_tensor_model_parallel_rank()))


def tensors(body: str, rank: int) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, full tensor) of what a request has in the place of a name, for this rank of the engine. Raises as
    `load_in_engine`."""
    asked = msgspec.json.decode(body, type=Mapped)
    region = _mapping.of_place(asked.places[rank])
    for entry, offset in zip(asked.entries, asked.offsets, strict=True):
        yield entry.name, tensor_at(region.view, entry, offset)
