"""The weights of a sync into SGLang (see ../region_weights.py): the request that names where they lie.

`load` runs in rollout workers, called by rollout/engine/replica.py in the place of verl's adapter's update_weights, with that
adapter. `load_in_engine` runs in each of SGLang's scheduler processes, which call it as a `custom_weight_loader`.
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from verl_mux.rollout.engine import region_weights
from verl_mux.rollout.engine.region_weights import Place
from verl_mux.sync.engine import Batch

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

# verl's own limit of 60 s is too little for an engine that pins hundreds of GB.
_WITHIN_S = 600.0
LOADER = "verl_mux.rollout.engine.sglang.sglang_weights.load_in_engine"


async def load(adapter: Any, batches: AsyncGenerator[Batch, None], global_steps: int | None, lora: dict[str, Any] | None) -> None:
    """Load all of `batches` into the engine of verl's `adapter` and note their version (None: none of it is loaded, see
    region_weights.py); as the record says. Raises SyncError."""
    await adapter._init_server_adapter()
    engine = adapter._engine

    async def hand(batch: Batch, places: list[Place]) -> Any:
        if lora is not None:  # not by verl's request, whose fields are those of another version of SGLang
            return await adapter.server_actor.mux_load_lora.remote(region_weights.body(batch, places), lora)
        asked = request(batch, places)
        bodies = [base64.b64encode(body).decode() for body in asked.serialized_named_tensors]
        fields = {"serialized_named_tensors": bodies, "load_format": asked.load_format, "flush_cache": asked.flush_cache}
        return await engine._make_async_request("update_weights_from_tensor", fields, timeout=_WITHIN_S)

    await region_weights.load(batches, adapter.device_mesh["infer_tp"].get_group(), None if engine is None else hand)
    if engine is not None and global_steps is not None:
        await engine.flush_cache()
        await adapter.server_actor.set_global_steps.remote(global_steps)


class _NoTensor:
    """SGLang takes names with tensors; all that we send is in the name."""

    def __reduce__(self) -> tuple[Any, tuple[int]]:
        return torch.zeros, (0,)


def request(batch: Batch, places: list[Place]) -> UpdateWeightsFromTensorReqInput:
    """To an engine whose ranks find the batch at `places`. Its cache stays as it is until it is flushed."""
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
    from sglang.srt.utils import MultiprocessingSerializer

    body = MultiprocessingSerializer.serialize([(region_weights.body(batch, places), _NoTensor())])
    return UpdateWeightsFromTensorReqInput(serialized_named_tensors=[body] * len(places), load_format=LOADER, flush_cache=False)


def load_in_engine(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """As SGLang calls it. Raises RuntimeError: the region cannot be mapped or pinned."""
    from sglang.srt.distributed.parallel_state import get_tensor_model_parallel_rank

    ((body, _),) = named_tensors
    tensors = region_weights.tensors(body, get_tensor_model_parallel_rank(), model)
    if first := list(itertools.islice(tensors, 1)):
        model.load_weights(itertools.chain(first, tensors))
