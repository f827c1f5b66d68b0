"""A memory saver for the CPU with torch_memory_saver's four words: region, pause, resume, tag.

    region(tag)  -> tensors made inside belong to the tag
    track(tag)   -> tensors that exist already join it (model and optimizer states of a trainer)
    pause(tag)   -> their physical pages go back to the system; addresses, shapes and views stay as they are
    resume(tag)  -> the pages are there again; contents come from the host copy where one was asked for, else are undefined

Pages are given back with madvise(MADV_DONTNEED) on the whole pages inside each storage, as cuMemUnmap does on a GPU with virtual
addresses kept. The first and last page of a storage may hold other data and stay: at most 8 KiB a tensor is not given back.

What is given back is decided anew at each pause, since a storage may have moved, grown, shrunk or died meanwhile:
- only storages that live, at the address and size they have now;
- only private anonymous memory: pages of a file would come back with the file's contents, shared pages would not become free. A
  storage on such memory stays mapped, counts as mapped and keeps its values;
- a storage belongs to the first tag that it joined, and two storages on the same memory are refused: the second host copy would
  be one of pages already gone.

Runs in schedulers and training workers; touches the memory of their tensors.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import time
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter

from verl_mux.memory.arena import Arena
from verl_mux.memory.tags import Moved
from verl_mux_cpu import device_ledger

_MADV_DONTNEED = 4
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@dataclass
class _Allocation:
    """One storage of a tag. Life: mapped -> (given back -> mapped)* -> forgotten with its last tensor.

    `given_back`: bytes, while its pages are gone; 0 otherwise. The weak reference keeps the storage's identity from being reused.
    """

    ref: StorageWeakRef
    backup: bool
    given_back: int = 0
    host_copy: torch.Tensor | None = None

    def storage(self) -> torch.UntypedStorage | None:
        """The storage, held; None once its last tensor is gone."""
        return torch.UntypedStorage._new_with_weak_ptr(self.ref.cdata)


@dataclass
class _Tag:
    allocations: dict[int, _Allocation] = field(default_factory=dict)
    paused: bool = False


class _Recorder(TorchDispatchMode):
    """Hands every storage that an operation made (not those it was given) to the saver."""

    def __init__(self, saver: CpuMemorySaver, tag: Hashable, backup: bool) -> None:
        super().__init__()
        self._saver, self._tag, self._backup = saver, tag, backup

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {s._cdata for s in _storages((args, kwargs or {}))}
        result = func(*args, **(kwargs or {}))
        # An outer region sees the operation too, and sees it first.
        if self._saver._regions[-1] is self:
            self._saver._adopt(self._tag, [s for s in _storages(result) if s._cdata not in given], self._backup)
        return result


class CpuMemorySaver:
    """Tags of one process: any hashable keys. Not thread-safe: pause and resume while nothing computes on the tensors.

    The saver calls `account` with the bytes on the device by tag whenever they may have changed, and `reserve` with what
    they will be, before they change. `reserve` raises DeviceFull where there is no room; the caller gets OutOfMemoryError.
    """

    def __init__(
        self,
        account: Callable[[dict[Hashable, int]], None] = lambda _: None,
        reserve: Callable[[dict[Hashable, int]], None] = lambda _: None,
    ) -> None:
        self._account, self._reserve = account, reserve
        self._host = Arena("host copies")
        self._tags: dict[Hashable, _Tag] = {}
        self._regions: list[_Recorder] = []

    @contextlib.contextmanager
    def region(self, tag: Hashable, enable_cpu_backup: bool = False) -> Iterator[None]:
        """Tensors made inside belong to `tag`; inside another region, to the inner one's. Raises torch.OutOfMemoryError at its
        end, where the device has no room for them.

        Those made of Python or numpy values (`torch.tensor`, `torch.as_tensor`) stay outside: numpy may own the memory.
        """
        self._tags.setdefault(tag, _Tag())
        self._regions.append(_Recorder(self, tag, enable_cpu_backup))
        try:
            with self._regions[-1]:
                yield
        finally:
            self._regions.pop()
            self._take(self.mapped_bytes())
            self._account(self.mapped_bytes())

    def track(self, tag: Hashable, tensors: Iterable[torch.Tensor], enable_cpu_backup: bool = True) -> None:
        """Let tensors that exist join `tag`. Those that belong to a tag already are left alone.

        Raises:
            ValueError: a tensor made of other tensors (a DTensor, for one); its parts are what can join.
            torch.OutOfMemoryError: the device has no room for them; none has joined.
        """
        entry = self._tags.setdefault(tag, _Tag())
        joined = self._adopt(tag, [_plain(tensor).untyped_storage() for tensor in tensors], enable_cpu_backup)
        try:
            self._take(self.mapped_bytes())
        except torch.OutOfMemoryError:
            for key in joined:
                del entry.allocations[key]
            raise
        self._account(self.mapped_bytes())

    def pause(self, tag: Hashable) -> Moved:
        """Give the tag's pages back.

        Raises:
            ValueError: the tag is paused already, or two of its storages lie on the same memory.
            OSError: the system refused; tensors with a host copy are as before.
        """
        started = time.perf_counter()
        entry = self._entry(tag, paused=False)
        mappings = _private_mappings()
        leaving = [(a, storage) for a, storage in self._live(entry) if _holds(mappings, storage)]
        self._refuse_overlap(tag, [storage for _, storage in leaving])
        try:
            kept = [(a, storage) for a, storage in leaving if a.backup]
            copies = self._host.hold({(tag, number): _bytes_of(storage) for number, (_, storage) in enumerate(kept)})
            for number, (allocation, _) in enumerate(kept):
                allocation.host_copy = copies[tag, number]
            for allocation, storage in leaving:
                allocation.given_back = storage.nbytes()
                _release_pages(storage.data_ptr(), storage.nbytes())
        except BaseException:
            self._restore(entry)
            raise
        entry.paused = True
        given_back = sum(allocation.given_back for allocation, _ in leaving)
        self._account(self.mapped_bytes())
        return Moved(given_back, self._mapped(entry), time.perf_counter() - started)

    def resume(self, tag: Hashable) -> Moved:
        """Take the tag's pages again, contents from the host copy where there is one.

        A storage resized meanwhile gets the part of its values that it still has room for.

        Raises:
            ValueError: the tag is not paused.
            torch.OutOfMemoryError: the device has no room for it; nothing has changed.
        """
        started = time.perf_counter()
        entry = self._entry(tag, paused=True)
        self._take({**self.mapped_bytes(), tag: self._whole(entry)})
        entry.paused = False
        taken = self._restore(entry)
        self._account(self.mapped_bytes())
        return Moved(taken, self._mapped(entry), time.perf_counter() - started)

    def host_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's values while its tag is paused: a view on the host copy, same shape, strides and dtype.

        A tensor whose pages are there is returned as it is.

        Raises:
            ValueError: the tag was paused without a host copy, so the values are gone; or as for `track`.
        """
        allocation = self._find(_plain(tensor).untyped_storage()._cdata)
        if allocation is None or not allocation.given_back:
            return tensor
        if allocation.host_copy is None:
            raise ValueError(f"a paused tensor of shape {tuple(tensor.shape)} has no host copy: its values are gone")
        copy = allocation.host_copy.untyped_storage()
        return torch.empty(0, dtype=tensor.dtype).set_(copy, tensor.storage_offset(), tensor.shape, tensor.stride())

    def mapped_bytes(self) -> dict[Hashable, int]:
        """Bytes that each tag holds on the device now."""
        return {tag: self._mapped(entry) for tag, entry in self._tags.items()}

    def is_paused(self, tag: Hashable) -> bool:
        return tag in self._tags and self._tags[tag].paused

    def _adopt(self, tag: Hashable, storages: list[torch.UntypedStorage], backup: bool) -> list[int]:
        """Returns the keys of those that are new."""
        joined = []
        for storage in storages:
            if storage.device.type == "cpu" and self._find(storage._cdata) is None:
                self._tags[tag].allocations[storage._cdata] = _Allocation(StorageWeakRef(storage), backup)
                joined.append(storage._cdata)
        return joined

    def _entry(self, tag: Hashable, paused: bool) -> _Tag:
        entry = self._tags.setdefault(tag, _Tag())
        if entry.paused is not paused:
            raise ValueError(f"tag {tag!r} is {'paused' if entry.paused else 'active'} already")
        return entry

    def _live(self, entry: _Tag) -> list[tuple[_Allocation, torch.UntypedStorage]]:
        """Allocations whose storage lives, with that storage; the others are forgotten."""
        held = {key: (a, a.storage()) for key, a in entry.allocations.items()}
        live = {key: (a, storage) for key, (a, storage) in held.items() if storage is not None}
        entry.allocations = {key: a for key, (a, _) in live.items()}
        return list(live.values())

    def _mapped(self, entry: _Tag) -> int:
        return sum(s.nbytes() for a, s in self._live(entry) if not a.given_back)

    def _whole(self, entry: _Tag) -> int:
        return sum(storage.nbytes() for _, storage in self._live(entry))

    def _take(self, mapped: dict[Hashable, int]) -> None:
        try:
            self._reserve(mapped)
        except device_ledger.DeviceFull as full:
            raise torch.OutOfMemoryError(str(full)) from None

    def _restore(self, entry: _Tag) -> int:
        taken = 0
        for allocation, storage in self._live(entry):
            if allocation.host_copy is not None:
                size = min(allocation.host_copy.nbytes, storage.nbytes())
                _bytes_of(storage)[:size].copy_(allocation.host_copy[:size])
            taken += storage.nbytes() if allocation.given_back else 0
            allocation.host_copy, allocation.given_back = None, 0
        return taken

    def _refuse_overlap(self, tag: Hashable, leaving: list[torch.UntypedStorage]) -> None:
        gone = [s for entry in self._tags.values() for a, s in self._live(entry) if a.given_back]
        reach = 0
        for start, end in sorted((s.data_ptr(), s.data_ptr() + s.nbytes()) for s in (*leaving, *gone)):
            if start < reach:
                raise ValueError(
                    f"tag {tag!r}: two tensors with storages of their own lie on the same memory; one of them must be a copy"
                )
            reach = end

    def _find(self, cdata: int) -> _Allocation | None:
        return next((e.allocations[cdata] for e in self._tags.values() if cdata in e.allocations), None)


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    for leaf in tree_iter(tree):
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and not is_traceable_wrapper_subclass(leaf):
            yield leaf.untyped_storage()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    if is_traceable_wrapper_subclass(tensor):
        raise ValueError(f"a {type(tensor).__name__} holds no memory of its own; give its local tensor")
    return tensor


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _private_mappings() -> list[tuple[int, int]]:
    """[start, end) of this process's writable private anonymous memory, in order, neighbours joined."""
    joined: list[tuple[int, int]] = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, _, _, inode = line.split(maxsplit=5)[:5]
        if permissions.startswith("rw") and permissions.endswith("p") and inode == "0":
            start, end = (int(bound, 16) for bound in span.split("-"))
            if joined and joined[-1][1] == start:
                start = joined.pop()[0]
            joined.append((start, end))
    return joined


def _holds(mappings: list[tuple[int, int]], storage: torch.UntypedStorage) -> bool:
    """Whether the storage lies wholly in one of the mappings; an empty one lies nowhere."""
    if not storage.nbytes():
        return False
    at = bisect_right(mappings, (storage.data_ptr(), 1 << 64)) - 1
    return at >= 0 and storage.data_ptr() + storage.nbytes() <= mappings[at][1]


def _release_pages(address: int, nbytes: int) -> None:
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > start and _libc.madvise(start, end - start, _MADV_DONTNEED) != 0:
        raise OSError(ctypes.get_errno(), f"madvise could not give back {end - start} bytes")


# One per process, as torch_memory_saver's singleton.
cpu_memory_saver = CpuMemorySaver(device_ledger.hold, device_ledger.reserve)
