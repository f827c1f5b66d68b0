"""Where a phase begins and ends: leases, the events that report them, and how a job leaves that moves to other nodes.

Runs in the trainer's driver; called by trainer/modes.py and its parts. Touches the coordinator's client and the event log.
One object of each a job. `Phases` holds at most one lease at a time and gives it back on every way out.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from verl_mux.coordinator.bus.client import Lease, LeaseLost, LocalMux
from verl_mux.coordinator.bus.messages import Member
from verl_mux.memory.tags import Moves, total
from verl_mux.profiling.eventlog import events

log = logging.getLogger(__name__)


class Phases:
    """mux: the coordinator's client, or its local stand-in. log: the trainer's event log."""

    def __init__(self, mux: LocalMux, log: Any) -> None:
        self.mux, self.log = mux, log
        self.lease: Lease | None = None
        self.seconds: defaultdict[str, float] = defaultdict(float)  # of this step, by phase and part
        self._began = 0.0
        self._taken = threading.RLock()
        self._user: int | None = None  # the thread that has it

    def guard(self, pause: Callable[[Lease], Callable[[], None]]) -> None:
        """`pause` puts the memory of a lease to sleep that may not be used for a while; its result takes the memory up again.
        Called between two uses of the device (see `using`), in a thread of its own."""

        def fenced() -> None:
            with self.device():
                lease, began = self.lease, time.perf_counter()
                if lease is None:
                    return
                try:
                    go_on = pause(lease)
                    self.mux.wait_until_usable()
                    go_on()
                    self.log.log(events.LEASE_FENCED, time.perf_counter() - began, extra=_about(lease), step=lease.step)
                except LeaseLost as lost:
                    log.error("the lease will not come back: %s", lost)
                except Exception:
                    log.exception("the job cannot go on after a lease that could not be used")
                    self.mux.fail("it could not take its memory up again")

        self.mux.guard(fenced)

    @contextlib.contextmanager
    def using(self) -> Iterator[None]:
        """A stretch that uses the device and is not broken off; it begins when the lease may be used. Raises LeaseLost when the
        lease never will be. A stretch within another is a part of that one."""
        if self._user != threading.get_ident():
            self.mux.wait_until_usable()
        with self.device():
            yield

    @contextlib.contextmanager
    def device(self) -> Iterator[None]:
        """As `using`, whether or not the lease may be used: for what takes memory away."""
        with self._taken:
            before, self._user = self._user, threading.get_ident()
            try:
                yield
            finally:
                self._user = before

    def begin(self, phase: str, step: int, nodes: Sequence[str] | None = None) -> Lease:
        """Wait for the lease of `phase`, on these nodes (None: all of its side). The one held before, if any, must have ended."""
        assert self.lease is None, f"{phase} begins while {self.lease} is held"
        started = time.perf_counter()
        lease = self.mux.acquire(phase, step=step, nodes=None if nodes is None else list(dict.fromkeys(nodes)))
        waited = time.perf_counter() - started
        self.log.log(events.LEASE_WAIT, waited, extra=_about(lease), step=step)
        self.seconds[f"wait_{phase}"] += waited
        self.lease, self._began = lease, time.perf_counter()
        return lease

    def end(self) -> None:
        """Give the held lease back; nothing held, nothing done."""
        if self.lease is None:
            return
        with self.using():  # not while what was put to sleep is taken up again
            lease, self.lease = self.lease, None
        held = time.perf_counter() - self._began
        # Logged before another job gets the nodes, so that by the log too no two jobs share them.
        self.log.log(events.PHASE, held, extra=_about(lease), step=lease.step)
        self.seconds[lease.phase] += held
        self.mux.release(lease)

    def shrink(self, nodes: list[str]) -> None:
        """Give some of the held nodes back, whose memory is free by now; the phase goes on upon the rest."""
        lease = self.lease
        assert lease is not None, f"{nodes} go back while no lease is held"
        extra = {**_about(lease), "nodes": nodes}
        self.log.log(events.PHASE, time.perf_counter() - self._began, extra=extra, step=lease.step)
        self.lease = self.mux.shrink(lease, nodes)

    def fail(self, reason: str) -> None:
        """A lease still held is kept until the job's processes, and their memory with them, are gone."""
        if self.lease is None:
            return self.mux.close(reason)
        self.lease = None
        self.mux.fail(reason)

    @contextlib.contextmanager
    def part(self, name: str, step: int, **extra: Any) -> Iterator[dict[str, Any]]:
        """A part of a phase (sync, update_actor, ...): shown by `verl-mux status`, logged with what the block adds."""
        self.mux.note(name)
        started = time.perf_counter()
        try:
            with self.using():
                yield extra
        finally:
            seconds = time.perf_counter() - started
            self.log.log(name, seconds, extra=extra or None, step=step)
            self.seconds[name] += seconds

    def moved(self, verb: str, side: str, step: int, parts: Sequence[tuple[str, Moves]], log: bool = True) -> None:
        """Tags slept or woke: to the event log (unless an engine has logged it itself) and the coordinator's memory view. parts:
        (node, what moved there) of each rank or server."""
        by_node: dict[str, list[Moves]] = defaultdict(list)
        for node, moves in parts:
            by_node[node].append(moves)
        for node, here in by_node.items():
            moves = total(here)
            for tag, moved in moves.items() if log else ():
                extra = {"tag": tag, "bytes": moved.nbytes, "mapped": moved.mapped, "node": node, "side": side}
                self.log.log(events.SLEEP if verb == "sleep" else events.WAKE, moved.seconds, extra=extra, step=step)
            if moves:
                self.mux.memory(node, {tag: moved.mapped for tag, moved in moves.items()})
        self.seconds[verb] += sum(moved.seconds for moved in total(moves for _, moves in parts).values())

    def host_memory(self, parts: Iterable[tuple[str, Member, dict[str, int]]]) -> None:
        """To the coordinator: what processes of the job hold of their nodes' host memory, by kind; each process counts once."""
        by_node: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for node, kinds in {process: (node, kinds) for node, process, kinds in parts}.values():
            by_node[node].update(kinds)
        for node, kinds in by_node.items():
            self.mux.host_memory(node, dict(kinds))

    def take_seconds(self) -> dict[str, float]:
        taken, self.seconds = self.seconds, defaultdict(float)
        return taken


