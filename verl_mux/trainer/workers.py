"""verl's training workers, able to leave the device and to sync from the host copy they leave behind.

trains (states on the device) --sleep--> host copy only --wake--> trains
                                          '-- update_weights: this rank's part goes out from here, no device involved
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import psutil
import torch
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import get_device_name, get_torch_device
from verl.utils.model import convert_weight_keys
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from verl_mux.memory.cpu_saver import cpu_memory_saver
from verl_mux.sync.export import Range, are_row_shards, row_shards, stripes
from verl_mux.worker_settings import WorkerSettings, open_worker_log, pin

# Tags of a trainer's states; gradients live within a train phase only.
TRAIN_TAGS = ("params", "optimizer")


class DeviceStates:
    """Model and optimizer states of one engine: on the device, or as a host copy only.

    On CUDA the move is verl's own offload. On a CPU the device is host memory too, so the states are paused with a host copy:
    the same two places, and the same bytes given back to the one that other jobs want.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def sleep(self) -> dict[str, dict[str, float]]:
        """Leave the device. Returns {tag: {bytes, seconds}}. Idempotent."""
        started = time.perf_counter()
        if get_device_name() != "cpu":
            nbytes = get_torch_device().memory_allocated()
            self._engine.to("cpu", model=True, optimizer=True, grad=True)
            get_torch_device().empty_cache()
            freed = nbytes - get_torch_device().memory_allocated()
            return {"params": {"bytes": max(freed, 0), "seconds": time.perf_counter() - started}}
        return {tag: self._pause(tag, tensors) for tag, tensors in self._tensors().items()}

    def wake(self) -> dict[str, dict[str, float]]:
        """Come back from the host copy. On CUDA verl loads each state where it is used, so there is nothing to do here."""
        if get_device_name() != "cpu":
            return {}
        return {tag: self._resume(tag) for tag in self._tags() if cpu_memory_saver.is_paused(tag)}

    def host_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values of a local tensor, from the host copy while the states sleep."""
        return cpu_memory_saver.host_copy(tensor) if tensor.device.type == "cpu" else tensor.cpu()

    def _tags(self) -> dict[str, str]:
        return {f"{tag}:{id(self._engine)}": tag for tag in TRAIN_TAGS}

    def _tensors(self) -> dict[str, list[torch.Tensor]]:
        optimizer = getattr(self._engine, "optimizer", None)
        states = [v for s in optimizer.state.values() for v in s.values()] if optimizer is not None else []
        module = self._engine.module
        found = {"params": [*module.parameters(), *module.buffers()], "optimizer": states}
        return {f"{tag}:{id(self._engine)}": [_local(t) for t in found[tag] if isinstance(t, torch.Tensor)] for tag in TRAIN_TAGS}

    def _pause(self, tag: str, tensors: list[torch.Tensor]) -> dict[str, float]:
        if cpu_memory_saver.is_paused(tag):
            return {"bytes": 0, "seconds": 0.0}
        started = time.perf_counter()
        cpu_memory_saver.track(tag, tensors)
        nbytes = cpu_memory_saver.pause(tag)
        return {"bytes": nbytes, "seconds": time.perf_counter() - started}

    def _resume(self, tag: str) -> dict[str, float]:
        started = time.perf_counter()
        nbytes = cpu_memory_saver.resume(tag)
        return {"bytes": nbytes, "seconds": time.perf_counter() - started}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class MuxActorWorker(ActorRolloutRefWorker):
    """verl's actor (or reference) worker of a multiplexed job."""

    def __init__(self, config, role: str, **kwargs) -> None:
        settings = WorkerSettings.from_rollout_config(config.rollout)
        pin(settings.train_cpus)
        if settings.train_cpus:
            torch.set_num_threads(len(settings.train_cpus))
        super().__init__(config, role, **kwargs)
        self._settings = settings
        self._events = open_worker_log(settings, f"train_{role}", self.rank)
        # Of an engine without plain row shards: this rank's stripes of the weights, made when it went to sleep.
        self._exported: list[Range] | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def mux_sleep(self) -> dict[str, dict[str, float]]:
        """Leave the device. Returns bytes and seconds by tag, as of this rank."""
        return self._move("sleep")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def mux_wake(self) -> dict[str, dict[str, float]]:
        """Come back to the device from the host copy."""
        return self._move("wake")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def mux_processes(self) -> list[tuple[int, float]]:
        """(pid, creation time) of this worker."""
        own = psutil.Process()
        return [(own.pid, own.create_time())]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> dict[str, float]:
        """Send this rank's part of the weights from the host; verl's own way with any other checkpoint engine."""
        if mode != "mux":
            return await super().update_weights(global_steps=global_steps, mode=mode) or {}
        dtype = PrecisionType.to_dtype(self.config.rollout.dtype)
        part = row_shards(self._host_params(), dtype, self.rank) if self._exported is None else self._exported
        return await self.checkpoint_engine.send_weights(part, global_steps)

    def _export(self) -> None:
        """While the device is ours: what cannot be sent from the host copy of the parameters goes to the host now."""
        engine = self.actor.engine
        if not are_row_shards(engine.module, quantized=getattr(engine, "_qat_enabled", False)):
            weights, _ = engine.get_per_tensor_param()
            self._exported = list(stripes(weights, self.rank, self.world_size))

    def _host_params(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        states = DeviceStates(self.actor.engine)
        module = self.actor.engine.module
        for name, param in convert_weight_keys(module.state_dict(), module).items():
            yield name, param, states.host_copy(_local(param))

    def _move(self, verb: str) -> dict[str, dict[str, float]]:
        if getattr(self, "actor", None) is not None:
            if verb == "wake":
                self._exported = None
            elif self._exported is None:
                self._export()
        moved: dict[str, dict[str, float]] = {}
        for worker in (getattr(self, "actor", None), getattr(self, "ref", None)):
            if worker is None:
                continue
            for tag, figures in getattr(DeviceStates(worker.engine), verb)().items():
                entry = moved.setdefault(tag.partition(":")[0], {"bytes": 0, "seconds": 0.0})
                entry["bytes"] += figures["bytes"]
                entry["seconds"] += figures["seconds"]
        return moved


class MuxTrainingWorker(TrainingWorker):
    """verl's training worker (the critic) of a multiplexed job."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def mux_sleep(self) -> dict[str, dict[str, float]]:
        return DeviceStates(self.engine).sleep()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def mux_wake(self) -> dict[str, dict[str, float]]:
        return DeviceStates(self.engine).wake()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def mux_processes(self) -> list[tuple[int, float]]:
        own = psutil.Process()
        return [(own.pid, own.create_time())]
