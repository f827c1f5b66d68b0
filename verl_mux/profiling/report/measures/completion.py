"""When the requests of a step were done: percentiles, and t80 over total, the measure of the long tail.

All times of a group count from its first request's start. A quantile q is the first moment at which at least the part
q of the requests is done.
"""

from __future__ import annotations

import polars as pl

from verl_mux.profiling.plain.step_metrics import QUANTILES

CUT = 1.5  # times the time at which four fifths were done: what runs longer is the tail that a cut would take


def finished(requests: pl.DataFrame) -> pl.DataFrame:
    """Training requests that ran to their end."""
    return requests.filter((pl.col("status") == "complete") & ~pl.col("validate"))


def completion(requests: pl.DataFrame, by: list[str]) -> pl.DataFrame:
    """A row per group of `by`: requests, start, total, p50 .. p99 (seconds since its start), t80_over_total; beyond_cut: requests
    that ended later than CUT times t80, and cut_saves: the part of the group's time after that."""
    done = finished(requests)
    start = pl.col("start").min()
    quantiles = {name: _nearest(pl.col("end"), q) - start for name, q in QUANTILES.items()}
    return (
        done.group_by(by)
        .agg(
            pl.len().alias("requests"),
            start=start,
            total=pl.col("end").max() - start,
            **quantiles,
            beyond_cut=(pl.col("end") - start > CUT * quantiles["p80"]).sum(),
        )
        .with_columns(
            t80_over_total=pl.when(pl.col("total") > 0).then(pl.col("p80") / pl.col("total")).otherwise(1.0),
            cut_saves=pl.when(pl.col("total") > 0).then((1 - CUT * pl.col("p80") / pl.col("total")).clip(0.0)).otherwise(0.0),
        )
        .sort(by)
    )


def _nearest(values: pl.Expr, q: float) -> pl.Expr:
    rank = (q * values.len()).ceil().cast(pl.Int64) - 1
    return values.sort().get(rank.clip(0))
