"""How far the weights on a host have come, for those who load them: of the process that receives, and in each other worker."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from verl_mux.sync.failure import SyncError
from verl_mux.sync.layout import Entry, Layout
from verl_mux.sync.region import Region


class Progress:
    """unknown --attach--> some tensors ready --> ... --> done; or failed, from anywhere. Thread-safe."""

    def __init__(self) -> None:
        self.layout: Layout | None = None
        self.region: Region | None = None
        self._ready = 0
        self._done = False
        self._error: SyncError | None = None
        self._news = threading.Condition()

    def attach(self, entries: Sequence[Entry], region: Region) -> None:
        with self._news:
            self.layout, self.region = Layout(entries), region
            self._news.notify_all()

    def advance(self, ready: int, done: bool = False) -> None:
        """`ready`: tensors, from the first on; `done`: all of them, everywhere checked."""
        with self._news:
            self._ready, self._done = max(ready, self._ready), self._done or done
            self._news.notify_all()

    def fail(self, error: SyncError) -> None:
        with self._news:
            self._error = self._error or error
            self._news.notify_all()

    def beyond(self, taken: int) -> tuple[int, bool]:
        """Wait for more than `taken` ready tensors, or for the end: (ready, done). Whoever drives this says when it has
        waited for too long.

        Raises:
            SyncError: the sync failed.
        """
        with self._news:
            self._news.wait_for(lambda: self._error or self._done or (self.layout is not None and self._ready > taken))
            if self._error:
                raise self._error
            return self._ready, self._done
