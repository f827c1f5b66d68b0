"""Where a coordinator remembers when it is not told where: one journal for each configuration file and address."""

from __future__ import annotations

import os
import re
from pathlib import Path

import xxhash

from verl_mux.errors import UserError


def default_path(config: Path, bind: str) -> Path:
    """In the user's state folder, as the XDG base directories have it. Raises UserError where there is none."""
    base = os.environ.get("XDG_STATE_HOME")
    try:
        state = Path(base) if base and Path(base).is_absolute() else Path.home() / ".local" / "state"
    except RuntimeError:
        raise UserError("there is no home folder to keep a journal in: name one with --journal, or say --no-journal") from None
    file = config.resolve()
    port = re.sub(r"[^A-Za-z0-9]+", "-", bind.rpartition("/")[2]).strip("-")
    digest = xxhash.xxh3_64_hexdigest(f"{file} {bind}".encode())[:8]
    return state / "verl_mux" / "coordinators" / f"{file.stem}-{port}-{digest}" / "journal"


def is_fresh(bind: str) -> bool:
    """The system chooses the port at the start: no job of an earlier coordinator knows this address."""
    return bind.endswith((":0", ":*"))
