"""What a process keeps on a GPU besides its tensors, which the certificate counts with, and which a device with a budget is
charged; the keys under mux.device. Runs in every process of a job; `announce` sets environment variables, `charge` writes
this process's account by the ledger of verl_mux_cpu, the rest is pure."""

from __future__ import annotations

import os
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from verl_mux.platform.choose import cpu_part

GB = 10**9
# Where host memory is the device: the node whose device this process uses (empty where its host is one node), bytes of one device
# of the node (none: as much as there is), which of its devices, and whose process it is.
NODE_VARIABLE, BUDGET_VARIABLE = "VERL_MUX_NODE", "VERL_MUX_DEVICE_BUDGET"
DEVICE_VARIABLE, JOB_VARIABLE = "VERL_MUX_DEVICE", "VERL_MUX_DEVICE_JOB"
# Factor on every charge; tests on a machine without a GPU set it below 1, so that a small model outweighs what is charged.
SCALE_VARIABLE = "VERL_MUX_CHARGES_SCALE"


class Charges(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """GB (1e9 bytes) on each GPU; a sleeping process keeps them too.

    context, communicators: of an engine's or a training rank's process; communicators only where it has peers. graphs, workspace:
    of an engine's. worker_context: of the rollout worker beside an engine. Measured by others (SGLang pull request 7873, 8B with
    TP 2 on H200: context 1.6, NCCL 1, graphs 0.6); workspace is flashinfer's 512 MiB, worker_context an estimate. prefill_graphs:
    of an engine that captures prefills too; an estimate for 58 lengths of at most 8192 tokens, for each of which SGLang reserves
    8 MiB, and the activations of the longest.
    """

    context: float = 1.6
    communicators: float = 1.0
    graphs: float = 0.6
    prefill_graphs: float = 1.5
    workspace: float = 0.54
    worker_context: float = 0.5

    def engine(self, peers: int, graphs: bool, prefill_graphs: bool = False) -> dict[str, int]:
        """Bytes by kind of an engine's process on one GPU; `peers`: GPUs of the engine; `graphs`: does it capture any, and of
        prefills."""
        kept = {"context": self.context, "workspace": self.workspace}
        kept |= {"communicators": self.communicators} if peers > 1 else {}
        kept |= {"prefill_graphs": self.prefill_graphs} if prefill_graphs else {}
        return _bytes(kept | ({"graphs": self.graphs} if graphs else {}))

    def worker(self) -> dict[str, int]:
        """Of the rollout worker beside it."""
        return _bytes({"context": self.worker_context})

    def trainer(self, peers: int) -> dict[str, int]:
        """Of a training rank; `peers`: ranks."""
        return _bytes({"context": self.context} | ({"communicators": self.communicators} if peers > 1 else {}))


class DeviceSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Device memory; docs/memory.md."""

    charges: ClassVar[Charges] = Charges()
    budget: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="GB of one device where there is no GPU: more than that fails as on a GPU. null: no limit."),
    ] = None
    wake_wait_s: Annotated[float, Meta(description="How long a wake waits for room before it fails.", ge=0)] = 10.0
    sleep_level: Annotated[
        Literal["auto", "1", "2"],
        Meta(
            description="1: a sleeping engine keeps its weights in host memory. 2: it drops them. auto: 1 where the same weights"
            " are needed next."
        ),
    ] = "auto"

    def announce(self, job: str, node: str, device: int = 0) -> None:
        """This process and its children use that device of the node, within the budget. Without one the node that the environment
        names stays."""
        if self.budget is None:
            os.environ.setdefault(NODE_VARIABLE, node)
        else:
            os.environ[BUDGET_VARIABLE] = str(round(self.budget * GB))
            os.environ[NODE_VARIABLE], os.environ[DEVICE_VARIABLE], os.environ[JOB_VARIABLE] = node, str(device), job


def has_budget() -> bool:
    """Whether this process uses a device with a budget, which the ledger of verl_mux_cpu counts."""
    return bool(os.environ.get(BUDGET_VARIABLE))


def charge(kept: dict[str, int]) -> None:
    """On a device with a budget: this process keeps that much besides its tensors, by kind. Raises Failure: there is no room."""
    if has_budget():
        cpu_part("ledger").charge(kept)


def _bytes(kept: dict[str, float]) -> dict[str, int]:
    scale = float(os.environ.get(SCALE_VARIABLE, "1"))
    return {kind: round(gb * GB * scale) for kind, gb in kept.items()}
