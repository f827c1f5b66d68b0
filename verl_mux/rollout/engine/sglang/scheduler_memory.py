"""Memory inside SGLang's scheduler processes: its saver, the launch, sleep and wake; what would end a process is an answer
instead.

Runs in the schedulers of engines that our server launched (the saver also in the server's process); hooked by plugin.py around
SGLang's own functions. Release and resume then take any tag at any time: what is done already is not done again, a busy engine
says so, a wake waits for room and maps nothing where there is none, and what an unfinished wake mapped goes back. SGLang's
answers carry no text, so ours rides on them as an attribute (`REPORT`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from verl_mux.memory.contents import Contents
from verl_mux.memory.room import on_all_ranks, refusal
from verl_mux.memory.tags import CUDA_GRAPH, KV_CACHE, WEIGHTS, Metered, NoRoom
from verl_mux.platform.charges import DEVICE_VARIABLE, has_budget
from verl_mux.platform.choose import cpu_part
from verl_mux.rollout.engine.server_directory import charge_engine, leaving_word, wait_at_gate, write_mapped
from verl_mux.rollout.engine.sglang.kernels import compile_kernels

REPORT = "verl_mux"
_ALL = (CUDA_GRAPH, WEIGHTS, KV_CACHE)

log = logging.getLogger(__name__)
_mapped: dict[str, int] = {}  # bytes that this process has on the device, by tag
_sizes: dict[str, int] = {}  # the same while all is awake: what a wake needs
_cuda: Metered | None = None


class Ask(msgspec.Struct, frozen=True):
    """Rides on a request. level: of the sleep. wait_s: how long a wake waits for room."""

    level: int = 2
    wait_s: float = 0.0


class Answer(msgspec.Struct, frozen=True):
    """Rides on an answer. error: why nothing has changed; None: done. failed: the engine cannot be used any more. copied: bytes
    of parameters that went to the host."""

    error: str | None = None
    copied: int = 0
    busy: bool = False
    failed: bool = False


def register(registry: Any, kinds: Any) -> None:
    scheduler = "sglang.srt.managers.scheduler_update_weights_mixin.SchedulerUpdateWeightsMixin"
    registry.register(f"{scheduler}.release_memory_occupation", release, kinds.AROUND)
    registry.register(f"{scheduler}.resume_memory_occupation", resume, kinds.AROUND)
    registry.register("sglang.srt.model_executor.model_runner.ModelRunner.initialize", initialize, kinds.AROUND)
    registry.register("sglang.srt.utils.common.get_available_gpu_memory", available_memory, kinds.AROUND)


def create_adapter(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Around `TorchMemorySaverAdapter.create`: the adapter SGLang would use, metered; that of verl_mux_cpu without CUDA."""
    if not kwargs.get("enable", args[-1] if args else False):
        return original(*args, **kwargs)
    if not torch.cuda.is_available():
        return cpu_part("engine_saver")(_report)
    global _cuda
    # SGLang asks for one adapter a pool; pauses are of the process.
    _cuda = _cuda or Metered(original(*args, **kwargs), torch.cuda, _report)
    return _cuda


def _report(tag: str, mapped: int) -> None:
    _mapped[tag] = mapped
    _sizes[tag] = max(_sizes.get(tag, 0), mapped)
    write_mapped(_mapped, os.getpid())


# ---------------------------------------------------------------- launch


def initialize(original: Callable, runner: Any, _measured_before: float) -> Any:
    """Waits at the gate until the other jobs' memory sleeps, then measures what is free. SGLang sizes its KV cache by that, and
    measured it while other jobs may have run. An error ends the process, so the process leaves word first."""
    with leaving_word():
        return _initialize(original, runner)


def _initialize(original: Callable, runner: Any) -> Any:
    os.environ[DEVICE_VARIABLE] = str(runner.gpu_id)
    charge_engine(late=False)
    if torch.cuda.is_available():
        compile_kernels(runner)
    wait_at_gate()
    initialized = original(runner, measure(runner))
    charge_engine(late=True)
    return initialized


def measure(runner: Any) -> float:
    """GiB that are free on the fullest GPU of this engine."""
    from sglang.srt.distributed.parallel_state import get_world_group
    from sglang.srt.utils import common

    world = get_world_group()
    return common.get_available_gpu_memory(
        runner.device, runner.gpu_id, distributed=world.world_size > 1, cpu_group=world.cpu_group
    )


def available_memory(
    original: Callable, device: str, gpu_id: int, distributed: bool = False, empty_cache: bool = True, cpu_group: Any = None
) -> float:
    """SGLang's own question for free memory, GiB: answered by the ledger of a device with a budget."""
    if device != "cpu" or not has_budget():
        return original(device, gpu_id, distributed=distributed, empty_cache=empty_cache, cpu_group=cpu_group)
    free = torch.tensor(max(cpu_part("ledger").free(), 0) / 2**30, dtype=torch.float64)
    if distributed:
        torch.distributed.all_reduce(free, op=torch.distributed.ReduceOp.MIN, group=cpu_group)
    return free.item()


# ---------------------------------------------------------------- sleep


def release(original: Callable, scheduler: Any, request: Any) -> Any:
    """SGLang's release_memory_occupation, of the tags that are mapped."""
    return _answered("ReleaseMemoryOccupationReqOutput", _released, original, scheduler, request)


