"""verl's training workers, able to leave the device and to sync from the host copy they leave behind.

Runs in the training workers; modes.py puts these classes in place of verl's and calls the methods named mux_*. Touches the
device and host memory.

trains (states on the device) --sleep--> host copy only --wake--> trains
                                          '-- update_weights: this rank's part goes out from here, no device involved
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import get_device_name, get_torch_device
from verl.utils.fs import copy_to_local
from verl.utils.model import convert_weight_keys
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from verl_mux.config.job_checks import VEOMNI
from verl_mux.coordinator.bus.fence import Fence
from verl_mux.coordinator.bus.members import this_process
from verl_mux.coordinator.bus.messages import Member
from verl_mux.memory.arena import Arena
from verl_mux.memory.model_files import read_ahead, weights_of
from verl_mux.memory.room import residents
from verl_mux.memory.tags import Moved, Moves
from verl_mux.places.place import Location
from verl_mux.places.ray_nodes import here
from verl_mux.platform.charges import charge
from verl_mux.platform.choose import cpu_part
from verl_mux.platform.host_memory import process_bytes
from verl_mux.sync.export import Range, are_row_shards, row_shards, stripes, tied_names
from verl_mux.trainer.fsdp_states import local, offload_model, take_over
from verl_mux.trainer.megatron_states import give_places
from verl_mux.worker_settings import WorkerSettings, node_of, pin

# Tags of a trainer's states. Gradients live within a train phase only: Megatron's have a buffer, which no host copy is made of.
TRAIN_TAGS = ("params", "optimizer", "gradients")
# Of all Megatron engines of this process; and bytes by which memory grows where tensors come one by one.
_ADDED = 64 << 20
_megatron = Arena("training states", _ADDED)


class DeviceStates:
    """Model and optimizer states of one engine: on the device, or as a host copy only.

    On CUDA they move once each a phase, by verl's call and with fsdp_states.py: while they are awake, the calls with which verl
    loads and offloads around each pass leave them where they are. On a CPU the device is host memory too: the states are paused
    with a host copy.

    role: "actor", "ref" or "critic"; a process may hold one engine of each.
    """

    def __init__(self, role: str, engine: Any) -> None:
        self._role, self._engine = role, engine

    def sleep(self) -> Moves:
        """Leave the device; what has left already stays where it is."""
        if get_device_name() != "cpu":
            return {"params": self._offload()}
        moves, saver = {}, _cpu_saver()
        for tag in TRAIN_TAGS:
            states = [local(it) for it in self._states(tag) if isinstance(it, torch.Tensor)]
            if not saver.is_paused(key := (self._role, tag)) and (states or tag != "gradients"):
                saver.track(key, states, enable_cpu_backup=tag != "gradients")
                moves[tag] = saver.pause(key)
        return moves

    def wake(self) -> Moves:
        """Come back from the host copy; what has come back already stays where it is."""
        if get_device_name() != "cpu":
            return {"params": self._load()}
        keys = {tag: (self._role, tag) for tag in TRAIN_TAGS}
        return {tag: _cpu_saver().resume(key) for tag, key in keys.items() if _cpu_saver().is_paused(key)}

    def _load(self) -> Moved:
        started, before = time.perf_counter(), get_torch_device().memory_allocated()
        self._engine.to(get_device_name(), model=True, optimizer=True, grad=True)
        get_torch_device().synchronize()
        self._moved_by_calls(False)
        taken = max(get_torch_device().memory_allocated() - before, 0)  # of this engine alone: a process may hold two
        return Moved(taken, taken, time.perf_counter() - started)

    def _moved_by_calls(self, moved: bool) -> None:
        """Whether verl's calls load and offload the states, which completion.py asks for. FSDP moves frozen models, and states
        under an offload policy of its own, layer by layer, out of the arena once they lie there."""
        config = self._engine.engine_config
        by_layer = hasattr(config, "offload_policy") and (config.forward_only or config.offload_policy)
        if not by_layer:
            self._engine._is_offload_param = self._engine._is_offload_optimizer = moved

    def _offload(self) -> Moved:
        started, before = time.perf_counter(), get_torch_device().memory_allocated()
        self._moved_by_calls(True)
        if isinstance(self._engine.module, list):
            give_places(self._engine.module, getattr(self._engine, "optimizer", None), _megatron)
            get_torch_device().synchronize()
        self._engine.to("cpu", model=True, optimizer=True, grad=True)
        if self._engine.engine_config.forward_only and isinstance(self._engine.module, FSDPModule):
            offload_model(self._engine.module)  # verl leaves it where FSDP pinned it, each shard by itself
        # verl's copies of other engines' states run on: until they are done the device has no free bytes.
        get_torch_device().synchronize()
        get_torch_device().empty_cache()
        _empty_host_cache()
        return Moved(max(before - get_torch_device().memory_allocated(), 0), 0, time.perf_counter() - started)

    def _states(self, tag: str) -> list[Any]:
        """Megatron has a list of modules, stages of a pipeline, each with flat buffers under the name of torch's method, and an
        optimizer of optimizers that train copies in fp32."""
        module = self._engine.module
        stages = module if isinstance(module, list) else [module]
        if tag == "params":
            return [it for stage in stages for it in (*stage.parameters(), *torch.nn.Module.buffers(stage))]
        if tag == "gradients":
            flat = [stage for stage in stages if isinstance(stage.buffers, list)]
            return [it.grad_data for stage in flat for it in (*stage.buffers, *stage.expert_parallel_buffers)]
        optimizer = getattr(self._engine, "optimizer", None)
        inner = [getattr(it, "optimizer", it) for it in getattr(optimizer, "chained_optimizers", [optimizer])]
        own = {id(it) for stage in stages for it in stage.parameters()}
        return [it for one in inner if one is not None for it in _states_of(one) if id(it) not in own]


def _states_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """What it keeps of each parameter, and the parameters."""
    kept = [value for state in optimizer.state.values() for value in state.values()]
    return [*kept, *(param for group in optimizer.param_groups for param in group["params"])]


def _empty_host_cache() -> None:
    """Pinned memory in which nothing lies goes back to the host, where other jobs' states want it: torch keeps it for ever."""
    torch._C._host_emptyCache()


