"""What processes hold of the host's memory, read now and then beside the agent's looks, which must not wait for it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from verl_mux.coordinator.bus.messages import Member
from verl_mux.platform.host_memory import process_bytes

# The kernel goes through all pages of a process for it: a second for hundreds of GB.
_EVERY_S = 10.0

_Held = dict[Member, dict[str, int]]


class HostMemory:
    """`of` as often as one likes."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="verl-mux-host-memory")
        self._reading: Future[_Held] | None = None
        self._began = float("-inf")
        self._held: _Held = {}

    def of(self, processes: Sequence[Member]) -> _Held:
        """By process, as read last, by kind; those that came since are not in it."""
        if self._reading is not None and self._reading.done():
            self._held, self._reading = self._reading.result(), None
        if self._reading is None and time.monotonic() - self._began > _EVERY_S:
            self._began = time.monotonic()
            self._reading = self._thread.submit(_read, list(processes))
        return self._held


def _read(processes: Sequence[Member]) -> _Held:
    return {process: process_bytes(process.pid) for process in processes}
