"""What a job's config says of the people behind it, as its coordinator is told."""

from __future__ import annotations

import math
from datetime import datetime
from typing import Any

from verl_mux.config.schema import MuxConfig
from verl_mux.errors import UserError


def told(mux: MuxConfig, now: datetime) -> dict[str, Any]:
    """Arguments for `connect`. now: with its time zone. Raises UserError for a deadline that is none, or is past."""
    deadline: dict[str, float] = {}
    if isinstance(mux.deadline, str):
        deadline = {"deadline_s": _left_s(mux.deadline, now)}
    elif mux.deadline is not None:
        deadline = {"within_s": _hours_s(mux.deadline)}
    return {"owner": mux.owner, "priority": mux.priority, "budget_usd": mux.budget, **deadline}


def _hours_s(hours: float) -> float:
    if not 0 < hours < math.inf:
        raise UserError(f"mux.deadline is {hours:g}; hours above 0, or a time such as 2026-12-01T08:00 are needed")
    return hours * 3600


def _left_s(given: str, now: datetime) -> float:
    try:
        then = datetime.fromisoformat(given)
    except ValueError:
        raise UserError(f"mux.deadline is {given!r}; hours above 0, or a time such as 2026-12-01T08:00 are needed") from None
    then = then if then.tzinfo is not None else then.replace(tzinfo=now.tzinfo)
    if then <= now:
        raise UserError(f"mux.deadline is {given}, which is past: it is {now.isoformat(timespec='minutes')}")
    return (then - now).total_seconds()