def _released(original: Callable, scheduler: Any, request: Any, asked: list[str]) -> Answer:
    tags = [tag for tag in asked if tag not in scheduler.offload_tags]
    if not tags:
        return Answer()
    if not scheduler.is_fully_idle():
        return Answer("requests run in the engine; abort them first", busy=True)
    kept_by_saver = scheduler.server_args.enable_weights_cpu_backup
    level = getattr(request, REPORT, Ask()).level
    copied = _contents(scheduler).left(level) if WEIGHTS in tags and not kept_by_saver else 0
    request.tags = tags
    failure = None
    try:
        original(scheduler, request)
    except Exception as error:
        log.exception("the engine could not give %s back", ", ".join(tags))
        failure = f"giving {', '.join(tags)} back failed: {error}"
    # SGLang answers when the first rank has given it back, and the others may be at it still.
    if not _everywhere(scheduler, failure is None):
        return Answer(failure or f"another rank could not give {', '.join(tags)} back", failed=True)
    return Answer(copied=copied)


# ---------------------------------------------------------------- wake


def resume(original: Callable, scheduler: Any, request: Any) -> Any:
    """SGLang's resume_memory_occupation, of the tags that are not mapped, one after the other; all of them or none."""
    return _answered("ResumeMemoryOccupationReqOutput", _resumed, original, scheduler, request)


def _resumed(original: Callable, scheduler: Any, request: Any, asked: list[str]) -> Answer:
    from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

    tags = [tag for tag in _ALL if tag in asked and tag in scheduler.offload_tags]
    if KV_CACHE in tags and WEIGHTS in scheduler.offload_tags and WEIGHTS not in tags:
        return Answer("the KV cache wakes after the weights")
    if error := _no_room(scheduler, tags, getattr(request, REPORT, Ask()).wait_s):
        return Answer(error)
    stashed = getattr(scheduler, "stashed_model_static_state", None)
    try:
        for tag in tags:
            if error := _map(scheduler, tag):
                _take_back(scheduler, tags, stashed)
                return Answer(error)
            original(scheduler, ResumeMemoryOccupationReqInput(tags=[tag]))
            if tag == WEIGHTS:
                _contents(scheduler).came_back()
    except Exception as error:
        log.exception("the engine could not take %s again", ", ".join(tags))
        return Answer(f"taking {', '.join(tags)} again failed: {error}", failed=True)
    if KV_CACHE in tags and (lack := _lacks(scheduler)):
        _take_back(scheduler, tags, stashed)
        return Answer(lack)
    return Answer()


def _map(scheduler: Any, tag: str) -> str | None:
    """Maps a tag on all ranks; returns why one of them could not. SGLang's own resume then finds the tag mapped. Alone, it would
    map and wait for all ranks: for ever, if another job has taken the room of one."""
    error = None
    try:
        scheduler.memory_saver_adapter.resume(tag)
    except (torch.OutOfMemoryError, NoRoom) as full:
        error = str(full)
    return None if _everywhere(scheduler, error is None) else error or f"another rank has no room for {tag}"


def _lacks(scheduler: Any) -> str | None:
    """Why the model may not run on one of the ranks; one that is whole drops its host copies."""
    contents = _contents(scheduler)
    lack = contents.lacks()
    if _everywhere(scheduler, lack is None):
        contents.settled()
        return None
    return lack or "weights of another rank are NaN, or no sync has brought them back"


def _take_back(scheduler: Any, tags: list[str], stashed: Any) -> None:
    """What an unfinished wake mapped is released again, and what it forgot is remembered."""
    for tag in tags:
        if not scheduler.memory_saver_adapter.is_paused(tag):
            scheduler.memory_saver_adapter.pause(tag)
        scheduler.offload_tags.add(tag)
    if WEIGHTS in tags and stashed is not None:
        scheduler.stashed_model_static_state = stashed


def _no_room(scheduler: Any, tags: list[str], wait_s: float) -> str | None:
    """Why these tags cannot be mapped on all ranks; waits `wait_s` seconds for room."""
    needed = sum(_sizes.get(tag, 0) for tag in tags)
    device = torch.cuda if torch.cuda.is_available() else None
    return refusal(" and ".join(tags), needed, wait_s, device, lambda true_here: _everywhere(scheduler, true_here))


def _everywhere(scheduler: Any, true_here: bool) -> bool:
    """Whether it is true on all ranks, which must do the same."""
    return on_all_ranks(scheduler.tp_cpu_group, true_here)


def _contents(scheduler: Any) -> Contents:
    if not hasattr(scheduler, "mux_contents"):
        scheduler.mux_contents = Contents(scheduler.tp_worker.model_runner.model)
    return scheduler.mux_contents


def _answered(output: str, move: Callable[..., Answer], original: Callable, scheduler: Any, request: Any) -> Any:
    """SGLang's `output`, on which the answer of `move` rides."""
    from sglang.srt.managers import io_struct

    asked = list(request.tags or _ALL)
    if unknown := set(asked) - set(_ALL):
        answer = Answer(f"there is no tag {min(unknown)!r}; allowed: {', '.join(_ALL)}")
    else:
        answer = move(original, scheduler, request, asked)
    made = getattr(io_struct, output)()
    setattr(made, REPORT, answer)
    return made
