"""Requests' whole lives for the page: stays in engines, tools, rewards, as packed stretches of time.

Each request drawn has its life in the page, up to MAX_STRETCHES in all: what findings name first, then the longest.
"""

from __future__ import annotations

from typing import Any

import polars as pl

from verl_mux.profiling.report.measures.analysis import Analysis
from verl_mux.profiling.report.output.page.requests import NO_LANE, Shown, pack

MAX_STRETCHES = 600_000
LEAST_S = 1e-3  # shorter stretches are not shown
WHAT = {"queue": 0, "engine": 1, "engine, cut off": 2, "tool": 3, "reward": 4}
_COLUMNS = {"turn": pl.Float64, "stay": pl.Int64, "replica_lane": pl.UInt32, "value": pl.Float64}


def lives(analysis: Analysis, found: Shown) -> dict[str, Any]:
    """`names` of the requests kept, `kept` and `counts` (of their stretches) a row a request drawn, and the stretches in order of
    request and start: what (WHAT), at (seconds since the request's start), took, turn, stay, replica (lane), value (tokens of a
    stay, score of a reward; NaN if unknown). Where no stays were logged, a turn's engine call stands for them."""
    frame = found.frame
    parts = [*_stays(analysis, found), *_turns(analysis, frame), _rewards(frame, analysis)]
    every = pl.concat([_stretches(part) for part in parts]).filter(pl.col("took") >= LEAST_S)
    every = every.join(_kept(frame, every), on="index", how="semi").sort("index", "at", "what")
    counts = every.group_by("index").len("count")
    kept = _kept(frame, every)
    table = frame.select("index").join(counts, on="index", how="left").join(kept, on="index", how="left").sort("index")
    return {
        "names": frame.filter(pl.lit(table["kept"].fill_null(False)))["request_id"].to_list(),
        "kept": pack(table["kept"].fill_null(False), "<u1"),
        "counts": pack(table["count"].fill_null(0), "<u2"),
        "what": pack(every["what"], "<u1"),
        "at": pack(every["at"], "<f4"),
        "took": pack(every["took"], "<f4"),
        "turn": pack(every["turn"].fill_null(0).clip(0, 255), "<u1"),
        "stay": pack(every["stay"].fill_null(0).clip(0, 2**16 - 1), "<u2"),
        "replica": pack(every["replica_lane"].fill_null(NO_LANE), "<u2"),
        "value": pack(every["value"].fill_null(float("nan")), "<f4"),
    }


def _kept(frame: pl.DataFrame, stretches: pl.DataFrame) -> pl.DataFrame:
    """`index` and `kept` of the requests whose stretches fit, the most wanted first."""
    size = stretches.group_by("index").len("size")
    ranked = frame.join(size, on="index", how="left").sort("urgent", "seconds", descending=True)
    fits = pl.col("size").fill_null(1).cast(pl.Int64).cum_sum() <= MAX_STRETCHES
    return ranked.filter(fits).select("index", pl.lit(True).alias("kept"))


def _stretches(part: pl.DataFrame) -> pl.DataFrame:
    """`index`, `what`, `at`, `took` and _COLUMNS; `part` has times as `from`, `to` and `start` of its request."""
    missing = [pl.lit(None, kind).alias(name) for name, kind in _COLUMNS.items() if name not in part.columns]
    return part.with_columns(*missing).select(
        pl.col("index").cast(pl.UInt32),
        pl.col("what").cast(pl.Int32),
        (pl.col("from") - pl.col("start")).alias("at"),
        (pl.col("to") - pl.col("from")).alias("took"),
        *(pl.col(name).cast(kind) for name, kind in _COLUMNS.items()),
    )


def _stays(analysis: Analysis, found: Shown) -> list[pl.DataFrame]:
    """Of all steps of the request, for it may have begun in an earlier one."""
    own = found.frame.select("index", "job", "request_id", pl.col("start").alias("began"))
    stays = analysis.stays.join(own, on=["job", "request_id"])
    lanes = pl.DataFrame(
        [(job, replica, lane) for lane, (job, replica, _) in enumerate(found.replicas)],
        {"job": pl.String, "replica": pl.Int64, "replica_lane": pl.UInt32},
        orient="row",
    )
    waited = pl.col("queue").fill_null(0.0) + pl.col("held").fill_null(0.0)
    stays = stays.join(lanes, on=["job", "replica"], how="left").with_columns(
        pl.min_horizontal(pl.col("start") + waited, "end").alias("let_in"), pl.col("start").alias("from")
    )
    engine = pl.when("cut").then(WHAT["engine, cut off"]).otherwise(WHAT["engine"]).alias("what")
    stays = stays.with_columns(pl.col("began").alias("start"), pl.col("tokens").alias("value"), engine)
    return [
        stays.with_columns(pl.lit(WHAT["queue"]).alias("what"), pl.col("let_in").alias("to"), pl.lit(None).alias("value")),
        stays.with_columns(pl.col("let_in").alias("from"), pl.col("end").alias("to")),
    ]


def _turns(analysis: Analysis, frame: pl.DataFrame) -> list[pl.DataFrame]:
    """A turn's tools begin where its last engine call ended."""
    key = ["job", "step", "request_id"]
    own = frame.select("index", *key, "start")
    out = []
    if analysis.stays.is_empty():
        calls = analysis.turns.join(own, on=key).filter(pl.col("end").is_not_null())
        times = [(pl.col("end") - pl.col("engine")).alias("from"), pl.col("end").alias("to"), pl.col("tokens").alias("value")]
        out.append(calls.with_columns(pl.lit(WHAT["engine"]).alias("what"), *times))
    tools = analysis.tables.turns.join(own, on=key).filter((pl.col("tool") > 0) & pl.col("engine_end").is_not_null())
    times = [pl.col("engine_end").alias("from"), (pl.col("engine_end") + pl.col("tool")).alias("to")]
    return [*out, tools.with_columns(pl.lit(WHAT["tool"]).alias("what"), *times)]


def _rewards(frame: pl.DataFrame, analysis: Analysis) -> pl.DataFrame:
    scored = frame.filter((pl.col("reward") > 0) & pl.col("reward_end").is_not_null())
    times = [(pl.col("reward_end") - pl.col("reward")).alias("from"), pl.col("reward_end").alias("to")]
    return scored.with_columns(pl.lit(WHAT["reward"]).alias("what"), *times, pl.col("score").alias("value")).drop("turns")
