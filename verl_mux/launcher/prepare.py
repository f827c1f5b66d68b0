"""The commands that a run file has done before its jobs start, and when they have ended."""

from __future__ import annotations

import subprocess
import sys

from verl_mux.errors import Failure, UserError
from verl_mux.launcher.run_file import RunFile, fill


def prepare(run: RunFile) -> None:
    """Run them side by side; all must succeed. Raises UserError where one ends with exit code 2, else Failure."""
    started: list[tuple[list[str], subprocess.Popen]] = []
    try:
        for command in run.prepare:
            filled = fill(command, run)
            print(f"prepare: {' '.join([*command[:1], *filled[1:]])}", file=sys.stderr)
            try:
                started.append((command, subprocess.Popen(filled, stdout=sys.stderr)))
            except OSError as error:
                raise UserError(f"prepare: cannot run {filled[0]!r}: {error.strerror}") from None
        for command, process in started:
            if process.wait() == 2:  # as ours does, one that refuses what it was given, and has said so
                raise UserError(f"prepare: {' '.join(command)} refused")
            if process.returncode:
                raise Failure(f"prepare: {' '.join(command)} ended with exit code {process.returncode}")
    finally:
        for process in (p for _, p in started if p.poll() is None):
            process.kill()
            process.wait()


def clean_up(run: RunFile) -> None:
    """Run them one after the other. The launcher reports one that fails, and runs the next."""
    for command in run.clean_up:
        try:
            code = subprocess.run(fill(command, run), stdout=sys.stderr, check=False).returncode
        except OSError as error:
            print(f"clean_up: cannot run {command[0]!r}: {error.strerror}", file=sys.stderr)
            continue
        if code:
            print(f"clean_up: {' '.join(command)} ended with exit code {code}", file=sys.stderr)
