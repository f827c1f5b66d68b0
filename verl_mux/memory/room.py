"""Room on a device for what is to be mapped there, as all ranks see it that do the same.

`device` is torch's module of it (torch.cuda); None: the device is host memory, and the ledger knows what is free of its budget.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from verl_mux.platform import device_ledger

_POLL_S = 0.05
# Left free beside what a wake maps: the driver rounds up.
_MARGIN = 64 << 20


def refusal(what: str, needed: int, wait_s: float, device: Any | None, everywhere: Callable[[bool], bool]) -> str | None:
    """Why `needed` bytes cannot be mapped on all ranks, and who holds what; waits so long for them. None: there is room.

    everywhere: whether it is true on all ranks; each of them asks as often.
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
        return device_ledger.free()
    device.empty_cache()
    return device.mem_get_info()[0]


def _holders(device: Any | None) -> str:
    return device_ledger.holders() if device is None else " ".join(device.list_gpu_processes().split())
