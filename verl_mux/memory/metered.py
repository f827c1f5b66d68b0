"""torch_memory_saver, metered and made safe to ask twice. Imports no torch.

The library itself ends the process at a second pause, at a second resume, and at a resume for which there is no room; and it says
neither how many bytes a tag has nor whether they became free, so the device's free memory is read before and after.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol


class NoRoom(MemoryError):
    """The device has no room for what was to be mapped; nothing has changed."""


class Device(Protocol):
    def free(self) -> int:
        """Bytes."""

    def synchronize(self) -> None: ...

    def collect(self) -> None:
        """Give what is cached and unused back."""


class Metered:
    """Tags of one process. `inner`: region, pause and resume by tag; `report`: called with a tag's bytes on the device after a
    move."""

    def __init__(self, inner: Any, device: Device, report: Callable[[str, int], None]) -> None:
        self._inner, self._device, self._report = inner, device, report
        self._paused: set[str] = set()
        self._mapped: dict[str, int] = {}
        self._whole: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @contextlib.contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False) -> Iterator[None]:
        before = self._device.free()
        with self._inner.region(tag=tag, enable_cpu_backup=enable_cpu_backup):
            yield
        self._now(tag, self._mapped.get(tag, 0) + max(0, before - self._device.free()))
        self._whole[tag] = self._mapped[tag]

    def pause(self, tag: str) -> None:
        """What did not become free counts as mapped still."""
        if tag in self._paused:
            return
        self._device.synchronize()
        before = self._device.free()
        self._inner.pause(tag)
        self._paused.add(tag)
        self._now(tag, max(0, self._mapped.get(tag, 0) - max(0, self._device.free() - before)))

    def resume(self, tag: str) -> None:
        """Raises NoRoom."""
        if tag not in self._paused:
            return
        needed = self._whole.get(tag, 0) - self._mapped.get(tag, 0)
        if needed > self._device.free():
            self._device.collect()
        if needed > (before := self._device.free()):
            raise NoRoom(f"{tag} needs {needed / 1e9:.2f} GB, {before / 1e9:.2f} are free")
        self._inner.resume(tag)
        self._paused.discard(tag)
        self._now(tag, self._mapped.get(tag, 0) + max(0, before - self._device.free()))

    def is_paused(self, tag: str) -> bool:
        return tag in self._paused

    def _now(self, tag: str, mapped: int) -> None:
        self._mapped[tag] = mapped
        self._report(tag, mapped)
