"""Workers of one training process whose states leave its device together: verl puts the actor's and the critic's into one.

Each worker sleeps and wakes by a call of its own. What stays on a GPU is known for the whole process only, once all workers
sleep.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import torch

from verl_mux.errors import Failure
from verl_mux.memory.room import on_all_ranks, refusal
from verl_mux.memory.tags import Moves, total

# The share of its awake bytes that a process may keep on a GPU while it sleeps: the edges of pages.
_LEFT = 0.05
# The bytes that it may keep there in any case: cuBLAS keeps its workspaces in memory of torch's allocator.
_WORKSPACES = 256 << 20


class States(Protocol):
    def sleep(self) -> Moves: ...

    def wake(self) -> Moves: ...


class Residents:
    """`wait_s`: how long a wake waits for room. `device` below: as in room.py."""

    def __init__(self) -> None:
        self.wait_s = 0.0
        self._awake: set[str] = set()
        self._gave: dict[str, int] = {}  # bytes, in the last sleep that moved any

    def arrived(self, who: str) -> None:
        """A worker that has not slept yet."""
        self._awake.add(who)

    def sleep(self, who: str, states: Sequence[States], device: Any | None) -> Moves:
        """All states of a worker leave the device.

        Raises:
            Failure: more than the edges of pages stay there.
        """
        moves = total([it.sleep() for it in states], seconds=sum)
        self._awake.discard(who)
        if given := sum(moved.nbytes for moved in moves.values()):
            self._gave[who] = given
        if device is not None and not self._awake:
            # In the last one's account. The allocator knows the process alone, not whose a byte is.
            moves["params"] = msgspec.structs.replace(moves["params"], mapped=device.memory_allocated())
        self._check_left(sum(moved.mapped for moved in moves.values()), 0 if device is None else _WORKSPACES)
        return moves

    def wake(self, who: str, states: Sequence[States], device: Any | None) -> Moves:
        """All states of a worker come back, or none.

        Raises:
            Failure: no room for them on this rank or another, and who holds what.
        """
        group = torch.distributed.group.WORLD
        if word := refusal(
            f"the {who}'s states", self._gave.get(who, 0), self.wait_s, device, lambda fits: on_all_ranks(group, fits)
        ):
            raise Failure(word)
        self._awake.add(who)
        try:
            return total([it.wake() for it in states], seconds=sum)
        except torch.OutOfMemoryError as full:  # another process took the room meanwhile
            self.sleep(who, states, device)
            raise Failure(f"no room to wake the {who}'s states: {full}") from None

    def _check_left(self, left: int, allowed: int) -> None:
        had = sum(self._gave.values()) + left
        if left > max(_LEFT * had, allowed):
            raise Failure(f"the training states sleep, but {left / 1e9:.2f} of {had / 1e9:.2f} GB did not leave the device")


# One per process, as the saver of verl_mux_cpu/cpu_saver.py.
residents = Residents()
