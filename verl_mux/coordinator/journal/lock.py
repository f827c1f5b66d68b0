"""One coordinator for one journal: two that remember in one place would both grant."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from verl_mux.errors import UserError


class Lock:
    """Held from its making to `close`, or to the end of the process, however that comes about."""

    def __init__(self, path: Path, of: Path):
        """Raises UserError when another process holds it, and OSError."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._file, 32).decode(errors="replace").strip() or "unknown"
            self.close()
            raise UserError(
                f"journal {of} is in use by another coordinator (pid {holder}): stop that one, or name another --journal"
            ) from None
        with contextlib.suppress(OSError):  # only told to others
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        os.close(self._file)
