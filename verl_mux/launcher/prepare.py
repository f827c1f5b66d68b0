"""The commands that a run file has done before its jobs start."""

from __future__ import annotations

import subprocess
import sys

from verl_mux.errors import Failure, UserError
from verl_mux.launcher.run_file import RunFile, fill


def prepare(run: RunFile) -> None:
    """Run them side by side; all must succeed."""
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
            if process.wait() != 0:
                raise Failure(f"prepare: {' '.join(command)} ended with exit code {process.returncode}")
    finally:
        for process in (p for _, p in started if p.poll() is None):
            process.kill()
            process.wait()
