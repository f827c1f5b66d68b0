"""An agent, which looks at one host, and the coordinator. One question, one answer; both may be lost, doubled or late.

A look counts for a job only if the agent was asked for it, and it is asked for a job only once that one is dying: so no look
that began before the death can ever be taken for one after it.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from verl_mux.coordinator.bus import limits
from verl_mux.coordinator.bus.families.base import Member, Message

Source = Literal["nvml", "ledger", "unknown"]
# kube-proxy in its IPVS mode gives every host the addresses of all services of its cluster.
MOST_ADDRESSES = 4096
Members = Annotated[list[Member], msgspec.Meta(max_length=4096)]


class HostName(msgspec.Struct, frozen=True):
    """A machine, or a part of it with process ids of its own: `space` names its PID namespace, `boot` the boot of its kernel."""

    name: limits.Name
    addresses: Annotated[list[limits.Name], msgspec.Meta(max_length=MOST_ADDRESSES)]
    boot: limits.Name
    space: limits.Name

    @property
    def key(self) -> str:
        return f"{self.name}/{self.space}"

    @property
    def names(self) -> list[str]:
        """All by which a configuration may call it."""
        return list(dict.fromkeys([self.name, *self.addresses]))


class Look(msgspec.Struct, frozen=True):
    """Which processes of the job with this uid live there: those asked for, and all that carry its mark."""

    uid: limits.Name
    alive: Members


class Holder(msgspec.Struct, frozen=True):
    """A process that carries a job's mark: the device bytes that it holds, by node, and those of host memory, by kind."""

    uid: limits.Name
    member: Member
    bytes: limits.Tags = {}
    host: limits.Tags = {}


class AgentReport(Message, kw_only=True, frozen=True, tag="AGENT_REPORT"):
    """Also the question what to do. `agent`: its ZeroMQ identity; `number` counts its reports. `source`: who says what device
    memory processes hold. `looks`, `dead`: what the last answer asked for. `others`: device bytes of processes without a
    mark, by node. Host memory in bytes."""

    agent: limits.Name
    number: limits.Beat
    host: HostName
    source: Source
    looks: Annotated[list[Look], msgspec.Meta(max_length=1024)] = []
    dead: Members = []
    holders: Annotated[list[Holder], msgspec.Meta(max_length=4096)] = []
    others: limits.Tags = {}
    memory_free: limits.Bytes = 0
    memory_total: limits.Bytes = 0


class NodeHere(msgspec.Struct, frozen=True):
    """A node of the host, which of its GPUs it is (None: all), and who holds a lease on it."""

    gpu_ids: list[int] | None = None
    job: str = ""
    phase: str = ""
    token: int = 0


class AgentAnswer(Message, kw_only=True, frozen=True, tag="AGENT_ANSWER"):
    """To the report `number`. `again_s`: report again after so long. `look_for`: jobs that are dying, by uid, with processes that
    are known of them there. `drivers`: of whom to say which are dead. `end`: uids whose processes are to be ended. `jobs`:
    names of the uids that the report told of."""

    number: int
    epoch: str
    again_s: float
    look_for: dict[str, list[Member]] = {}
    drivers: list[Member] = []
    end: list[str] = []
    nodes: dict[str, NodeHere] = {}
    jobs: dict[str, str] = {}
