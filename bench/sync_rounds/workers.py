"""Worker processes of a run beside verl's own engines, with what stands for their inference engines. Made by __main__.py."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import xxhash
from safetensors import safe_open
from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
from sglang.srt.utils import MultiprocessingSerializer
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.checkpoint_engine.base import CheckpointEngineWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.rollout.utils import ensure_async_iterator

from verl_mux.rollout.engine.replica import MuxCheckpointEngineWorker
from verl_mux.rollout.engine.sglang import region_weights
from verl_mux.sync.engine import MuxCheckpointEngine
from verl_mux.sync.export import as_bytes
from verl_mux.trainer.workers import MuxActorWorker

WAYS = ("memory", "engine")

Weights = Iterable[tuple[str, torch.Tensor]] | AsyncIterator[tuple[str, torch.Tensor]]


class LoadedWeights:
    """What stands for an inference engine: its own copy of the model, which lies where it lay."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name in self._tensors:
            self._tensors[name].copy_(tensor)
        else:
            self._tensors[name] = tensor.detach().clone()

    async def update_weights_from_tensor(self, asked: UpdateWeightsFromTensorReqInput) -> None:
        """As SGLang's server, with our loader."""
        ((named, _),) = MultiprocessingSerializer.deserialize(asked.serialized_named_tensors[0])
        for name, tensor in region_weights.tensors(named, 0):
            self.load(name, tensor)

    async def flush_cache(self) -> None:
        """It has none."""

    async def _make_async_request(self, endpoint: str, payload: Mapping[str, Any]) -> None:
        """As SGLang's server, the one endpoint that the adapter for verl's own modes on the CPU asks for."""
        assert endpoint == "update_weights_from_disk"
        self._load_file(Path(payload["model_path"]) / "model.safetensors")

    def _load_file(self, path: Path) -> None:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (no mapping)
                self.load(name, file.get_tensor(name))

    def digest(self) -> int:
        return digest_of(self._tensors.items())


def digest_of(weights: Iterable[tuple[str, torch.Tensor]]) -> int:
    """Of all names and bytes, in the order of the names."""
    hasher = xxhash.xxh3_64()
    for name, tensor in sorted(weights, key=lambda it: it[0]):
        hasher.update(name.encode())
        hasher.update(as_bytes(tensor.detach().contiguous()))
    return hasher.intdigest()


class Consumer:
    """In the place of a worker's adapter. `adapter`: the one that it had, for the way "engine"."""

    def __init__(self, adapter: Any) -> None:
        self.loaded, self.way = LoadedWeights(), WAYS[0]
        self.adapter = adapter
        adapter._engine = self.loaded  # so it looks for no server
        adapter.device_mesh = {"infer_tp": SimpleNamespace(get_group=lambda: None)}

    async def update_weights(self, weights: Weights, **_: Any) -> None:
        if self.way == "engine":
            await self.adapter.update_weights(weights)
            return
        async for name, tensor in ensure_async_iterator(weights):
            self.loaded.load(name, tensor)


class Rank(MuxActorWorker):
    """A trainer rank; `naive` loads this rank's engine from here."""

    rollout: Any

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def consume(self, way: str, backend: str) -> None:
        if not isinstance(self.rollout, Consumer):
            self.rollout = Consumer(self.rollout)
        self.rollout.way = way
        _take_engine(self, self.config.rollout.checkpoint_engine, backend, is_master=self.rank == 0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def step(self) -> int:
        """Weights that no engine has yet. Returns the digest of what all of them must hold."""
        with torch.no_grad():
            for parameter in self.actor.engine.module.parameters():
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                local.add_(0.01)
        return digest_of(self.actor.engine.get_per_tensor_param()[0])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def digest(self) -> int:
        return self.rollout.loaded.digest()


class Worker(MuxCheckpointEngineWorker):
    """A rollout worker."""

    server_adapter: Any

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(
        self, global_steps: int | None = None, token: int | None = None, asleep: Sequence[int] = ()
    ) -> dict[str, float]:
        if isinstance(self.checkpoint_engine, MuxCheckpointEngine) and self.server_adapter.way == "engine":
            batches = self.checkpoint_engine.receive_batches(global_steps, self._batch_bytes)
            await self._load(self.server_adapter.adapter, batches, None)
        else:
            await CheckpointEngineWorker.update_weights(self, global_steps)
        return {}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def consume(self, way: str, backend: str) -> None:
        if not isinstance(self.server_adapter, Consumer):
            self.server_adapter = Consumer(self.server_adapter)
        self.server_adapter.way = way
        _take_engine(self, self.rollout_config.checkpoint_engine, backend)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def digest(self) -> int:
        return self.server_adapter.loaded.digest()


def _take_engine(worker: Any, config: Any, backend: str, **more: bool) -> None:
    """verl makes one a worker, for good; here each that was made is kept."""
    made = vars(worker).setdefault("_made", {"mux": worker.checkpoint_engine})
    if backend not in made:
        bucket = int(config.update_weights_bucket_megabytes) << 20
        given = config.engine_kwargs.get(backend, {})
        made[backend] = CheckpointEngineRegistry.new(backend, bucket_size=bucket, **more, **given)
    worker.checkpoint_engine = made[backend]
