"""Clocks of hosts that differ: every process's times are moved to the clock of the job's first agent loop worker.

A stay that its caller and its engine's server both logged ends on both at once, which tells a server's clock beside a
worker's, and one worker's beside another's. Without such stays: workers begin a step together. Runs in the report; called by
run_log.py; pure.
"""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from verl_mux.profiling.report.input.reduction import STAY_KEY, Tables, numbered_stays

LEAST_S = 3.0  # less is no other clock: a way through the network, lines of threads
LEAST_START_S = 30.0  # of workers' first events, which are further apart in healthy runs
MIN_STAYS = 4
MIN_STEPS = 3
ALIKE_S = 5.0  # how far a worker's steps may differ in what they say of its clock

Clock = tuple[str, str, int]  # job, role, worker


def aligned(tables: Tables) -> tuple[Tables, dict[Clock, float]]:
    """The same tables by one clock, and how far ahead each clock was that was moved, in seconds."""
    ahead, linked = _by_stays(tables)
    for (job, _, worker), by in _by_starts(tables, ahead).items():
        group = linked.get((job, "rollout", worker), (job, "rollout", worker))
        same = [clock for clock, of in linked.items() if of == group] or [(job, "rollout", worker)]
        if (job, "rollout", worker) == group:  # a worker stands for those that share servers with it
            ahead |= {clock: ahead.get(clock, 0.0) + by for clock in same}
    ahead = {clock: by for clock, by in ahead.items() if abs(by) >= LEAST_S}
    if not ahead:
        return tables, {}
    columns = {"job": pl.String, "role": pl.String, "worker": pl.Int64, "by": pl.Float64}
    offsets = pl.DataFrame([(*clock, by) for clock, by in ahead.items()], columns, orient="row")
    times = {"requests": "start at_work last completed aborted reward_end", "turns": "engine_end", "calls": "end"}
    times |= {"totals": "first last", "spans": "start end", "stays": "start end"}
    moved = {name: _moved(getattr(tables, name), offsets, columns.split()) for name, columns in times.items()}
    return replace(tables, **moved), ahead


def _moved(frame: pl.DataFrame, offsets: pl.DataFrame, columns: list[str]) -> pl.DataFrame:
    role = "role" if "role" in frame.columns else pl.lit("rollout").alias("role")
    if "seen_by" in frame.columns:
        role = pl.when(pl.col("seen_by") == "rollout").then(pl.lit("rollout")).otherwise(pl.lit("server")).alias("role")
    keyed = frame.with_columns(role).join(offsets, on=["job", "role", "worker"], how="left", maintain_order="left")
    return keyed.with_columns(pl.col(columns) - pl.col("by").fill_null(0.0)).select(frame.columns)


def _by_stays(tables: Tables) -> tuple[dict[Clock, float], dict[Clock, Clock]]:
    """How far ahead each clock is of that of the first worker with which it shares servers, and which worker that is."""
    stays = numbered_stays(tables.stays).select(*STAY_KEY, "seen_by", "worker", "end")
    served, called = (stays.filter(pl.col("seen_by") == side).drop("seen_by") for side in ("server", "rollout"))
    pairs = called.join(served, on=STAY_KEY, suffix="_served").with_columns(by=pl.col("end_served") - pl.col("end"))
    between = pairs.group_by("job", "worker", "worker_served").agg(pl.len().alias("n"), pl.col("by").median())
    between = between.filter(pl.col("n") >= MIN_STAYS)
    beside: dict[Clock, dict[Clock, float]] = {}
    for job, worker, server, _, by in between.sort("worker", "worker_served").rows():
        caller, engine = (job, "rollout", worker), (job, "server", server)
        beside.setdefault(caller, {})[engine] = by
        beside.setdefault(engine, {})[caller] = -by
    ahead: dict[Clock, float] = {}
    linked: dict[Clock, Clock] = {}
    for first in beside:  # the first of those that share servers is a worker
        left = [] if first in ahead else [(first, 0.0)]
        while left:
            clock, by = left.pop()
            if clock not in ahead:
                ahead[clock], linked[clock] = by, first
                left += [(other, by + beyond) for other, beyond in beside[clock].items()]
    return ahead, linked


def _by_starts(tables: Tables, ahead: dict[Clock, float]) -> dict[Clock, float]:
    """Of workers, beside the first one's starts."""
    known = pl.DataFrame(
        [(job, worker, by) for (job, role, worker), by in ahead.items() if role == "rollout"],
        {"job": pl.String, "worker": pl.Int64, "by": pl.Float64}, orient="row",
    )  # fmt: skip
    starts = tables.requests.group_by("job", "step", "worker").agg(pl.col("start", "at_work").min())
    starts = starts.join(known, on=["job", "worker"], how="left")
    starts = starts.with_columns(pl.coalesce("at_work", "start") - pl.col("by").fill_null(0.0)).sort("worker")
    late = starts.with_columns(by=pl.col("at_work") - pl.col("at_work").first().over("job", "step"))
    found = late.group_by("job", "worker").agg(
        pl.len().alias("n"), pl.col("by").median(), wide=pl.col("by").max() - pl.col("by").min()
    )
    rows = found.filter((pl.col("n") >= MIN_STEPS) & (pl.col("wide") <= ALIKE_S) & (pl.col("by").abs() >= LEAST_START_S))
    return {(job, "rollout", worker): by for job, worker, _, by, _ in rows.rows()}
