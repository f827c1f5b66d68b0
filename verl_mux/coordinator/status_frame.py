"""The answer to STATUS_REQUEST. Where making it takes long, it is made only so often that this takes a small share of time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from verl_mux.coordinator.bus import messages as m

# With few jobs it is made in some 100 us, and always anew; with thousands in some 20 ms, and there may be many who ask.
_SHARE, _LONG_S = 0.1, 0.005


class Cached:
    def __init__(self, describe: Callable[[], dict[str, Any]]) -> None:
        self._describe = describe
        self._frame, self._good_until = b"", 0.0

    def frame(self) -> bytes:
        now = time.monotonic()
        if now >= self._good_until:
            began = time.thread_time()  # of this thread alone: waiting for a core of a busy host makes no status dear
            self._frame = m.encode(m.Status(snapshot=self._describe()))
            took = time.thread_time() - began
            self._good_until = now + (took / _SHARE if took > _LONG_S else 0.0)
        return self._frame