def _cpu_saver() -> Any:
    return cpu_part("saver")


def _device() -> Any | None:
    """As memory/room.py wants it."""
    return None if get_device_name() == "cpu" else get_torch_device()


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a local tensor, from the host copy while its states sleep."""
    return _cpu_saver().host_copy(tensor) if get_device_name() == "cpu" else tensor.cpu()


def _read_ahead(model: str, resume: str | None) -> None:
    """Before a worker's first lease: read into its host's memory what it will load. resume: the checkpoint's folder."""
    rank = os.environ["RANK"]
    shards = sorted(Path(resume).glob(f"*/*_rank_{rank}.pt")) if resume else []
    first_here = int(rank) % int(os.environ.get("RAY_LOCAL_WORLD_SIZE", 1)) == 0
    read_ahead([*(weights_of(model) if first_here else []), *shards])


class _Multiplexed:
    """What every training worker answers a trainer of ours. `_who`: its role."""

    _fence: Fence
    _who: str
    _states: Callable[[], list[DeviceStates]]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def mux_sleep(self) -> Moves:
        """Leave the device. Returns what moved on this rank. Raises Failure where more stays than may."""
        self._fence.shut()
        return residents.sleep(self._who, self._states(), _device())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def mux_wake(self, token: int) -> Moves:
        """Come back to the device from the host copy, under the lease `token`.

        Raises Fenced for any but the newest; Failure where there is no room, with which process holds what.
        """
        self._fence.enter(token)
        return residents.wake(self._who, self._states(), _device())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def mux_reopen(self, token: int) -> None:
        """The lease could not be used for a while, and holds. Raises Fenced for any but the newest."""
        self._fence.reopen(token)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def mux_where(self) -> tuple[Location, Member]:
        return here(), this_process()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def mux_host_memory(self) -> tuple[Member, dict[str, int]]:
        return this_process(), process_bytes()


