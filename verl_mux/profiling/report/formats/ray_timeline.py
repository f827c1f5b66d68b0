"""Ray's timeline (`ray timeline`): a JSON array of Chrome trace events, in microseconds. A task becomes an event of the
trainer under its own name, its worker process a rank; the log has no steps, so the n-th call of a task on a worker is of step
n. Runs on the command line; called by foreign.py; reads one file.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from verl_mux.errors import UserError
from verl_mux.profiling.report.formats.log_line import log_line


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Lines of an event log, as JSON objects. Raises UserError for a file that is torn."""
    try:
        traced = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no JSON array of trace events: {error}") from None
    tasks = [row for row in traced if isinstance(row, dict) and row.get("ph") == "X" and _is_task(row)]
    ranks: dict[str, dict[str, int]] = {}  # task -> worker process -> rank, for a task runs on few of all workers
    calls: Counter[tuple[str, str]] = Counter()
    for row in sorted(tasks, key=lambda row: row["ts"]):
        name, process = str(row["cat"]).removeprefix("task::"), f"{row.get('pid')} {row.get('tid')}"
        of_task = ranks.setdefault(name, {})
        calls[name, process] += 1
        end = datetime.fromtimestamp((row["ts"] + row["dur"]) / 1e6, tz=timezone.utc)
        rank, about = of_task.setdefault(process, len(of_task)), {"node": str(row.get("pid"))}
        yield log_line(end, name, row["dur"] / 1e6, about, calls[name, process], "trainer", rank)


def _is_task(row: dict[str, Any]) -> bool:
    """A whole task, not one of its phases (fetching arguments, storing outputs)."""
    timed = all(isinstance(row.get(key), (int, float)) for key in ("ts", "dur"))
    return timed and str(row.get("cat", "")).startswith("task::") and row["dur"] >= 0
