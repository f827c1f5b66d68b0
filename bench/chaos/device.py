"""A node's device, as far as double use can be noticed on it: a file that one process at a time can lock, and the last token."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class Device:
    """`map` -> `unmap`. While it is mapped the file is locked, until the process ends or `unmap`; a stopped process keeps it."""

    def __init__(self, path: Path, checks: bool) -> None:
        """`checks` False: it takes any token, which is a fault to be noticed."""
        self._path, self._checks = path, checks
        self._file: int | None = None

    def map(self, token: int) -> str | None:
        """Once is enough. Gives what is wrong, if anything: `double use`, or `old token`."""
        if self._file is not None:
            return None
        file = os.open(self._path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            return "double use"
        old = int(os.pread(file, 64, 0) or 0) > token
        os.pwrite(file, b"%-40d" % token, 0)
        self._file = file
        return "old token" if old else None

    def unmap(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def takes_stale(self, token: int) -> bool:
        """For a call that was held up on its way and comes when its lease is over: whether it was let through although another
        lease has used the device since."""
        stale = int(self._path.read_bytes() or 0) != token
        return stale and not self._checks
