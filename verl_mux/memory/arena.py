"""Host memory in which tensors lie while their device memory sleeps, kept for every later sleep.

Runs in training workers (a rank's states) and in the schedulers of engines (weights at level 1); called by trainer/fsdp_states.py
and contents.py, and by the saver of verl_mux_cpu. Touches host memory, pinned where there is CUDA.

torch pins a block for each tensor, rounds it up to a power of two, and gives it back or keeps it by its own rule. Here a tensor's
place has its bytes, at most 511 more, and is pinned once: in the first sleep that needs it.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

import torch

K = TypeVar("K", bound=Hashable)
# Where a tensor begins: as CUDA's own allocations do, so that copies run at full speed.
_ALIGNED = 512
_NOTHING = torch.empty(0, dtype=torch.uint8)


def layout(sizes: Iterable[int]) -> list[int]:
    """Where tensors of these bytes begin, one after the other, and as the last number the bytes of all."""
    return list(itertools.accumulate((-(-size // _ALIGNED) * _ALIGNED for size in sizes), initial=0))


def pin(address: int, nbytes: int, what: str) -> None:
    """Raises RuntimeError: CUDA cannot."""
    if code := int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)):
        raise RuntimeError(f"{nbytes} bytes of {what} on this host cannot be pinned (CUDA error {code})")


class Arena:
    """Of one process. Each tensor has a name and, under it, the same place in every sleep; memory is added for new names, and for
    tensors that have grown. It goes back to the host with the process.

    at_once: bytes that are added at least, where tensors come one by one: to pin each by itself takes longer than to copy it.
    """

    def __init__(self, what: str, at_once: int = 0) -> None:
        self._what, self._at_once = what, at_once
        self._places: dict[Hashable, torch.Tensor] = {}
        self._memory: mmap.mmap | None = None
        self._used = self._size = 0

    @torch.no_grad()
    def hold(self, tensors: Mapping[K, torch.Tensor]) -> dict[K, torch.Tensor]:
        """A contiguous copy of each tensor in its place. Copies from a device may run on: synchronize before anything reads them.

        Raises RuntimeError: the memory cannot be pinned.
        """
        self._make_places({name: tensor.nbytes for name, tensor in tensors.items()})
        return {name: self._copy(name, tensor) for name, tensor in tensors.items()}

    def _copy(self, name: Hashable, tensor: torch.Tensor) -> torch.Tensor:
        copy = self._places.get(name, _NOTHING)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return copy if copy.data_ptr() == tensor.data_ptr() else copy.copy_(tensor.detach(), non_blocking=True)

    def _make_places(self, sizes: Mapping[K, int]) -> None:
        new = {name: size for name, size in sizes.items() if size > self._places.get(name, _NOTHING).nbytes}
        if not new:
            return
        *starts, total = layout(new.values())
        if self._used + total > self._size:
            self._memory, self._used, self._size = self._made(max(total, self._at_once)), 0, max(total, self._at_once)
        # Each has a storage of its own, so that what saves a tensor with its storage saves no other one.
        for (name, size), start in zip(new.items(), starts, strict=True):
            self._places[name] = torch.frombuffer(self._memory, dtype=torch.uint8, count=size, offset=self._used + start)
        self._used += total

    def _made(self, nbytes: int) -> mmap.mmap:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_DONTFORK)  # a fork would copy every pinned page
        if torch.cuda.is_available():
            pin(torch.frombuffer(memory, dtype=torch.uint8).data_ptr(), nbytes, self._what)
        return memory
