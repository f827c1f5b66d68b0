"""`verl-mux top` in a real terminal: tmux."""

import os
import shlex
import shutil
import subprocess
import sys
import time

import pytest

from tests.profiling.made_engines import make

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")


class Terminal:
    """A tmux server of its own, with one pane."""

    def __init__(self, socket, command):
        # A width that pytest's own terminal had would go before that of the pane.
        self._environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self._tmux = ["tmux", "-S", str(socket), "-f", "/dev/null"]
        self("new-session", "-d", "-x", "150", "-y", "30", command)

    def __call__(self, *arguments):
        return subprocess.run(
            [*self._tmux, *arguments], check=False, capture_output=True, text=True, env={**self._environment, "TERM": "xterm"}
        )

    def until(self, holds, seconds=60):
        """The screen, as soon as it holds what is asked for."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            screen = self("capture-pane", "-p").stdout
            if holds(screen):
                return screen
            time.sleep(0.1)
        raise AssertionError(f"not within {seconds} s:\n{screen}")


@pytest.fixture
def terminal(tmp_path):
    make(tmp_path / "run", seed=1, steps=2, requests=24)
    command = f"{sys.executable} -m verl_mux top {shlex.quote(str(tmp_path / 'run'))} --every 0.2"
    screen = Terminal(tmp_path / "tmux", command)
    yield screen
    screen("kill-server")


def test_it_shows_sorts_filters_and_ends(terminal):
    terminal.until(lambda text: all(words in text for words in ("run: 1 jobs, 4 replicas", "job ^", "tokens/s")))
    terminal("send-keys", "s")
    terminal.until(lambda text: "replica ^" in text)
    terminal("send-keys", "r")
    terminal.until(lambda text: "replica v" in text)
    terminal("send-keys", "/", "r1", "Enter")
    screen = terminal.until(lambda text: "only 'r1'" in text)
    assert sum(line.split()[:1] == ["a"] and " r1 " in line for line in screen.splitlines()) == 2
    terminal("send-keys", "q")
    terminal.until(lambda text: not text)  # the pane's only process has ended, and the server with it
