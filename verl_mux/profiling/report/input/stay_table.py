"""Stays in engines as the analysis wants them, and what a request is over all the steps in which it ran."""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from verl_mux.profiling.report.input.reduction import REQUEST_KEY, Tables

STAY_KEY = ["job", "step", "request_id", "stay"]  # a sample that begins again in a later step counts its stays anew
_FIGURES = ["replica", "node", "queue", "held", "prefill", "decode", "retractions", "version", "prompt", "cached"]


def make_stays(tables: Tables) -> pl.DataFrame:
    """A row a stay, in order of its end: STAY_KEY, worker (the agent loop's, null if only the server told of it), turn,
    start, end, seconds, tokens, cut (it was no end of its turn), _FIGURES; null where neither side says so.

    Times are the engine's where its server logged the stay, else its caller's.
    """
    both = tables.stays.with_columns(
        pl.when(pl.col("seen_by") == "rollout").then("worker").alias("worker"),
        (pl.coalesce("finish_reason", "finish") == "abort").alias("cut"),
        pl.coalesce("replica", pl.when(pl.col("seen_by") == "server").then("worker")).alias("replica"),
    )
    first = [pl.col(name).drop_nulls().first() for name in ("worker", *_FIGURES)]
    times = [pl.col(name).first() for name in ("turn", "start", "end", "seconds", "tokens")]
    # "server" is sorted before "rollout" below, so that the engine's own times stand first.
    stays = both.sort("seen_by", descending=True).group_by(STAY_KEY, maintain_order=True).agg(*times, *first, pl.col("cut").any())
    return stays.sort("end", *STAY_KEY)


def over_steps(tables: Tables) -> Tables:
    """The same tables; a request that ran in several steps belongs, with its turns, to the step in which it ended.

    Only of jobs that log stays: in other logs a request's name may come again in another step.
    """
    logs_stays = (pl.col("stays") > 0).any().over("job")
    spread = tables.requests.filter(logs_stays).group_by("job", "request_id").agg(
        pl.len().alias("steps"), pl.col("step").max().alias("last_step"), pl.col("worker").last().alias("last_worker"),
    ).filter(pl.col("steps") > 1).drop("steps")  # fmt: skip
    if spread.is_empty():
        return tables
    requests = _moved(tables.requests.with_columns(pl.col("step").alias("of_step")), spread)
    # It counts for its last step from when it went on there.
    last = pl.col("of_step") == pl.col("step")
    merged = {
        name: pl.col(name).sum()
        if name in _SUMMED or requests.schema[name] == pl.Float64 and name in _PARTS
        else pl.col(name).min()
        if name == "start"
        else pl.col(name).any()
        if name == "validate"
        else pl.col(name).max()
        for name in tables.requests.columns
        if name not in (*REQUEST_KEY, "at_work")
    }
    merged["at_work"] = pl.col("at_work").filter(last).min()
    whole = requests.group_by(REQUEST_KEY).agg(**merged).select(tables.requests.columns)
    return replace(tables, requests=whole, turns=_turns(tables.turns, spread), timings=_moved(tables.timings, spread))


_SUMMED = ("parked", "stays", "engine_tokens", "engine_calls")
_PARTS = (
    "pending", "preprocess", "engine", "engine_inner", "tool_parse", "tool", "tool_response", "interaction", "postprocess",
    "reward", "finalize",
)  # fmt: skip


def _moved(frame: pl.DataFrame, spread: pl.DataFrame) -> pl.DataFrame:
    """Rows of requests that ran in several steps, under their last step and its worker."""
    joined = frame.join(spread, on=["job", "request_id"], how="left", maintain_order="left")
    return joined.with_columns(
        pl.coalesce("last_step", "step").alias("step"), pl.coalesce("last_worker", "worker").alias("worker")
    ).drop("last_step", "last_worker")


def _turns(turns: pl.DataFrame, spread: pl.DataFrame) -> pl.DataFrame:
    sums = [pl.col(name).sum() for name in turns.columns if name not in (*REQUEST_KEY, "turn", "engine_end")]
    moved = _moved(turns, spread)
    return moved.group_by([*REQUEST_KEY, "turn"]).agg(pl.col("engine_end").max(), *sums).select(turns.columns)
