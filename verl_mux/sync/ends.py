"""One end of a job's syncs, kept over all of them: its sockets, its region, and its part in the two-stage plan.

Runs in trainer workers and rollout workers (`End`) and in the trainer's driver (`two_stage`); called by engine.py and the bench.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import xxhash

from verl_mux.sync.connection import Seal
from verl_mux.sync.layout import Held, SyncError
from verl_mux.sync.receiving import Following, Progress, Receiving, Role
from verl_mux.sync.remote_reads import Nixl, RemoteReads
from verl_mux.sync.sending import Sending, Settings, Shard, Target

# Classes of link: between trainers and rollout, within one of the two, within one host.
LINKS = ("slow", "fast", "local")


class Meeting(msgspec.Struct, frozen=True):
    """Where one end listens. `address`: for other hosts, `local`: for its own host; `host`: id of the machine, `name`: its name
    in messages; `cluster`: "train" or "rollout"."""

    address: tuple[str, int]
    local: str
    host: str
    name: str
    cluster: str


class SenderPart(msgspec.Struct, frozen=True):
    """A trainer rank's part: the workers that it sends to."""

    me: str
    targets: list[Target]


class WorkerPart(msgspec.Struct, frozen=True):
    """A worker's part: it receives in its `role`, or maps the memory of the worker `whom`, which listens at `follows`."""

    me: str
    role: Role | None = None
    follows: str = ""
    whom: str = ""


def part_of(plain: dict[str, Any]) -> SenderPart | WorkerPart:
    """The part that msgspec.to_builtins encoded."""
    return msgspec.convert(plain, SenderPart) if "targets" in plain else msgspec.convert(plain, WorkerPart)


def two_stage(trainers: Sequence[Meeting], workers: Sequence[Meeting]) -> tuple[list[SenderPart], list[WorkerPart]]:
    """The parts of trainer ranks and of workers: each rank sends its shard to the first worker of each host, once."""
    names = host_names([*trainers, *workers])
    ranks = [f"trainer rank {rank} on {names[it.host]}" for rank, it in enumerate(trainers)]
    labels = [f"rollout worker {number} on {names[it.host]}" for number, it in enumerate(workers)]
    by_host: dict[str, list[int]] = {}
    for number, worker in enumerate(workers):
        by_host.setdefault(worker.host, []).append(number)
    receiving: list[WorkerPart] = []
    for number, worker in enumerate(workers):
        first, *readers = by_host[worker.host]
        if number == first:
            role = Role(labels[number], {name: rank for rank, name in enumerate(ranks)}, [labels[it] for it in readers])
            receiving.append(WorkerPart(labels[number], role))
        else:
            receiving.append(WorkerPart(labels[number], follows=workers[first].local, whom=labels[first]))
    firsts = [numbers[0] for numbers in by_host.values()]
    sending = [
        SenderPart(me, [Target(workers[it].address, labels[it], link_between(trainer, workers[it])) for it in firsts])
        for me, trainer in zip(ranks, trainers, strict=True)
    ]
    return sending, receiving


def host_names(meetings: Sequence[Meeting]) -> dict[str, str]:
    """Host id -> name for messages, with a part of the id where two hosts have one name."""
    ids = {it.host: it.name for it in meetings}
    counts = Counter(ids.values())
    return {host: name if counts[name] == 1 else f"{name} ({host[:8]})" for host, name in ids.items()}


def link_between(one: Meeting, other: Meeting) -> str:
    if one.host == other.host:
        return "local"
    return "fast" if one.cluster == other.cluster else "slow"


def this_machine() -> str:
    """Id of this machine: the same in all processes of one kernel and network namespace, which reach each other's local sockets.

    Ray's node id would not do: a job has a Ray node for each of its nodes, several of which may be on one host.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return xxhash.xxh3_64_hexdigest(f"{boot} {os.readlink('/proc/self/ns/net')}".encode())


# Enough for 256 ranks that connect all at once. The kernel has its own limit (net.core.somaxconn); connections over it are tried
# again after 1, 3, 7, 15... seconds.
_BACKLOG = 2**16 - 1


class Reception(Protocol):
    """The common face of Receiving and Following: how a worker takes one sync."""

    progress: Progress

    def start(self) -> None: ...

    def finish(self) -> dict[str, float]: ...

    def close(self) -> None: ...


class End:
    """One end on a trainer rank or on a rollout worker, depending on its part. A new sync ends one that was left unfinished.

    Args:
        host: id of this machine; name: its name in messages.
        address: of the interface by which other hosts reach it.
    """

    def __init__(self, host: str, name: str, address: str, cluster: str, settings: Settings) -> None:
        self._settings = settings
        self._seal: Seal | None = None
        self._part: SenderPart | WorkerPart | None = None
        self._held = Held()
        self._reads = RemoteReads(Nixl(settings.timeout_s)) if settings.transport == "nixl" else None
        self._now: Sending | Reception | None = None
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._remote = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
        self._local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        local = f"\0verl_mux_{secrets.token_hex(8)}"
        self._local.bind(local)
        self._local.listen(_BACKLOG)
        self.meeting = Meeting((address, self._remote.getsockname()[1]), local, host, name, cluster)

    def join(self, part: SenderPart | WorkerPart, key: bytes) -> None:
        self._part, self._seal = part, Seal(key)

    def sending(self, shard: Shard, version: int) -> Sending:
        self._end_last()
        part, seal = self._part, self._seal
        assert isinstance(part, SenderPart) and seal is not None
        self._now = Sending(shard, part.targets, part.me, version, seal, self._settings, self._reads)
        return self._now

    def receiving(self, version: int) -> Reception:
        self._end_last()
        part, seal = self._part, self._seal
        assert isinstance(part, WorkerPart) and seal is not None
        if self._reads is not None and self._reads.left_open:
            self._held.close()
            self._reads.left_open = False
        found: Reception
        if part.role is None:
            found = Following(part.me, part.follows, part.whom, version, self._held, seal, self._settings.timeout_s)
        else:
            listeners = (self._remote, self._local)
            found = Receiving(part.role, version, listeners, self._held, seal, self._settings, self._reads)
        self._now = found
        return found

    def _end_last(self) -> None:
        if isinstance(self._now, Sending):
            self._now.stop()
        elif self._now is not None:
            with contextlib.suppress(SyncError):
                self._now.close()

    def close(self) -> None:
        self._end_last()
        for listener in (self._remote, self._local):
            listener.close()
        if self._reads is not None:
            self._reads.close()
        self._held.close()
