"""Hands the weights of a sync from a rollout worker to the engine beside it: by saying where in the host's memory they lie.

    batches of the checkpoint engine --> all ranks of the engine have it --> the first one asks SGLang --> region_loader.py

No tensor leaves the region on this side, so the worker holds nothing on the device; what goes there is what each of the engine's
ranks copies for itself. Used by the worker in the place of verl's adapter's update_weights, with that adapter.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from verl_mux.rollout.engine.sglang.region_loader import LOADER, Mapped, Place
from verl_mux.sync.engine import Batch, aside
from verl_mux.sync.layout import SyncError

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput


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
        """The others hear of it when they come to the next batch."""
        if not self._left:
            self._left = True
            with contextlib.suppress(RuntimeError):  # one of them is gone: the others hear of that
                self._gather(f"{type(error).__name__}: {error}")

    def _gather(self, said: Any) -> list[Any]:
        everyone = [said] * self._count
        if self._count > 1:
            torch.distributed.all_gather_object(everyone, said, group=self._group)
        return everyone


class _NoTensor:
    """SGLang takes names with tensors; ours says everything by its name."""

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
