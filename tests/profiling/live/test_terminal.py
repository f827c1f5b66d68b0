"""`verl-mux top` in a real terminal: tmux."""

import shlex
import shutil
import sys

import pytest

from tests.profiling.made_engines import make
from tests.profiling.terminal import Terminal

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")


@pytest.fixture
def terminal(tmp_path):
    make(tmp_path / "run", seed=1, steps=2, requests=24)
    command = f"{sys.executable} -m verl_mux top {shlex.quote(str(tmp_path / 'run'))} --every 0.2"
    screen = Terminal(tmp_path / "tmux", command)
    yield screen
    screen("kill-server")


def rows(screen: str) -> list[str]:
    """Of the job, in both tables. A screen that is looked at while it is drawn holds some of the old and some of the new."""
    return [line for line in screen.splitlines() if line.split()[:1] == ["a"]]


def test_it_shows_sorts_filters_and_ends(terminal):
    terminal.until(lambda text: all(words in text for words in ("run: 1 jobs, 4 replicas", "job ^", "tokens/s")))
    terminal("send-keys", "s")
    terminal.until(lambda text: "replica ^" in text)
    terminal("send-keys", "r")
    terminal.until(lambda text: "replica v" in text)
    terminal("send-keys", "/", "r1", "Enter")
    terminal.until(lambda text: "only replicas with 'r1'" in text and len(rows(text)) == 3)
    terminal.until(lambda text: sum(" r1 " in row for row in rows(text)) == 2)
    terminal("send-keys", "Tab")
    terminal.until(lambda text: "keys are for jobs" in text)
    terminal("send-keys", "s")
    terminal.until(lambda text: "step ^" in text and "replica v" in text)
    terminal("send-keys", "/", "nobody", "Enter")
    terminal.until(lambda text: "only jobs with 'nobody'" in text and len(rows(text)) == 2)  # the replicas stay
    terminal("send-keys", "q")
    terminal.until(lambda text: not text)  # the pane's only process has ended, and the server with it