def _about(lease: Lease) -> dict[str, Any]:
    return {"phase": lease.phase, "nodes": list(lease.nodes), "token": lease.token}


class LeavesToMove(Exception):
    """Ends verl's fit between two steps."""


class Leaving:
    """How a job that the coordinator asks to move saves at the end of its step, and leaves before the next one begins.

    asked by the coordinator -> `save` at a step's end -> `before_step` raises LeavesToMove -> `leave_note` -> `close_to_move`

    `verl-mux run` finds the note (`mux.move_note`; a job without one stays) and starts the job again: verl goes on from the
    checkpoint (`trainer.resume_mode=auto`), on the nodes that the coordinator keeps for it.
    """

    def __init__(self, mux: LocalMux, note: str | None) -> None:
        self._mux, self._note = mux, note
        self.saved = 0  # the last step with a checkpoint
        self._move, self._step, self._saving_s = 0, 0, 0.0

    def save(self, step: int, last: int, save_checkpoint: Callable[[], None]) -> None:
        """At the end of a step, while the states are on the device. After the last step there is nothing to move."""
        move = self._mux.move
        if not move or self._note is None or step >= last:
            return
        began = time.perf_counter()
        if self.saved != step:
            save_checkpoint()
        self._move, self._step, self._saving_s = move, step, time.perf_counter() - began

    def before_step(self) -> None:
        """Raises LeavesToMove; the step before is done and reported by now."""
        if self._move:
            raise LeavesToMove

    def leave_note(self) -> None:
        """Raises OSError: then the job fails, and its checkpoint is there for a restart."""
        assert self._note is not None
        Path(self._note).write_text(f"left after step {self._step} to move\n")

    def close_to_move(self) -> None:
        """In place of the client's `close`, of a job that leaves to move."""
        self._mux.leave_to_move(self._move, self._step, self._saving_s)
