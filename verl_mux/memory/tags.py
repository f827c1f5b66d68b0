"""The tags of one engine's or one trainer's device memory: what sleeps in which state, what moved, and the saver that moves it.

Runs in engine servers and schedulers (`SleepStates`, `Metered`), training workers and the trainer (`Moved`). Pure but for
`Metered`, which moves the saver and asks the device that it is given; imports no torch.

An engine that sleeps twice is not asked twice: SGLang's own release and resume are not idempotent (a second resume ends its
scheduler process), and verl's HTTP client repeats a call that timed out. So every request goes through `SleepStates`, a table.
Weights come before the KV cache on the way up, because the sync fills them before the largest tag is mapped; on the way down both
go at once.

    ACTIVE --sleep kv_cache--> KV_RELEASED --sleep weights--> ASLEEP_1 or ASLEEP_2
    ASLEEP_1 or ASLEEP_2 --wake weights--> KV_RELEASED --wake kv_cache--> ACTIVE
    any --failed--> FAILED (only a restart leaves it)

Level 1 keeps the weights in host memory and brings them back; level 2 drops them, and a sync must fill them again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any

import msgspec


class SleepState(Enum):
    ACTIVE = "active"
    KV_RELEASED = "kv_released"
    ASLEEP_1 = "asleep_1"
    ASLEEP_2 = "asleep_2"
    FAILED = "failed"


WEIGHTS, KV_CACHE, CUDA_GRAPH = "weights", "kv_cache", "cuda_graph"
TAGS = (WEIGHTS, KV_CACHE)
LEVELS = {1: SleepState.ASLEEP_1, 2: SleepState.ASLEEP_2}
_ASLEEP = tuple(LEVELS.values())
# What may stay on a device as memory goes to sleep: a share of it, the edges of pages; on a GPU these bytes in any case, which
# libraries take for themselves (modules, cuBLAS's workspaces).
_EDGES, _OF_LIBRARIES = 0.05, 256 << 20
# How often the device is looked at until a tag has left it.
_LOOKS, _LOOK_S = 20, 0.05

log = logging.getLogger(__name__)

Step = tuple[str, SleepState]


class SleepStates:
    """State of one engine. `plan` says what to do and changes nothing; the caller notes in `state` what happened."""

    def __init__(self, state: SleepState = SleepState.ACTIVE) -> None:
        self.state = state

    @property
    def level(self) -> int | None:
        """Of a sleeping engine."""
        return next((level for level, state in LEVELS.items() if state is self.state), None)

    def plan(self, verb: str, tags: list[str], level: int = 2) -> list[Step]:
        """Tags to release ("sleep") or resume ("wake"), each with the state after it. An engine that sleeps stays at its level.

        Raises:
            ValueError: the step is illegal, e.g. the KV cache before the weights, or a failed engine.
        """
        steps = _sleep(self.state, set(tags), LEVELS[level]) if verb == "sleep" else _wake(self.state, set(tags))
        if steps is None or not set(tags) <= set(TAGS) or not tags:
            raise ValueError(
                f"cannot {verb} {sorted(tags)} while the engine is {self.state.value}; tags are {list(TAGS)}, "
                "weights wake before the KV cache and sleep with or after it"
            )
        return steps


def _sleep(state: SleepState, tags: set[str], asleep: SleepState) -> list[Step] | None:
    """None: illegal."""
    if state in _ASLEEP:
        return []
    if state is SleepState.KV_RELEASED:
        return [(WEIGHTS, asleep)] if WEIGHTS in tags else []
    if state is SleepState.ACTIVE and KV_CACHE in tags:
        return [(KV_CACHE, SleepState.KV_RELEASED), *([(WEIGHTS, asleep)] if WEIGHTS in tags else [])]
    return None


def _wake(state: SleepState, tags: set[str]) -> list[Step] | None:
    if state is SleepState.ACTIVE:
        return []
    cache = [(KV_CACHE, SleepState.ACTIVE)] if KV_CACHE in tags else []
    if state is SleepState.KV_RELEASED:
        return cache
    return [(WEIGHTS, SleepState.KV_RELEASED), *cache] if state in _ASLEEP and WEIGHTS in tags else None


# ---------------------------------------------------------------- what moved


class Moved(msgspec.Struct, frozen=True):
    """Of one tag: `nbytes` left the device or came to it in `seconds`, and `mapped` bytes are on it now."""

    nbytes: int
    mapped: int
    seconds: float


Moves = dict[str, Moved]  # by tag


def total(parts: Iterable[Moves], seconds: Callable[[Iterable[float]], float] = max) -> Moves:
    """Bytes add up. Ranks, replicas and nodes move at the same time, so the slowest one's seconds count; what moves one after
    another in one process takes the sum."""
    by_tag: dict[str, list[Moved]] = defaultdict(list)
    for moves in parts:
        for tag, moved in moves.items():
            by_tag[tag].append(moved)
    return {
        tag: Moved(sum(it.nbytes for it in its), sum(it.mapped for it in its), seconds([it.seconds for it in its]))
        for tag, its in by_tag.items()
    }


def stays(left: int, had: int, gpu: bool) -> bool:
    """Whether so much of `had` bytes that sleep is left on the device (on a GPU?) that they have not left it."""
    return left > max(_EDGES * had, _OF_LIBRARIES if gpu else 0)


# ---------------------------------------------------------------- the saver of a process on CUDA


class NoRoom(MemoryError):
    """The device has no room for what was to be mapped; nothing has changed."""


class Metered:
    """torch_memory_saver's tags of one process, sized and made safe to ask twice.

    The library ends the process at a second pause, at a second resume, and at a resume for which there is no room; and it says
    neither how many bytes a tag has nor whether they left. A tag has the bytes that torch's allocator reserved in this process
    during the tag's regions and captures. What is free of the device says nothing of one process, since others take and give
    memory at any time: it can show that a tag left, but that it stayed, only the driver's count of this process can.

    `inner`: region, cuda_graph, pause and resume by tag; `device`: as torch.cuda; `report`: called with a tag's bytes on the
    device after a move.
    """

    def __init__(self, inner: Any, device: Any, report: Callable[[str, int], None]) -> None:
        self._inner, self._device, self._report = inner, device, report
        self._paused: set[str] = set()
        self._sizes: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @contextlib.contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False) -> Iterator[None]:
        with self._inner.region(tag=tag, enable_cpu_backup=enable_cpu_backup), self._sized(tag):
            yield

    @contextlib.contextmanager
    def cuda_graph(self, *, tag: str, **capture: Any) -> Iterator[None]:
        with self._inner.cuda_graph(tag=tag, **capture), self._sized(tag):
            yield

    @contextlib.contextmanager
    def _sized(self, tag: str) -> Iterator[None]:
        before = self._device.memory_reserved()
        yield
        self._sizes[tag] = self._sizes.get(tag, 0) + max(0, self._device.memory_reserved() - before)
        self._report(tag, self._sizes[tag])

    def pause(self, tag: str) -> None:
        """Raises RuntimeError: it stayed on the device."""
        if tag in self._paused:
            return
        self._device.synchronize()
        free, held = self._free(), self._held()
        self._inner.pause(tag)
        self._paused.add(tag)
        stayed = self._stayed(tag, free, held)
        self._report(tag, stayed)
        if stayed:
            raise RuntimeError(f"{stayed / 1e9:.2f} of its {self._sizes[tag] / 1e9:.2f} GB did not leave the device")

    def _stayed(self, tag: str, free: int, held: int | None) -> int:
        """Bytes, as far as it is sure. free, held: of the device, and by this process, before the pause."""
        size = self._sizes.get(tag, 0)
        for _ in range(_LOOKS):
            holds = self._held()
            gone = max(0, self._free() - free, held - holds if held and holds else 0)
            if not stays(size - gone, size, gpu=True):
                return 0
            time.sleep(_LOOK_S)
        if held and holds:
            return size - gone
        what = "another process has taken them, or they stayed"
        log.warning("%s sleeps, but %.2f of its %.2f GB are not free: %s", tag, (size - gone) / 1e9, size / 1e9, what)
        return 0

    def resume(self, tag: str) -> None:
        """Raises NoRoom."""
        if tag not in self._paused:
            return
        needed = self._sizes.get(tag, 0)
        if needed > self._free():
            self._device.ipc_collect()
            self._device.empty_cache()
        if needed > (free := self._free()):
            raise NoRoom(f"{tag} needs {needed / 1e9:.2f} GB, {free / 1e9:.2f} are free")
        self._inner.resume(tag)
        self._paused.discard(tag)
        self._report(tag, needed)

    def is_paused(self, tag: str) -> bool:
        return tag in self._paused

    def _free(self) -> int:
        return self._device.mem_get_info()[0]

    def _held(self) -> int | None:
        """By this process, as the driver counts. None: it does not say, as in most containers."""
        with contextlib.suppress(Exception):  # NVML's own, each for something else that is not there
            found = re.search(rf"process +{os.getpid()} uses +([0-9.]+) MB", self._device.list_gpu_processes())
            return int(float(found[1]) * 2**20) if found else None
        return None
