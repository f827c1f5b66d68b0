"""What a job's process and the keepers on its hosts tell each other, one JSON object a line."""

from __future__ import annotations

import msgspec


class Raylet(msgspec.Struct, frozen=True, kw_only=True):
    """Ray on one node of the job. `gpu_ids` None: all GPUs that are seen there."""

    node: str
    gpus: int
    gpu_ids: list[int] | None = None


class Setup(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first to a keeper. Holds secrets, so it comes by stdin.

    `uid`: the mark in the environment of all that belongs to the job; `towards`: host name or address of the coordinator; `keys`:
    contents of the job's key files, by name; `folder`: where the job writes; `ray_folder`: where Ray keeps its sockets and logs.
    """

    uid: str
    ray_token: str
    environment: dict[str, str]
    keys: dict[str, str]
    folder: str
    ray_folder: str
    towards: str
    address: str | None = None


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """`address`: of the host, for Ray."""

    address: str


class Hold(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Take the block of ports, giving back any other."""

    block: int


class Held(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """`taken`: the port that stood in the way, None: the block is the job's here."""

    taken: int | None = None


class StartRay(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """`commands`: one after the other, each with what it has in its environment besides."""

    commands: list[tuple[list[str], dict[str, str]]]
    timeout_s: float


class Started(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    reason: str


class Drive(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Start verl's driver."""

    command: list[str]
    environment: dict[str, str]


class Driven(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The driver ended; `code` as of subprocess."""

    code: int


class Interrupt(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ask the driver to end."""


class End(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End all that carries the mark. `keep_logs`: of Ray."""

    keep_logs: bool


class Swept(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The last of a keeper. `left`: processes that would not end."""

    left: list[int] = []


ToKeeper = Setup | Hold | StartRay | Drive | Interrupt | End
FromKeeper = Ready | Held | Started | Failed | Driven | Swept

_to_keeper, _from_keeper = msgspec.json.Decoder(ToKeeper), msgspec.json.Decoder(FromKeeper)


def encode(message: ToKeeper | FromKeeper) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def to_keeper(line: bytes) -> ToKeeper:
    """Raises msgspec.DecodeError."""
    return _to_keeper.decode(line)


def from_keeper(line: bytes) -> FromKeeper:
    """Raises msgspec.DecodeError."""
    return _from_keeper.decode(line)
