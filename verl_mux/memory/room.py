"""Room on a device for what is to be mapped there, and the workers of one training process that leave a device together.

Runs in training workers and in the schedulers of engines; called by trainer/workers.py and rollout/engine/sglang. Touches the
device and the ranks that do the same. `device` is torch's module of it (torch.cuda); None: the device is host memory, and the
ledger knows what is free of its budget.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from verl_mux.errors import Failure
from verl_mux.memory.tags import Moves, stays, total
from verl_mux.platform.choose import cpu_part

_POLL_S = 0.05
# Left free beside what a wake maps: the driver rounds up.
_MARGIN = 64 << 20


def refusal(what: str, needed: int, wait_s: float, device: Any | None, everywhere: Callable[[bool], bool]) -> str | None:
    """Why `needed` bytes cannot be mapped on all ranks, and who holds what; waits `wait_s` seconds for them. None: there is room.

    everywhere: whether it is true on all ranks; each of them asks the same number of times.
    """
    deadline = time.monotonic() + wait_s
    while True:
        free = _free(device)
        fits = free is None or not needed or needed + (_MARGIN if device else 0) <= free
        if everywhere(fits):
            return None
        if not everywhere(time.monotonic() < deadline):
            shortage = f"{what} take {needed / 1e9:.2f} GB, {(free or 0) / 1e9:.2f} are free after {wait_s:g} s"
            return f"no room to wake: {shortage}; held by {_holders(device)}"
        time.sleep(_POLL_S)


def on_all_ranks(group: Any | None, true_here: bool) -> bool:
    """group: torch's, over gloo; None: this process alone."""
    if group is None or torch.distributed.get_world_size(group) == 1:
        return true_here
    all_true = torch.tensor(int(true_here))
    torch.distributed.all_reduce(all_true, op=torch.distributed.ReduceOp.MIN, group=group)
    return bool(all_true.item())


def _free(device: Any | None) -> int | None:
    """Bytes; None: as much as there is."""
    if device is None:
        return cpu_part("ledger").free()
    device.empty_cache()
    return device.mem_get_info()[0]


def _holders(device: Any | None) -> str:
    return cpu_part("ledger").holders() if device is None else " ".join(device.list_gpu_processes().split())


class Residents:
    """Workers of one training process: verl puts the actor's and the critic's into one. Each sleeps and wakes by a call of its
    own; what stays on a GPU is known for the whole process only, once all workers sleep.

    `wait_s`: how long a wake waits for room. `states`: of a worker, each with `sleep()` and `wake()` that return Moves.
    """

    def __init__(self) -> None:
        self.wait_s = 0.0
        self._awake: set[str] = set()
        self._gave: dict[str, int] = {}  # bytes, in the last sleep that moved any

    def arrived(self, who: str) -> None:
        """A worker that has not slept yet."""
        self._awake.add(who)

    def sleep(self, who: str, states: Sequence[Any], device: Any | None) -> Moves:
        """All states of a worker leave the device.

        Raises:
            Failure: more than the edges of pages stay there.
        """
        moves = total([it.sleep() for it in states], seconds=sum)
        self._awake.discard(who)
        if gave := sum(moved.nbytes for moved in moves.values()):
            self._gave[who] = gave
        if device is not None and not self._awake:
            # Counted for the last worker: the allocator knows what the process holds, not which worker.
            moves["params"] = msgspec.structs.replace(moves["params"], mapped=device.memory_allocated())
        self._check_left(sum(moved.mapped for moved in moves.values()), gpu=device is not None)
        return moves

    def wake(self, who: str, states: Sequence[Any], device: Any | None) -> Moves:
        """All states of a worker come back, or none.

        Raises:
            Failure: no room for them on this rank or another, and who holds what.
        """
        group = torch.distributed.group.WORLD
        needed = self._gave.get(who, 0)
        if word := refusal(f"the {who}'s states", needed, self.wait_s, device, lambda fits: on_all_ranks(group, fits)):
            raise Failure(word)
        self._awake.add(who)
        try:
            return total([it.wake() for it in states], seconds=sum)
        except torch.OutOfMemoryError as full:  # another process took the room meanwhile
            self.sleep(who, states, device)
            raise Failure(f"no room to wake the {who}'s states: {full}") from None

    def _check_left(self, left: int, gpu: bool) -> None:
        had = sum(self._gave.values()) + left
        if stays(left, had, gpu):
            raise Failure(f"the training states sleep, but {left / 1e9:.2f} of {had / 1e9:.2f} GB did not leave the device")


# One per process, as the saver of verl_mux_cpu/cpu_saver.py.
residents = Residents()
