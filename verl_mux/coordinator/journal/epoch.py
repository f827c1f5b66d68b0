"""The second small file: which journal lies beside it, and how often a coordinator has begun with it.

It is raised, and on disk, before a coordinator gives out its first token. So tokens rise even if the journal is lost,
and a journal that is gone, was emptied or comes from an old copy does not go unnoticed.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import xxhash

from verl_mux.coordinator.journal.frames import Damaged, sync_folder


class Epoch(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """`number`: of this start of a coordinator; `journal` names the one that belongs to it. `unknown`: up to which token it has
    yet to learn from clients what its predecessors granted; 0: it knows."""

    journal: str
    number: int
    checksum: str = ""
    unknown: int = 0


def read(path: Path) -> Epoch | None:
    """None: there is none. Raises Damaged, and OSError."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Epoch)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError:
        raise Damaged("it cannot be read") from None
    if found != _checked(found):
        raise Damaged("its checksum is wrong")
    return found


def write(path: Path, epoch: Epoch) -> None:
    """On disk when this returns; before that, what was there stays. Raises OSError."""
    made = path.with_name(f"{path.name}.new")
    with open(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(msgspec.json.encode(_checked(epoch)) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(made, path)
    sync_folder(path.parent)


def _checked(epoch: Epoch) -> Epoch:
    told = f"{epoch.journal} {epoch.number}" + (f" {epoch.unknown}" if epoch.unknown else "")
    return msgspec.structs.replace(epoch, checksum=xxhash.xxh3_64_hexdigest(told.encode()))
