"""The directory of one engine server, through which the engine's processes and the processes beside them exchange small files.

`<pid>.json`: bytes that a process of the engine has on the device, by tag; the server reads all after each sleep and wake, since
neither the engine's answers nor torch_memory_saver carry figures. `at_gate` and `open`: the launch gate. `word`: why the engine
ended as it started (SGLang's parent process learns it by a signal only).

    engine: imports, connects (a minute or so) -> touches `at_gate` -> waits for `open` -> maps weights and KV cache -> sleeps
    job:    sees `at_gate` -> asks for the init lease -> touches `open` -> engine asleep -> lease back

So a joining job disturbs the others only for the seconds in which it maps memory. Runs in schedulers, servers and rollout
workers; called by each engine's folder and by replica.py; touches this directory only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil

from verl_mux.coordinator.bus.members import is_alive, member_of
from verl_mux.errors import Failure
from verl_mux.platform.charges import charge

DIRECTORY_VARIABLE, CHARGES_VARIABLE = "VERL_MUX_TAG_DIR", "VERL_MUX_ENGINE_CHARGES"
# Charged once the engine runs; the others before it loads.
_LATE = ("graphs", "prefill_graphs", "workspace")
_AT_GATE, _OPEN, _WORD = "at_gate", "open", "word"
_POLL_S = 0.05


def _directory() -> Path | None:
    """Of this engine process's server; None: no server asked for it."""
    return Path(name) if (name := os.environ.get(DIRECTORY_VARIABLE)) else None


def write_mapped(mapped: dict[str, int], pid: int) -> None:
    """Replace process `pid`'s file: bytes that it has on the device, by tag."""
    if directory := _directory():
        temporary = directory / f".{pid}.tmp"
        temporary.write_bytes(msgspec.json.encode(mapped))
        temporary.replace(directory / f"{pid}.json")


def mapped_bytes(directory: Path) -> dict[str, int]:
    """Bytes on the device by tag, summed over the processes that write to `directory` and live: one that was killed has none."""
    totals: Counter[str] = Counter()
    for path in directory.glob("*.json"):
        with contextlib.suppress(psutil.NoSuchProcess):
            if is_alive(member_of(int(path.stem))):
                totals.update(msgspec.json.decode(path.read_bytes(), type=dict[str, int]))
    return dict(totals)


def forget(directory: Path) -> None:
    """Of a server that ends: removed, and with the run's last one on this host the run's own."""
    shutil.rmtree(directory, ignore_errors=True)
    with contextlib.suppress(OSError):  # there are others
        directory.parent.rmdir()


def wait_at_gate() -> None:
    """In a scheduler process, before it maps anything: wait for the gate. No directory named: no gate."""
    if directory := _directory():
        (directory / _AT_GATE).touch()
        _wait_for(directory / _OPEN)


def wait_until_engine_is_at_gate(directory: Path) -> None:
    """In a process on the server's node: wait until the engine has arrived."""
    _wait_for(directory / _AT_GATE)


def open_gate(directory: Path) -> None:
    """In a process on the server's node: let the engine map its memory."""
    (directory / _OPEN).touch()


def charge_engine(late: bool) -> None:
    """In a process of an engine: what it keeps on the device besides its tensors. Raises Failure: there is no room."""
    charges = msgspec.json.decode(os.environ.get(CHARGES_VARIABLE) or "{}", type=dict[str, int])
    charge({kind: num_bytes for kind, num_bytes in charges.items() if late or kind not in _LATE})


def leave_word(word: str) -> None:
    """In a process of an engine that ends before the engine has started: why. Of several ranks the first is kept."""
    if directory := _directory():
        with contextlib.suppress(OSError), (directory / _WORD).open("x") as file:
            file.write(word)


@contextlib.contextmanager
def leaving_word() -> Iterator[None]:
    """In a process of an engine that starts up: an error in the block ends it, so it leaves word why."""
    try:
        yield
    except Exception as error:
        full = isinstance(error, Failure) or type(error).__name__ == "OutOfMemoryError"
        leave_word(str(error) if full else f"{type(error).__name__}: {error}")
        raise


def word_left(directory: Path) -> str | None:
    """Why the engine ended during its start, in a process on the server's node. None: no engine process left a word."""
    path = directory / _WORD
    return path.read_text() if path.exists() else None


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(_POLL_S)
