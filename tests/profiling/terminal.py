"""A real terminal for tests: tmux."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path


class Terminal:
    """A tmux server of its own, with one pane."""

    def __init__(self, socket: Path, command: str, columns: int = 150) -> None:
        # A width that pytest's own terminal had would go before that of the pane.
        self._environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self._tmux = ["tmux", "-S", str(socket), "-f", "/dev/null"]
        self("new-session", "-d", "-x", str(columns), "-y", "30", command)

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [*self._tmux, *arguments], check=False, capture_output=True, text=True, env={**self._environment, "TERM": "xterm"}
        )

    def until(self, holds: Callable[[str], bool], seconds: float = 60) -> str:
        """The screen, as soon as it holds what is asked for."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            screen = self("capture-pane", "-p").stdout
            if holds(screen):
                return screen
            time.sleep(0.1)
        raise AssertionError(f"not within {seconds} s:\n{screen}")
