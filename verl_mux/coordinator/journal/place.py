"""Where a coordinator remembers when it is not told where: one journal for each configuration file and address."""

from __future__ import annotations

import re
from pathlib import Path

import xxhash

from verl_mux.coordinator.bus.state_folder import state_folder
from verl_mux.errors import UserError


def default_path(config: Path, bind: str) -> Path:
    """In the user's state folder. Raises UserError where there is none."""
    if (state := state_folder()) is None:
        raise UserError("there is no home folder to keep a journal in: name one with --journal, or say --no-journal")
    file = config.resolve()
    digest = xxhash.xxh3_64_hexdigest(f"{file} {bind}".encode())[:8]
    return state / "coordinators" / f"{file.stem}-{_words(bind.rpartition('/')[2])}-{digest}" / "journal"


def _words(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")
