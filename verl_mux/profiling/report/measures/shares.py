"""Which part of a step each event takes.

A share is event seconds over step seconds, both summed over the step's workers, averaged over steps. A step's seconds
are those of the event that encloses it (`total_step_duration`, `step`); where that is missing, the sum of the others that
the event table knows: an unknown one may enclose them.
"""

from __future__ import annotations

import polars as pl

from verl_mux.profiling.eventlog import events
from verl_mux.profiling.report.input.reduction import Tables

WHOLE = {"rollout": events.TOTAL_STEP, "trainer": events.STEP}
_STEP = ["job", "role", "step"]


def step_shares(tables: Tables) -> pl.DataFrame:
    """A row per job, role, step and event: `seconds` (mean of a worker) and `share` (0 to 1 of the step)."""
    parts = _step_level(tables)
    workers = parts.group_by(_STEP).agg(pl.col("worker").n_unique().alias("workers"), _whole().alias("whole"))
    inside = parts.filter(~pl.col("event").is_in(list(events.ENCLOSING)))
    return (
        inside.group_by(*_STEP, "event")
        .agg(pl.col("seconds").sum())
        .join(workers, on=_STEP)
        .filter(pl.col("whole") > 0)
        .with_columns(pl.col("seconds") / pl.col("workers"), share=pl.col("seconds") / pl.col("whole"))
        .select(*_STEP, "event", "seconds", "share")
        .sort(*_STEP, "event")
    )


def event_share(tables: Tables) -> dict[str, float]:
    """Percent of the step by event, largest first: the mean over the steps of all jobs."""
    steps = step_shares(tables)
    counts = steps.select(_STEP).unique().group_by("role").len("steps")
    means = steps.group_by("role", "event").agg(pl.col("share").sum()).join(counts, on="role")
    means = means.with_columns(percent=100 * pl.col("share") / pl.col("steps")).sort("role")  # rollout before trainer
    found = dict(means.select("event", "percent").iter_rows())
    return dict(sorted(((event, round(percent, 4)) for event, percent in found.items()), key=lambda item: (-item[1], item[0])))


def _step_level(tables: Tables) -> pl.DataFrame:
    """What is logged of steps, requests' events aside. Of a trainer that logs whole steps, only those: init is no step."""
    of_request = pl.col("of_request") | pl.col("event").is_in(list(events.OF_REQUESTS))
    timed = (pl.col("count") > 0) & pl.col("longest").is_not_null() & ~of_request
    whole = (pl.col("event") == events.STEP).any()
    real = (pl.col("role") != "trainer") | whole.over(_STEP) | ~whole.over("job", "role")
    return tables.totals.filter(timed & pl.col("role").is_in(list(WHOLE))).filter(real)


def _whole() -> pl.Expr:
    """Seconds of the step over all workers: each worker's own total, or the sum of its parts."""
    is_whole = pl.col("event").is_in(list(WHOLE.values()))
    has_whole = pl.col("worker").is_in(pl.col("worker").filter(is_whole).implode())
    known = pl.col("event").is_in(list(events.NAMES))
    part = ~pl.col("event").is_in(list(events.ENCLOSING)) & (known | ~known.any())
    inside = part & ~has_whole
    return pl.col("seconds").filter(is_whole).sum() + pl.col("seconds").filter(inside).sum()
