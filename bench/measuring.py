"""What the benches share: `--json` and the printing of figures, quantiles, and processes that answer.

Runs on the command line; called by the benches. Touches standard output and the processes that it starts.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Annotated, Any

import typer

from verl_mux.errors import Failure

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def show(found: Mapping[str, Any], as_json: bool, in_words: Callable[[Any], str] | None = None) -> None:
    """Print figures: as one JSON object, in words, or a line for each."""
    if as_json:
        print(json.dumps(found))
    else:
        print(in_words(found) if in_words else "\n".join(f"{name}: {value}" for name, value in found.items()))


def quantile(values: Collection[float], part: float) -> float:
    """The smallest value that `part` of them do not exceed."""
    return sorted(values)[max(math.ceil(part * len(values)), 1) - 1]


@contextlib.contextmanager
def child(target: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """`target(*arguments, connection)` in a process of its own, which ends with the block; gives the connection's other end."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=target, args=(*arguments, theirs))
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()
        process.join()
        ours.close()


def answer_of(module: str, *arguments: str, within_s: float, what: str, **environment: str) -> Any:
    """The JSON in the last line that `python -m MODULE ARGUMENTS` prints.

    Raises:
        Failure: `what` did not end in time, or ended with an error, the last line of which it says.
    """
    command = [sys.executable, "-m", module, *arguments]
    merged = {**os.environ, **environment}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=merged, timeout=within_s, check=False)
    except subprocess.TimeoutExpired:
        raise Failure(f"{what} did not end within {within_s:g} s") from None
    if done.returncode:
        raise Failure((done.stderr.strip().splitlines() or [f"{what} ended with exit code {done.returncode}"])[-1].strip())
    return json.loads(done.stdout.strip().splitlines()[-1])
