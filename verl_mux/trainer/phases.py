"""Where a phase begins and ends: leases, what sleeps and wakes with them, and the events that say so.

One object a job. It holds at most one lease at a time and gives it back on every way out.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from verl_mux.coordinator.client import Lease, LocalMux


class Phases:
    """Takes and gives back the job's leases, and logs each wait and each phase.

    mux: the coordinator's client, or its local stand-in.
    log: the trainer's event log.
    """

    def __init__(self, mux: LocalMux, log: Any) -> None:
        self.mux, self.log = mux, log
        self.lease: Lease | None = None
        self.seconds: dict[str, float] = {}
        self._began = 0.0

    def begin(self, phase: str, step: int) -> Lease:
        """Wait for the lease of `phase`. The one held before, if any, must have been ended."""
        assert self.lease is None, f"{phase} begins while {self.lease} is held"
        started = time.perf_counter()
        lease = self.mux.acquire(phase, step=step)
        waited = time.perf_counter() - started
        extra = {"phase": phase, "nodes": list(lease.nodes), "token": lease.token}
        self.log.log("lease_wait", waited, extra=extra, step=step)
        self._add(f"wait_{phase}", waited)
        self.lease, self._began = lease, time.perf_counter()
        return lease

    def end(self) -> None:
        """Give the held lease back; nothing held, nothing done."""
        if self.lease is None:
            return
        lease, self.lease = self.lease, None
        held = time.perf_counter() - self._began
        extra = {"phase": lease.phase, "nodes": list(lease.nodes), "token": lease.token}
        # Logged before the nodes go to somebody else, so that by the log too nobody shares them.
        self.log.log("phase", held, extra=extra, step=lease.step)
        self._add(lease.phase, held)
        self.mux.release(lease)

    def shrink(self, nodes: list[str]) -> None:
        """Give some of the held nodes back, whose memory is free by now; the phase goes on upon the rest."""
        lease = self.lease
        extra = {"phase": lease.phase, "nodes": list(nodes), "token": lease.token}
        self.log.log("phase", time.perf_counter() - self._began, extra=extra, step=lease.step)
        self.lease = self.mux.shrink(lease, nodes)

    def fail(self, reason: str) -> None:
        """Something went wrong. A lease still held is kept until the job's processes, and their memory with them, are gone."""
        if self.lease is None:
            return self.mux.close()
        self.lease = None
        self.mux.fail(reason)

    @contextlib.contextmanager
    def during(self, phase: str, step: int) -> Iterator[Lease]:
        """A whole phase as a block."""
        try:
            yield self.begin(phase, step)
        finally:
            self.end()

    @contextlib.contextmanager
    def part(self, name: str, step: int, **extra: Any) -> Iterator[dict[str, Any]]:
        """A part of a phase (sync, update_actor, ...): shown by `verl-mux status`, logged with what the block adds."""
        self.mux.note(name)
        started = time.perf_counter()
        try:
            yield extra
        finally:
            seconds = time.perf_counter() - started
            self.log.log(name, seconds, extra=extra or None, step=step)
            self._add(name, seconds)

    def moved(self, verb: str, side: str, node: str, step: int, figures: dict[str, dict[str, float]], log: bool = True) -> None:
        """Tags went to sleep or woke: into the event log (where nobody nearer did it) and to the coordinator's memory view."""
        for tag, figure in figures.items():
            nbytes = int(figure.get("bytes", 0))
            mapped = int(figure.get("mapped", nbytes if verb == "wake" else 0))
            if log:
                extra = {"tag": tag, "bytes": nbytes, "mapped": mapped, "node": node, "side": side}
                self.log.log(verb, figure.get("seconds", 0.0), extra=extra, step=step)
            self.mux.memory(node, {tag: mapped})
            self._add(verb, float(figure.get("seconds", 0.0)))

    def take_seconds(self) -> dict[str, float]:
        """Seconds by phase and part since the last call."""
        taken, self.seconds = self.seconds, {}
        return taken

    def _add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
