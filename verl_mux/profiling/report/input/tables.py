"""Requests, turns and stays as the analysis uses them: one end, one duration and one token count each. Called by
measures/analysis.py; pure.
"""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from verl_mux.profiling.report.input.reduction import REQUEST_KEY, REQUEST_MERGE, TURN_MERGE, Tables

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


STAY_KEY = ["job", "step", "request_id", "stay"]  # a sample that begins again in a later step counts its stays anew
_FIGURES = ["replica", "node", "queue", "held", "prefill", "decode", "retractions", "version", "prompt", "cached"]


def make_stays(tables: Tables) -> pl.DataFrame:
    """A row a stay, in order of its end: STAY_KEY, worker (the agent loop's, null if only the server logged it), turn,
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
    # A request counts for its last step from when it went on there.
    merged = REQUEST_MERGE | {"at_work": pl.col("at_work").filter(pl.col("of_step") == pl.col("step")).min()}
    whole = requests.group_by(REQUEST_KEY).agg(**merged).select(tables.requests.columns)
    turns = _moved(tables.turns, spread).group_by([*REQUEST_KEY, "turn"]).agg(**TURN_MERGE)
    return replace(tables, requests=whole, turns=turns.select(tables.turns.columns), timings=_moved(tables.timings, spread))


def _moved(frame: pl.DataFrame, spread: pl.DataFrame) -> pl.DataFrame:
    """Rows of requests that ran in several steps, under their last step and its worker."""
    joined = frame.join(spread, on=["job", "request_id"], how="left", maintain_order="left")
    return joined.with_columns(
        pl.coalesce("last_step", "step").alias("step"), pl.coalesce("last_worker", "worker").alias("worker")
    ).drop("last_step", "last_worker")
