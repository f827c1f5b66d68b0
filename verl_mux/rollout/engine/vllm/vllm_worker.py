"""vLLM's worker as ours: the launch gate, memory by tag, weights out of the host's region.

Runs in the worker processes of vLLM's engines, which make the class that `worker_cls` names and call it by method names; verl's
worker extension is mixed in. Touches the model, its device's memory, the server's directory. What would end an engine is an
answer instead: each rank moves its own part, and the server, which asks all of them, takes back what one of them refused.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
from vllm.v1.worker.gpu_worker import Worker

from verl_mux.memory.contents import Contents
from verl_mux.memory.room import refusal
from verl_mux.memory.tags import KV_CACHE, TAGS, WEIGHTS, NoRoom
from verl_mux.platform.charges import DEVICE_VARIABLE
from verl_mux.rollout.engine.region_weights import tensors
from verl_mux.rollout.engine.server_directory import charge_engine, leaving_word, wait_at_gate, write_mapped

# Of the devices of its node, the first one of this worker's server.
FIRST_DEVICE_VARIABLE = "VERL_MUX_FIRST_DEVICE"
_PROFILED_PASSES = 5

log = logging.getLogger(__name__)


class Answer(msgspec.Struct, frozen=True):
    """error: why nothing has changed; None: done. failed: the engine cannot be used any more."""

    error: str | None = None
    failed: bool = False


def _says_why(method: Callable) -> Callable:
    """An error in it ends the engine; the server's job hears why."""

    @functools.wraps(method)
    def said(*args: Any, **kwargs: Any) -> Any:
        with leaving_word():
            return method(*args, **kwargs)

    return said


_Base: Any = object  # to mypy, vLLM's worker