class MuxActorWorker(_Multiplexed, ActorRolloutRefWorker):
    """verl's actor (or reference) worker of a multiplexed job."""

    def __init__(self, config, role: str, **kwargs) -> None:
        take_over()
        settings = WorkerSettings.from_rollout_config(config.rollout)
        pin(settings.train_cpus)
        if settings.train_cpus:
            torch.set_num_threads(len(settings.train_cpus))
        super().__init__(config, role, **kwargs)
        self._fence, self._who = Fence(), role
        residents.arrived(role)
        residents.wait_s = settings.device.wake_wait_s
        per_node = self.world_size // max(len(settings.train_nodes), 1)
        node = node_of(settings.train_nodes, self.rank, self.world_size) if settings.train_nodes else ""
        settings.device.announce(settings.job, node, self.rank % max(per_node, 1))
        charge(settings.device.charges.trainer(self.world_size))
        _read_ahead(copy_to_local(config.model.path, use_shm=config.model.get("use_shm", False)), settings.resume)
        # Of an engine without plain row shards: this rank's stripes of the weights, made when it went to sleep.
        self._exported: list[Range] | None = None
        self._arena = Arena("exported weights", _ADDED)
        # What peft says of the LoRA adapter that they are; None: they are the whole model.
        self._lora: dict[str, Any] | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def mux_sleep(self) -> Moves:
        exported = self._export() if getattr(self, "actor", None) is not None and self._exported is None else {}
        return super().mux_sleep() | exported

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def mux_wake(self, token: int) -> Moves:
        moves = super().mux_wake(token)
        self._exported = None
        return moves

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def mux_lora(self) -> dict[str, Any] | None:
        """peft's config, as plain data, of the LoRA adapter that a sync brings; None: it brings whole weights. After a sleep."""
        return self._lora

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> dict[str, float]:
        """Send this rank's part of the weights from the host; verl's own way with any other checkpoint engine."""
        if mode != "mux":
            return await super().update_weights(global_steps=global_steps, mode=mode) or {}
        dtype = PrecisionType.to_dtype(self.config.rollout.dtype)
        if (part := self._exported) is None:
            module = self.actor.engine.module
            named = convert_weight_keys(module.state_dict(), module).items()
            params = ((name, param, host_copy(local(param))) for name, param in named)
            tied = tied_names(module, lambda names: convert_weight_keys(names, module))
            part = list(row_shards(params, dtype, self.rank, tied))
        return await self.checkpoint_engine.send_weights(part, global_steps)

    def _export(self) -> Moves:
        """While the device is ours: what cannot be sent from the host copy of the parameters goes to the host now."""
        engine, began = self.actor.engine, time.perf_counter()
        differs = getattr(engine, "_qat_enabled", False) or engine.engine_config.strategy == VEOMNI  # from what engines load
        if are_row_shards(engine.module, quantized=differs):
            return {}
        # Of LoRA that is not merged, the adapter alone: engines have the base weights from the model's files.
        layered = bool(self.config.rollout.get("layered_summon"))
        weights, lora = engine.get_per_tensor_param(layered_summon=layered, base_sync_done=True)
        self._lora = json.loads(json.dumps(lora, default=sorted))  # what is no JSON in it are sets of names
        dtype = PrecisionType.to_dtype(self.config.rollout.dtype)
        kept = self._arena
        copies = stripes(weights, self.rank, self.world_size, dtype, lambda name, part: kept.hold({name: part})[name])
        self._exported = list(copies)
        if get_device_name() != "cpu":
            get_torch_device().synchronize()  # copies run beside the gathering of what comes next
        return {"exported": Moved(sum(part.nbytes for part in self._exported), 0, time.perf_counter() - began)}

    def _states(self) -> list[DeviceStates]:
        held = {role: getattr(self, role, None) for role in ("actor", "ref")}
        return [DeviceStates(role, worker.engine) for role, worker in held.items() if worker is not None]


class MuxTrainingWorker(_Multiplexed, TrainingWorker):
    """verl's training worker (the critic) of a multiplexed job."""

    _who = "critic"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        take_over()
        super().__init__(*args, **kwargs)
        self._fence = Fence()
        residents.arrived("critic")
        _read_ahead(self.model_config.local_path, None)

    def _states(self) -> list[DeviceStates]:
        return [DeviceStates("critic", self.engine)]
