"""A job's leases without a coordinator, which a test fences."""

from __future__ import annotations

import threading

from verl_mux.coordinator.bus.client import LeaseLost, LocalMux

NODES = {"rollout": ["r0"], "train": ["t0"]}


class Fencing(LocalMux):
    """A local mux whose lease a test fences."""

    def __init__(self):
        super().__init__("a", NODES)
        self.usable, self.failed = threading.Event(), None
        self.usable.set()

    def guard(self, fenced):
        self.fence = fenced

    def wait_until_usable(self):
        assert self.usable.wait(60)
        if self.failed:
            raise LeaseLost(self.failed)

    def fail(self, reason):
        self.failed = reason
