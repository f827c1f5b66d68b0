"""What other jobs of the same run directory did meanwhile: `RUN/<job>/events`, as `verl-mux run` and `submit` lay them out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from verl_mux.profiling.eventlog import events
from verl_mux.profiling.plain.files import find_step_files
from verl_mux.profiling.plain.lines import Line, read_lines

_CLOCKS_S = 60.0  # a file server's clock may be another than the jobs'


def phases_beside(directory: Path, since: float) -> Iterator[Line]:
    """Phases of other jobs that ended after `since` (seconds since the epoch), where `directory` is this job's `events`.

    Files that were last written before are not opened. None where the jobs' logs do not lie in one run directory. Raises OSError.
    """
    if directory.name != "events":
        return
    for trainer in directory.parent.parent.glob("*/events/trainer"):
        if trainer.parent == directory:
            continue
        for step in trainer.glob("step_*"):
            if step.name[5:].isdigit() and _last_written(step) > since - _CLOCKS_S:
                lines = read_lines(find_step_files(trainer, int(step.name[5:])))
                yield from (line for line in lines if line.event == events.PHASE and line.end > since)


def _last_written(step: Path) -> float:
    return max((file.stat().st_mtime for file in step.glob("worker_*.jsonl")), default=0.0)
