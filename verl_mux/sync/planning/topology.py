"""Who has weights, who wants them, and what lies between: trainer ranks, hosts of rollout workers, and the links. Pure.

Three classes of link. `local`: within one host. `fast`: between hosts of one cluster, through each host's own interface. `slow`:
between clusters; either each pair of hosts has one of its own, or all share one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import msgspec

from verl_mux.errors import UserError
from verl_mux.yaml_file import allowed_keys

LINKS = ("slow", "fast", "local")
# Far above what runs: a plan looks at every pair.
MAX_BYTES, MAX_PROCESSES = 2**60, 4096


class Links(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Gbit/s. `slow_gbps` None: what lies between clusters is not slower than what lies within."""

    fast_gbps: float = 100.0
    slow_gbps: float | None = None
    local_gbps: float = 30.0
    slow_link: Literal["per_pair", "shared"] = "per_pair"


class Trainer(msgspec.Struct, frozen=True):
    """One trainer rank; it sends `share` of the model. `whole`: it could send all of it."""

    host: str
    cluster: str
    share: float
    whole: bool = False


class RolloutHost(msgspec.Struct, frozen=True):
    """`workers`: numbers of those on it, among all."""

    host: str
    cluster: str
    workers: tuple[int, ...]


class Topology(msgspec.Struct, frozen=True):
    trainers: tuple[Trainer, ...]
    hosts: tuple[RolloutHost, ...]
    links: Links = Links()


Place = Trainer | RolloutHost


def link_between(one: Place, other: Place) -> str:
    if one.host == other.host:
        return "local"
    return "fast" if one.cluster == other.cluster else "slow"


def bytes_per_second(links: Links, link: str) -> float:
    gbps = {"local": links.local_gbps, "fast": links.fast_gbps, "slow": links.slow_gbps or links.fast_gbps}[link]
    return gbps * 1e9 / 8


# ---------------------------------------------------------------- a file of it


class _TrainHost(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`shares`: of the model, by rank; the same for all where it is not given."""

    host: str
    ranks: int = 1
    shares: list[float] | None = None
    cluster: str = "train"


class _RolloutHost(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    host: str
    workers: int = 1
    cluster: str = "rollout"


class SyncFile(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What `verl-mux plan --sync FILE` reads. `senders_hold`: each trainer rank its own shard, or the whole model."""

    model_bytes: int
    senders: list[_TrainHost]
    hosts: list[_RolloutHost]
    links: Links = Links()
    senders_hold: Literal["shard", "model"] = "shard"


_KINDS = {".senders": _TrainHost, ".hosts": _RolloutHost, ".links": Links}


def read_topology(given: Mapping) -> tuple[Topology, int]:
    """The topology, and the model's bytes.

    Raises:
        UserError: with the key, what was given and what is allowed.
    """
    try:
        file = msgspec.convert(given, SyncFile)
    except msgspec.ValidationError as error:
        raise UserError(f"the sync file: {error}{allowed_keys(error, _KINDS, SyncFile)}") from None
    _check(file)
    ranks = sum(host.ranks for host in file.senders)
    trainers = tuple(
        Trainer(host.host, host.cluster, share, ranks == 1 or file.senders_hold == "model")
        for host in file.senders
        for share in (host.shares or [1 / ranks] * host.ranks)
    )
    hosts, first = [], 0
    for host in file.hosts:
        hosts.append(RolloutHost(host.host, host.cluster, tuple(range(first, first + host.workers))))
        first += host.workers
    return Topology(trainers, tuple(hosts), file.links), file.model_bytes


def _check(file: SyncFile) -> None:
    if not 1 <= file.model_bytes <= MAX_BYTES:
        raise UserError(f"model_bytes is {file.model_bytes}; it must be at least 1 and at most {MAX_BYTES}")
    if not file.senders or not file.hosts:
        raise UserError("senders and hosts each need at least one host")
    for at, host in enumerate(file.senders):
        _check_number(f"senders[{at}]: ranks", host.ranks)
        if host.shares is not None and len(host.shares) != host.ranks:
            raise UserError(f"senders[{at}]: ranks is {host.ranks}, and shares must have as many numbers (or be left out)")
    for at, rollout in enumerate(file.hosts):
        _check_number(f"hosts[{at}].workers", rollout.workers)
    shares = [share for host in file.senders for share in host.shares or []]
    if shares and (any(host.shares is None for host in file.senders) or not abs(sum(shares) - 1) <= 1e-6 or min(shares) < 0):
        raise UserError(f"shares are {shares}; give them for all senders, none below 0, 1 together")
    for key, value in msgspec.structs.asdict(file.links).items():
        if isinstance(value, float | int) and not 0 < value < math.inf:
            raise UserError(f"links.{key} is {value}; it must be above 0 and finite")


def _check_number(key: str, count: int) -> None:
    if not 1 <= count <= MAX_PROCESSES:
        raise UserError(f"{key} is {count}; it must be at least 1 and at most {MAX_PROCESSES}")
