"""The memory of one host in which a model comes together and from which all its workers load.

It has no name in any folder: the process that receives makes it (memfd) and hands its descriptor to the other workers, so it is
gone with the last of them, whatever ends them, and the size of /dev/shm is no limit to it. It is kept over syncs.
"""

from __future__ import annotations

import contextlib
import mmap
import os

import psutil

from verl_mux.sync.failure import SyncError

# As /proc shows it.
NAME = "verl_mux_weights"
# What a host keeps beside it.
_RESERVE = 64 << 20


class Region:
    """`view`: its bytes. `fd` can be handed to another process of the host, which makes its own Region of it."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd, self.nbytes = fd, nbytes
        # A mapping has at least one byte.
        self._map = mmap.mmap(fd, max(nbytes, 1))
        self.view = memoryview(self._map)[:nbytes]

    @classmethod
    def made(cls, nbytes: int) -> Region:
        """A new one, with all its memory there: what lacks shows now, and not as a killed process in the middle of a sync.

        Raises:
            SyncError: this host has not as much memory.
        """
        free = psutil.virtual_memory().available
        if nbytes > free - _RESERVE:
            raise SyncError(f"the weights need {nbytes} bytes of shared memory on this host, and {free} are free")
        fd = os.memfd_create(NAME, os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, max(nbytes, 1))
            return cls(fd, nbytes)
        except OSError as error:
            os.close(fd)
            raise SyncError(f"the weights need {nbytes} bytes of shared memory on this host: {error.strerror}") from None

    def close(self) -> None:
        """The descriptor; what still has a view of it keeps the memory."""
        with contextlib.suppress(BufferError):
            self.view.release()
            self._map.close()
        os.close(self.fd)


class Held:
    """The region that a process keeps over syncs, and what it has in it. Not thread-safe.

    `stamps`: of the part of each trainer rank, see delta.py; only of a sync that was whole and checked, of a region that this
    process made, and only until somebody takes them to write to it.
    """

    def __init__(self) -> None:
        self._region: Region | None = None
        self._is_ours = False
        self.stamps: dict[int, bytes] = {}

    def of(self, nbytes: int) -> Region:
        """One of this size that this process made: the same as the last time where it fits."""
        if self._region is None or not self._is_ours or self._region.nbytes != nbytes:
            self.close()
            self._region, self._is_ours = Region.made(nbytes), True
        return self._region

    def take_stamps(self) -> dict[int, bytes]:
        """What is in the region, which from now on is nothing that anybody may rely on."""
        taken, self.stamps = self.stamps, {}
        return taken

    def mapped(self, fd: int, nbytes: int) -> Region:
        """Of a descriptor that was received; the same as the last time where it is the same memory."""
        if self._region is not None and os.path.sameopenfile(self._region.fd, fd):
            os.close(fd)
            return self._region
        self.close()
        self._region, self._is_ours = Region(fd, nbytes), False
        return self._region

    def close(self) -> None:
        self.stamps = {}
        if self._region is not None:
            self._region.close()
            self._region = None
