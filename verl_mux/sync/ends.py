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

import msgspec
import xxhash

from verl_mux.sync.connection import Seal
from verl_mux.sync.layout import Held, SyncError
from verl_mux.sync.receiving import Following, Receiving, Role
from verl_mux.sync.remote_reads import RemoteReads
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


class Sender(msgspec.Struct, frozen=True, tag=True):
    """A trainer rank's part: the workers that it sends to."""

    me: str
    targets: list[Target]


class Follower(msgspec.Struct, frozen=True, tag=True):
    """The part of a worker that maps the memory of the worker `whom` of its host, which listens at `at`."""

    me: str
    at: str
    whom: str


# Of the two ends of a sync; plain data that msgspec converts.
EndPart = Sender | Role | Follower


def two_stage(trainers: Sequence[Meeting], workers: Sequence[Meeting]) -> tuple[list[EndPart], list[EndPart]]:
    """The parts of trainer ranks and of workers: each rank sends its shard to the first worker of each host, once."""
    names = host_names([*trainers, *workers])
    ranks = [f"trainer rank {rank} on {names[it.host]}" for rank, it in enumerate(trainers)]
    labels = [f"rollout worker {number} on {names[it.host]}" for number, it in enumerate(workers)]
    by_host: dict[str, list[int]] = {}
    for number, worker in enumerate(workers):
        by_host.setdefault(worker.host, []).append(number)
    receiving: list[EndPart] = []
    for number, worker in enumerate(workers):
        first, *readers = by_host[worker.host]
        if number == first:
            receiving.append(
                Role(labels[number], {name: rank for rank, name in enumerate(ranks)}, [labels[it] for it in readers])
            )
        else:
            receiving.append(Follower(labels[number], workers[first].local, labels[first]))
    firsts = [numbers[0] for numbers in by_host.values()]
    sending: list[EndPart] = [
        Sender(me, [target(trainer, workers[it], labels[it]) for it in firsts])
        for me, trainer in zip(ranks, trainers, strict=True)
    ]
    return sending, receiving


def target(trainer: Meeting, worker: Meeting, label: str) -> Target:
    link = link_between(trainer, worker)
    return Target(worker.local if link == "local" else worker.address, label, link)


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


# How a worker takes one sync.
Reception = Receiving | Following


class End:
    """One end on a trainer rank or on a rollout worker, depending on its part. A new sync ends one that was left unfinished.

    Args:
        host: id of this machine; name: its name in messages.
        address: of the interface by which other hosts reach it.
    """

    def __init__(self, host: str, name: str, address: str, cluster: str, settings: Settings) -> None:
        self._settings = settings
        self._seal: Seal | None = None
        self._part: EndPart | None = None
        self._held = Held()
        self._reads = RemoteReads(settings.timeout_s) if settings.transport == "nixl" else None
        self._now: Sending | Reception | None = None
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._remote = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
        self._local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        local = f"\0verl_mux_{secrets.token_hex(8)}"
        self._local.bind(local)
        self._local.listen(_BACKLOG)
        self.meeting = Meeting((address, self._remote.getsockname()[1]), local, host, name, cluster)

    def join(self, part: EndPart, key: bytes) -> None:
        self._part, self._seal = part, Seal(key)

    def sending(self, shard: Shard, version: int) -> Sending:
        self._end_last()
        part, seal = self._part, self._seal
        assert isinstance(part, Sender) and seal is not None
        self._now = Sending(shard, part.targets, part.me, version, self._held, seal, self._settings, self._reads)
        return self._now

    def receiving(self, version: int) -> Reception:
        self._end_last()
        part, seal = self._part, self._seal
        assert isinstance(part, (Role, Follower)) and seal is not None
        if self._reads is not None and self._reads.left_open:
            self._held.close()
            self._reads.left_open = False
        if isinstance(part, Follower):
            self._now = Following(part.me, part.at, part.whom, version, self._held, seal, self._settings.timeout_s)
        else:
            listeners = (self._remote, self._local)
            self._now = Receiving(part, version, listeners, self._held, seal, self._settings, self._reads)
        return self._now

    def _end_last(self) -> None:
        if isinstance(self._now, Sending):
            self._now.stop()
            self._now.join()
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
