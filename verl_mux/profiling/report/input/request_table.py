"""Requests and turns as the analysis wants them: one end, one number of seconds, one number of tokens each."""

from __future__ import annotations

import polars as pl

from verl_mux.profiling.report.input.reduction import REQUEST_KEY, Tables

# The parts a request's time divides into, in the order of its life; `other` is what no event accounts for.
SHOWN_PARTS = [
    "pending", "preprocess", "engine", "postprocess", "tool_parse",
    "tool", "tool_response", "interaction", "reward", "finalize", "other",
]  # fmt: skip


def make_requests(tables: Tables, turns: pl.DataFrame) -> pl.DataFrame:
    """A row a request, in order of its end: REQUEST_KEY, start, end, seconds, status, turns, stays, tokens, score, parts, ...

    Where stays are logged, `start` is when it began to run, in the step in which it ended, and `seconds` leaves out the time in
    which it was parked. status: "complete", "aborted", or "open" (its end was never logged; `end` is then its last event).
    Where a job logs
    no ends at all, the last event counts as the end. `turns` is what `make_turns` made of the same tables.
    """
    raw = tables.requests.with_columns(pl.col("completed").is_not_null().any().over("job").alias("ends_logged"))
    complete = pl.col("completed").is_not_null() | ~pl.col("ends_logged") & pl.col("aborted").is_null()
    status = pl.when(complete).then(pl.lit("complete")).when(pl.col("aborted").is_not_null()).then(pl.lit("aborted"))
    frame = raw.with_columns(
        status.otherwise(pl.lit("open")).alias("status"),
        pl.coalesce("completed", "aborted", "last").alias("end"),
        pl.coalesce("final_tokens", pl.col("engine_tokens").replace(0, None)).alias("tokens"),
        pl.when(pl.col("engine_calls") > 0).then("engine").otherwise("engine_inner").alias("engine"),
        (pl.col("postprocess") - pl.col("tool_parse")).clip(0.0).alias("postprocess"),
        # Our own finalization holds the reward; that of others follows it.
        pl.when(pl.col("stays") > 0)
        .then((pl.col("finalize") - pl.col("reward")).clip(0.0))
        .otherwise("finalize")
        .alias("finalize"),
        _turn_count(tables, turns).alias("turns"),
    )
    own = (pl.col("stays") > 0) & pl.col("at_work").is_not_null()
    frame = frame.with_columns(
        pl.when(own).then((pl.coalesce("seconds", pl.col("end") - pl.col("start")) - pl.col("parked")).clip(0.0)).otherwise(
            pl.coalesce("seconds", pl.col("end") - pl.col("start"))
        ).alias("seconds"),
        pl.when(own).then("at_work").otherwise("start").alias("start"),
    )  # fmt: skip
    accounted = pl.sum_horizontal(part for part in SHOWN_PARTS if part != "other")
    times, figures = ["start", "end", "seconds", "reward_end"], ["tokens", "score", "prompt_id"]
    return (
        frame.with_columns((pl.col("seconds") - accounted).clip(0.0).alias("other"))
        .select(*REQUEST_KEY, *times, "status", "turns", "stays", *figures, "parked", "validate", *SHOWN_PARTS)
        .sort("end", *REQUEST_KEY)
    )


def _turn_count(tables: Tables, turns: pl.DataFrame) -> pl.Expr:
    counted = turns.group_by(REQUEST_KEY).agg(pl.col("turn").max().alias("turns"))
    found = tables.requests.select(REQUEST_KEY).join(counted, on=REQUEST_KEY, how="left", maintain_order="left")
    return pl.coalesce("turns", pl.lit(found["turns"]))


def make_turns(tables: Tables) -> pl.DataFrame:
    """A row a turn that called the engine: REQUEST_KEY, turn (1 is the first), engine (seconds), end, tokens.

    Where turns are known only from the list in a request's last event, `end` is added up from the turns before, and null
    where that list has no whole durations.
    """
    called = tables.turns.filter(pl.col("engine_end").is_not_null()).sort(*REQUEST_KEY, "turn", maintain_order=True)
    logged = called.select(
        *REQUEST_KEY,
        _place_in_request().alias("turn"),
        "engine",
        pl.col("engine_end").alias("end"),
        pl.col("turn_tokens").replace(0, None).alias("tokens"),
    )
    if tables.timings.is_empty():
        return logged
    listed = tables.timings.join(logged.select(REQUEST_KEY).unique(), on=REQUEST_KEY, how="anti").select(
        *REQUEST_KEY,
        pl.col("place").alias("turn"),
        pl.col("engine").fill_null(0.0),
        pl.col("engine_end").alias("end"),
        pl.lit(None, pl.Int64).alias("tokens"),
    )
    return pl.concat([logged, listed]).sort(*REQUEST_KEY, "turn")


def _place_in_request() -> pl.Expr:
    """1, 2, ... within each request, of rows sorted by request: far cheaper than a window over millions of names."""
    row = pl.int_range(pl.len())
    first = pl.any_horizontal(pl.col(key).ne_missing(pl.col(key).shift()) for key in REQUEST_KEY)
    return row - pl.when(first | (row == 0)).then(row).forward_fill() + 1
