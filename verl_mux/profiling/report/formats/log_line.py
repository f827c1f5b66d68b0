"""A line of an event log, as the readers of other programs' files make it. Runs on the command line; called by them; pure."""

from __future__ import annotations

from datetime import datetime
from typing import Any


def log_line(
    end: datetime, event: str, seconds: float, extra: dict[str, Any], step: int, role: str, worker: int = 0, job: str = ""
) -> dict[str, Any]:
    """The JSON object. end: the log's own local time, without a zone. seconds: of what ended then, at least 0."""
    return {
        "timestamp": end.replace(tzinfo=None).isoformat(timespec="microseconds"), "event": event,
        "duration_sec": max(seconds, 0.0), "extra": extra, "workid": worker, "step": step, "role": role, "job": job,
    }  # fmt: skip
