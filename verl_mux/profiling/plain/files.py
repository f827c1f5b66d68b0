"""Which files under a directory are event logs, and what their paths say of job, role, step and worker.

    DIR/step_3/worker_0.jsonl                       the plain layout: role "rollout", job ""
    DIR/a/events/trainer/step_3/worker_0.jsonl      a run directory: role "trainer", job "a"
    .../worker_0.1.jsonl                            a rotated part of worker_0.jsonl
    DIR/worker_0.jsonl                              no step directory: step 0, unless its lines name theirs

What a line says of itself (keys `job`, `role`, `step`, `workid`) comes before what its path says.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from verl_mux.errors import UserError

ROLES = ("trainer", "rollout", "server", "coordinator", "agent")
MAX_STEP = 10**9 - 1
_STEP = re.compile(r"step_(\d{1,9})")
_WORKER = re.compile(r"worker_(\d{1,9})(?:\.\d+)?\.jsonl")


@dataclass(frozen=True)
class LogFile:
    """One file, its size in bytes, and what its path says."""

    path: str
    size: int
    job: str
    role: str
    step: int
    worker: int


def find_log_files(directory: str | os.PathLike) -> list[LogFile]:
    """All event logs under `directory`, ordered by job, role, step, worker. May be empty.

    Raises UserError when `directory` is not a directory.
    """
    root = Path(directory)
    if not root.is_dir():
        given = "is a file" if root.exists() else "does not exist"
        raise UserError(f"{root} {given}: give a directory that holds step_<N>/worker_<R>.jsonl, at any depth")
    return sorted(_walk(root.absolute()), key=lambda file: (file.job, file.role, file.step, file.worker, file.path))


def find_step_files(directory: str | os.PathLike, step: int) -> list[LogFile]:
    """The logs of one step of a job's event directory, found without looking through those of its other steps."""
    root = Path(directory).absolute()
    folders = [root, *(root / role for role in ROLES)]
    return [file for folder in folders for file in _walk(folder / f"step_{step}")]


def _walk(root: Path) -> Iterator[LogFile]:
    for folder, _, names in os.walk(root):
        step = _STEP.fullmatch(os.path.basename(folder))
        job, role = _job_and_role(root, Path(folder).parent if step else Path(folder))
        for name in names:
            worker = _WORKER.fullmatch(name)
            path = os.path.join(folder, name)
            if worker is not None and os.path.isfile(path):
                yield LogFile(path, os.path.getsize(path), job, role, int(step[1]) if step else 0, int(worker[1]))


def _job_and_role(root: Path, parent: Path) -> tuple[str, str]:
    """`parent` holds the step directories; the job's name may stand above `root`."""
    role = parent.name if parent.name in ROLES else ""
    home = parent.parent if role else parent
    if home.name == "events":
        return printable(home.parent.name), role or "rollout"
    if not home.is_relative_to(root) or home == root:
        return "", role or "rollout"
    return printable(home.relative_to(root).as_posix()), role or "rollout"


def printable(name: str) -> str:
    """Names of files may hold bytes that are no text; those are spelled out."""
    return name.encode("utf-8", "backslashreplace").decode()
