"""`verl-mux top`: a run's event logs as they grow."""

from __future__ import annotations

import contextlib
import json as jsonlib
import os
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from verl_mux.profiling.live.follow import Follower
from verl_mux.profiling.live.state import State
from verl_mux.profiling.live.view import REPLICA_COLUMNS, Choice, as_json, render


def top(
    directory: Annotated[Path, typer.Argument(help="A run's directory, or one job's events.")],
    every: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.1)] = 1.0,
    sort: Annotated[str, typer.Option(help=f"Column of the replicas to sort by: {', '.join(REPLICA_COLUMNS)}.")] = "job",
    only: Annotated[str, typer.Option(help="Only replicas whose job, number or node hold this text.")] = "",
    once: Annotated[bool, typer.Option("--once", help="Print what is there now, and end.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and end.")] = False,
) -> None:
    """Show what runs where now: requests by state, tokens a second and KV use of each replica, who waits for whom.

    In a terminal: s sorts by the next column, r turns the order round, / asks for a text to filter by, p pauses, q ends.
    """
    from verl_mux.errors import UserError

    if sort not in REPLICA_COLUMNS:
        raise UserError(f"--sort {sort}: not a column; allowed: {', '.join(REPLICA_COLUMNS)}")
    choice = Choice(sort=REPLICA_COLUMNS.index(sort), only=only)
    follower, state = Follower(directory), State()
    _look(follower, state)
    if json:
        print(jsonlib.dumps(as_json(state, choice)))
    elif once or not sys.stdout.isatty():
        from rich.console import Console

        Console(width=None if sys.stdout.isatty() else 180).print(render(state, choice, directory.resolve().name))
    else:
        _watch(follower, state, choice, directory.resolve().name, every)


def _look(follower: Follower, state: State) -> None:
    for line in follower.new():
        state.feed(line)
    state.end(follower.ended())


def _watch(follower: Follower, state: State, choice: Choice, name: str, every: float) -> None:
    from rich.live import Live

    with _keys_at_once(), Live(auto_refresh=False, screen=True) as live, contextlib.suppress(KeyboardInterrupt):
        keys = Keys(choice)
        while not keys.ended:
            if not choice.paused:
                _look(follower, state)
            live.update(render(state, choice, name), refresh=True)
            for key in _typed(every):
                keys.press(key)


class Keys:
    """What each key does to the reader's choice; a text to filter by goes on until Enter."""

    def __init__(self, choice: Choice) -> None:
        self.ended = False
        self._choice = choice
        self._asking = False

    def press(self, key: str) -> None:
        choice = self._choice
        if self._asking:
            if key in "\r\n\x1b":
                self._asking = False
            else:
                choice.only = choice.only[:-1] if key in "\x7f\x08" else choice.only + key
        elif key == "/":
            self._asking, choice.only = True, ""
        elif key == "s":
            choice.sort = (choice.sort + 1) % len(REPLICA_COLUMNS)
        elif key == "r":
            choice.falling = not choice.falling
        elif key == "p":
            choice.paused = not choice.paused
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
