"""What is said of devices, as data: what a process keeps on a GPU besides its tensors, which the ledger of a device with a budget
charges and the certificate counts with, and that budget."""

from __future__ import annotations

import os

import msgspec

from verl_mux.errors import UserError
from verl_mux.platform.device_ledger import BUDGET_VARIABLE, DEVICE_VARIABLE, JOB_VARIABLE, NODE_VARIABLE

GB = 10**9
SLEEP_LEVELS = ("auto", "1", "2")


class Charges(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """GB (1e9 bytes) on each GPU; a sleeping process keeps them too.

    context, communicators: of an engine's or a training rank's process; communicators only where it has peers. graphs, workspace:
    of an engine's. worker_context: of the rollout worker beside an engine. Measured by others (SGLang pull request 7873, 8B with
    TP 2 on H200: context 1.6, NCCL 1, graphs 0.6); workspace is flashinfer's 512 MiB, worker_context an estimate.
    """

    context: float = 1.6
    communicators: float = 1.0
    graphs: float = 0.6
    workspace: float = 0.54
    worker_context: float = 0.5

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not 0 <= getattr(self, name) < 1e6:
                raise UserError(f"mux.device.charges.{name} is {getattr(self, name)}; it must be a number of GB, 0 or more")

    def engine(self, peers: int, graphs: bool) -> dict[str, int]:
        """Bytes by kind of an engine's process on one GPU; `peers`: GPUs of the engine; `graphs`: does it capture any."""
        kept = {"context": self.context, "workspace": self.workspace}
        kept |= {"communicators": self.communicators} if peers > 1 else {}
        return _bytes(kept | ({"graphs": self.graphs} if graphs else {}))

    def worker(self) -> dict[str, int]:
        """Of the rollout worker beside it."""
        return _bytes({"context": self.worker_context})

    def trainer(self, peers: int) -> dict[str, int]:
        """Of a training rank; `peers`: ranks."""
        return _bytes({"context": self.context} | ({"communicators": self.communicators} if peers > 1 else {}))


class DeviceSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys under `mux.device`. budget: GB of one device, for platforms whose device is host memory; None: no budget.
    wake_wait_s: how long a wake waits for room. sleep_level: auto, 1 or 2. sleep_graphs: CUDA graphs leave the device too.
    communicators: NCCL's memory of a sleeping process; there is `keep` alone."""

    budget: float | None = None
    charges: Charges = Charges()
    wake_wait_s: float = 10.0
    sleep_level: str = "auto"
    sleep_graphs: bool = True
    communicators: str = "keep"

    def __post_init__(self) -> None:
        if self.budget is not None and not self.budget > 0:
            raise UserError(f"mux.device.budget is {self.budget:g} GB; it must be above 0, or null")
        if not self.wake_wait_s >= 0:
            raise UserError(f"mux.device.wake_wait_s is {self.wake_wait_s:g}; it must be 0 seconds or more")
        if self.sleep_level not in SLEEP_LEVELS:
            raise UserError(f"mux.device.sleep_level is {self.sleep_level}; allowed: {', '.join(SLEEP_LEVELS)}")
        if self.communicators != "keep":
            raise UserError(
                f"mux.device.communicators is {self.communicators}; allowed: keep. FSDP's parameters hold the process groups that"
                " they were sharded over, so a group that is dropped cannot be made anew under them; mux.device.charges counts it"
            )

    def announce(self, job: str, node: str, device: int = 0) -> None:
        """This process and its children use that device of the node, within the budget."""
        if self.budget is not None:
            os.environ[BUDGET_VARIABLE] = str(round(self.budget * GB))
            os.environ[NODE_VARIABLE], os.environ[DEVICE_VARIABLE], os.environ[JOB_VARIABLE] = node, str(device), job


def _bytes(kept: dict[str, float]) -> dict[str, int]:
    return {kind: round(gb * GB) for kind, gb in kept.items()}