class TaggedWorker(_Base):
    """Before vLLM's worker of a platform in the order of bases. `_saver`: regions, pause and resume by tag."""

    _saver: Any
    _device: Any = None  # as torch.cuda, where there is one

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._mapped: dict[str, int] = {}  # bytes that this process has on the device, by tag
        self._sizes: dict[str, int] = {}  # the same while all is awake: what a wake needs
        self._contents: Contents | None = None

    def _report(self, tag: str, mapped: int) -> None:
        self._mapped[tag] = mapped
        self._sizes[tag] = max(self._sizes.get(tag, 0), mapped)
        write_mapped(self._mapped, os.getpid())

    # ---------------------------------------------------------------- launch

    @_says_why
    def init_device(self) -> None:
        """Waits at the gate first: from here on vLLM looks at what is free on the device, which others may be using."""
        parallel = self.parallel_config
        rank = (parallel.data_parallel_rank_local or 0) * parallel.world_size + self.local_rank
        os.environ[DEVICE_VARIABLE] = str(int(os.environ.get(FIRST_DEVICE_VARIABLE) or 0) + rank)
        wait_at_gate()
        charge_engine(late=False)
        super().init_device()

    @_says_why
    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)

    @_says_why
    def determine_available_memory(self) -> int:
        return super().determine_available_memory()

    @_says_why
    def initialize_from_config(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_from_config(*args, **kwargs)

    @_says_why
    def compile_or_warm_up_model(self) -> Any:
        done = super().compile_or_warm_up_model()
        charge_engine(late=True)
        return done

    def _maybe_get_memory_pool_context(self, tag: str) -> contextlib.AbstractContextManager:
        return self._saver.region(tag)

    # ---------------------------------------------------------------- sleep and wake

    def mux_move(self, verb: str, tag: str, level: int, wait_s: float) -> dict[str, Any]:
        """Release ("sleep") or resume ("wake") this rank's part of a tag, if that is not done; an Answer as plain data."""
        try:
            if verb == "wake":
                return msgspec.to_builtins(Answer(self._resume(tag, wait_s)))
            self._release(tag, level)
            return msgspec.to_builtins(Answer())
        except Exception as failure:
            log.exception("the engine could not move %s", tag)
            return msgspec.to_builtins(Answer(f"{verb} of {tag} failed: {failure}", failed=True))

    def sleep(self, level: int = 1) -> None:
        """vLLM's own: all tags."""
        for tag in reversed(TAGS):
            self._release(tag, level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """vLLM's own. Raises RuntimeError: no room, or weights that are not whole."""
        for tag in TAGS:
            if (tags is None or tag in tags) and (error := self._resume(tag, 0.0)):
                raise RuntimeError(error)

    def execute_dummy_batch(self) -> None:
        """Beside the other data-parallel ranks of a model with experts. None of them runs while the engine sleeps."""
        if not any(self._saver.is_paused(tag) for tag in TAGS):
            super().execute_dummy_batch()

    def _release(self, tag: str, level: int) -> None:
        if self._saver.is_paused(tag):
            return
        if tag == WEIGHTS:
            self._whole().left(level)
        self._saver.pause(tag)

    def _resume(self, tag: str, wait_s: float) -> str | None:
        """Why nothing has changed; None: done."""
        if not self._saver.is_paused(tag):
            return None
        if error := refusal(tag, self._sizes.get(tag, 0), wait_s, self._device, lambda fits: fits):
            return error
        try:
            self._saver.resume(tag)
        except (torch.OutOfMemoryError, NoRoom) as full:  # another process took the room meanwhile
            return f"no room to wake: {full}"
        if tag == WEIGHTS:
            self._whole().came_back()
            if self.model_runner.lora_config:  # which requests use an adapter lay in the memory that went
                self.model_runner.lora_manager._adapter_manager._last_mapping = None
        elif lack := self._whole().lacks():
            self._saver.pause(tag)
            return lack
        if tag == KV_CACHE:
            self._whole().settled()
            self.model_runner.post_kv_cache_wake_up()
        return None

    def _whole(self) -> Contents:
        self._contents = self._contents or Contents(self.model_runner.model, keeps_buffers=True)
        return self._contents

    # ---------------------------------------------------------------- weights, and a profile

    def mux_load(self, body: str, lora: dict[str, Any] | None = None) -> None:
        """A batch of a sync (region_weights.py); `lora`: it is an adapter of this config, in the place of the last one. Raises
        RuntimeError: the region cannot be mapped or pinned."""
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + self.rank
        if lora is not None:
            from verl.workers.rollout.vllm_rollout.utils import VLLM_LORA_INT_ID

            self.remove_lora(VLLM_LORA_INT_ID)
        with torch.no_grad():
            if batch := list(tensors(body, rank, self.model_runner.model)):
                self._update_weights(batch, peft_config=lora, base_sync_done=lora is not None)

    def mux_loaded(self) -> None:
        """All batches are in: what vLLM makes of weights once they are whole."""
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        for model, config in self._iter_all_models_with_config():
            process_weights_after_loading(model, config, self.device)

    def mux_profile(self, folder: str) -> None:
        """torch's profile of the next forward passes of this rank, into `folder`."""
        from torch.profiler import profile, tensorboard_trace_handler

        execute: Callable = super().execute_model
        left = [_PROFILED_PASSES]
        profiler = profile(on_trace_ready=tensorboard_trace_handler(folder, worker_name=f"rank{self.rank}"))
        profiler.start()

        def profiled(*args: Any, **kwargs: Any) -> Any:
            done = execute(*args, **kwargs)
            left[0] -= 1
            if not left[0]:
                profiler.stop()
                del self.execute_model
            return done

        self.execute_model = profiled


class CumemSaver:
    """vLLM's allocator of one process on CUDA, tag by tag and metered: it knows each allocation's tag and size.

    `report`: called with a tag's bytes on the device after a move.
    """

    def __init__(self, report: Callable[[str, int], None]) -> None:
        self._report = report
        self._paused: set[str] = set()

    @contextlib.contextmanager
    def region(self, tag: str) -> Iterator[None]:
        with self._allocator().use_memory_pool(tag=tag):
            yield
        self._report(tag, sum(handle[1] for handle in self._handles(tag)))

    def is_paused(self, tag: str) -> bool:
        return tag in self._paused

    def pause(self, tag: str) -> None:
        from vllm.device_allocator.cumem import unmap_and_release

        torch.cuda.synchronize()
        for handle in self._handles(tag):
            unmap_and_release(handle)
        self._paused.add(tag)
        torch.cuda.empty_cache()
        self._report(tag, 0)

    def resume(self, tag: str) -> None:
        """Raises NoRoom; nothing has changed."""
        from vllm.device_allocator.cumem import create_and_map

        handles = self._handles(tag)
        needed, (free, _) = sum(handle[1] for handle in handles), torch.cuda.mem_get_info()
        if needed > free:
            raise NoRoom(f"{tag} needs {needed / 1e9:.2f} GB, {free / 1e9:.2f} are free")
        for handle in handles:
            create_and_map(handle)
        self._paused.discard(tag)
        self._report(tag, needed)

    def _handles(self, tag: str) -> list[tuple[int, int, int, int]]:
        """Of each allocation: device, bytes, address, and the driver's own."""
        return [data.handle for data in self._allocator().pointer_to_data.values() if data.tag == tag]

    @staticmethod
    def _allocator() -> Any:
        from vllm.device_allocator import get_mem_allocator_instance

        return get_mem_allocator_instance()


class MuxWorker(TaggedWorker, Worker):
    """On CUDA."""

    _device = torch.cuda

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._saver = CumemSaver(self._report)
