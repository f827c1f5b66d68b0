"""`verl-mux top` in a terminal: shows, and hears keys."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import RenderableType
from rich.live import Live

from verl_mux.profiling.live.view import Choice


def watch(look: Callable[[], None], shown: Callable[[], RenderableType], choice: Choice, every: float) -> None:
    """Until q or Ctrl-C: looks `every` so many seconds unless it pauses, and shows."""
    with _keys_at_once(), Live(auto_refresh=False, screen=True) as live, contextlib.suppress(KeyboardInterrupt):
        keys = Keys(choice)
        while not keys.ended:
            live.update(shown(), refresh=True)
            for key in _typed(every):
                keys.press(key)
            if not choice.paused and not keys.ended:
                look()


class Keys:
    """What each key does to the reader's choice; a text to filter by goes on until Enter."""

    def __init__(self, choice: Choice) -> None:
        self.ended = False
        self._choice = choice
        self._asking = False

    def press(self, key: str) -> None:
        order = self._choice.order
        if self._asking:
            if key in "\r\n\x1b":
                self._asking = False
            else:
                order.only = order.only[:-1] if key in "\x7f\x08" else order.only + key
        elif key == "/":
            self._asking, order.only = True, ""
        elif key == "s":
            order.column = (order.column + 1) % len(self._choice.columns)
        elif key == "r":
            order.falling = not order.falling
        elif key == "\t":
            self._choice.on_jobs = not self._choice.on_jobs
        elif key == "p":
            self._choice.paused = not self._choice.paused
        elif key == "q":
            self.ended = True


def _typed(seconds: float) -> str:
    """Keys typed within `seconds`; at once when there are any. Without a terminal to type in, none."""
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return ""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return os.read(sys.stdin.fileno(), 64).decode(errors="replace") if ready else ""


@contextlib.contextmanager
def _keys_at_once() -> Iterator[None]:
    """Keys come without Enter and are not shown."""
    if not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
