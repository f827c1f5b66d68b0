"""A joining job starts its engine beside the others and disturbs them only for the seconds in which it maps memory.

    engine: imports, connects (a minute or so) -> touches `at_gate` -> waits for `open` -> maps weights and KV cache -> sleeps
    job:    sees `at_gate` -> asks for the init lease -> touches `open` -> engine asleep -> lease back

The gate is two files in the server's directory, since the engine's processes and the job share no other channel yet. What a
process of the engine dies of as it starts is a third: SGLang tells its parent by a signal, which carries no word.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from verl_mux.memory.tag_report import DIRECTORY_VARIABLE

_AT_GATE, _OPEN, _WORD = "at_gate", "open", "word"
_POLL_S = 0.05


def wait_at_gate(*_args, **_kwargs) -> None:
    """In a scheduler process, before it maps anything: wait for the gate. No directory named: no gate."""
    directory = os.environ.get(DIRECTORY_VARIABLE)
    if not directory:
        return
    (Path(directory) / _AT_GATE).touch()
    _wait_for(Path(directory) / _OPEN)


def wait_until_engine_is_at_gate(directory: Path) -> None:
    """In a process on the server's node: wait until the engine has arrived."""
    _wait_for(directory / _AT_GATE)


def open_gate(directory: Path) -> None:
    """In a process on the server's node: let the engine map its memory."""
    (directory / _OPEN).touch()


def leave_word(word: str) -> None:
    """In a scheduler process that ends before the engine has started: why. Of several ranks the first is kept."""
    directory = os.environ.get(DIRECTORY_VARIABLE)
    if directory:
        with contextlib.suppress(OSError), (Path(directory) / _WORD).open("x") as file:
            file.write(word)


def word_left(directory: Path) -> str | None:
    """Why the engine ended during its start. None: no engine process left a word. Runs in a process on the server's node."""
    path = directory / _WORD
    return path.read_text() if path.exists() else None


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(_POLL_S)
