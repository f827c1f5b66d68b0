"""Where a user's coordinators and jobs on this machine keep what they remember: keys, journals, addresses."""

from __future__ import annotations

import os
from pathlib import Path


def state_folder() -> Path | None:
    """As the XDG base directories have it, whether it is there or not; None: this user has no home folder."""
    base = os.environ.get("XDG_STATE_HOME", "")
    try:
        state = Path(base) if Path(base).is_absolute() else Path.home() / ".local" / "state"
    except RuntimeError:
        return None
    return state / "verl_mux"
