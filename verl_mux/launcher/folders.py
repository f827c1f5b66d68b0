"""A run's folders. Nothing that a run wrote is ever deleted: what the next does not go on with moves to `earlier`.

Runs in the launcher and bench/; called by command.py; makes and moves folders.

<dir>/summary.json, peaks.json, cores.jsonl   the latest run's
<dir>/<job>/, <dir>/coordinator/              the latest run's
<dir>/earlier/<when>/                         the same of an earlier run; <when>: when it last changed
"""

from __future__ import annotations

import fcntl
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from verl_mux.errors import UserError
from verl_mux.launcher.marked_process import left_exit_code, read_note, runs
from verl_mux.launcher.run_file import COORDINATOR, EARLIER, RunFile

# In every folder that a run made, so that a later one may move it.
_MARK = ".verl_mux_run"
RESULTS = ("summary.json", "peaks.json", "cores.jsonl")
# What a run that goes on keeps writing to; the rest of the coordinator's folder belongs to its start.
_COORDINATOR_LOG = "events"


@contextmanager
def watched(directory: Path) -> Iterator[None]:
    """No other launcher runs in `directory` meanwhile. The lock ends with the process, however that ends.

    Raises:
        UserError: another launcher does.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {directory}: {error.strerror}; choose another `dir`") from None
    with (directory / ".lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"another `verl-mux run` watches the jobs in {directory}; end it, or choose another `dir`") from None
        yield


def make_room(run: RunFile) -> None:
    """An empty place for a run that starts anew; for one that resumes, its jobs' folders as they are.

    Raises:
        UserError: a folder of that name is there, and no run made it.
    """
    directory = run.directory
    folders = [directory / name for name in (COORDINATOR, *run.jobs, *run.fillers)]
    _refuse_others(folders)
    if run.resume:
        moving = [path for path in (directory / COORDINATOR).glob("*") if path.name not in (_MARK, _COORDINATOR_LOG)]
    else:  # jobs that the run file does not name any more were part of that run too
        moving = [mark.parent for mark in sorted(directory.glob(f"*/{_MARK}"))]
    _move_earlier(directory, [*(directory / name for name in RESULTS), *moving])
    _make(folders)


def make_folder(directory: Path, name: str) -> None:
    """An empty folder for a job that is no run's. Raises UserError as `make_room`."""
    _refuse_others([directory / name])
    _move_earlier(directory, [directory / name])
    _make([directory / name])


def unfinished(run: RunFile) -> list[str]:
    """Jobs that a launcher that is no more started and that were not seen to their end. Empty where none of them is alive,
    unless all have ended well since: then only the summary is missing."""
    if not under_way(run.directory).exists():
        return []
    begun = [name for name in run.jobs if read_note(run.directory / name)]
    alive = any(runs(run.directory / name) for name in begun)
    well = len(begun) == len(run.jobs) and all(left_exit_code(run.directory / name) == 0 for name in begun)
    return begun if alive or well else []


def under_way(directory: Path) -> Path:
    """There from a run's start until its summary is written; holds what was started."""
    return directory / COORDINATOR / "under_way.json"


def _refuse_others(folders: list[Path]) -> None:
    for folder in folders:
        ours = (folder / _MARK).exists() or (folder.is_dir() and not any(folder.iterdir()))
        if folder.exists() and not ours:
            raise UserError(f"{folder} exists and was not made by verl-mux run; choose another `dir` or name, or move it away")


def _make(folders: list[Path]) -> None:
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _MARK).touch()


def _move_earlier(directory: Path, paths: list[Path]) -> None:
    moving = [path for path in paths if path.exists()]
    if not moving:
        return
    place = _place(directory, max(path.stat().st_mtime for path in moving))
    for path in moving:
        target = place / path.relative_to(directory)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, target)
    print(f"an earlier run's files are now in {place}", file=sys.stderr)


def _place(directory: Path, last: float) -> Path:
    """A new folder named after the time at which the earlier run last wrote."""
    when = datetime.fromtimestamp(last).strftime("%Y-%m-%dT%H-%M-%S")
    places = (directory / EARLIER / name for name in (when, *(f"{when}_{number}" for number in range(2, 1000))))
    place = next(place for place in places if not place.exists())
    place.mkdir(parents=True)
    return place
